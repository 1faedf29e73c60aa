"""`deepspeed.ops.sparse_attention.sparse_self_attention`."""

from fzero.attention.modules import SparseSelfAttention

__all__ = ["SparseSelfAttention"]
