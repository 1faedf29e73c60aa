"""`deepspeed.ops.sparse_attention.sparse_attention_utils`."""

from fzero.attention.bert import SparseAttentionUtils

__all__ = ["SparseAttentionUtils"]
