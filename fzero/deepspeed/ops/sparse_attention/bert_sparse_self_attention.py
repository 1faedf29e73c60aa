"""`deepspeed.ops.sparse_attention.bert_sparse_self_attention`."""

from fzero.attention.bert import BertSparseSelfAttention

__all__ = ["BertSparseSelfAttention"]
