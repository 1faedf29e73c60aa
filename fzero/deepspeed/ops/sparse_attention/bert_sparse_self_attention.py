"""`deepspeed.ops.sparse_attention.bert_sparse_self_attention`."""

from fzero.deepspeed.ops.sparse_attention.sparse_attention_utils import BertSparseSelfAttention

__all__ = ["BertSparseSelfAttention"]
