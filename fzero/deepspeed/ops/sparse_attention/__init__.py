"""`deepspeed.ops.sparse_attention`: sparse attention under DeepSpeed's names; see
`fzero.attention`.
"""

from __future__ import annotations

from fzero.deepspeed.ops.sparse_attention.sparse_attention_utils import (
    BertSparseSelfAttention,
    SparseAttentionUtils,
)
from fzero.deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from fzero.deepspeed.ops.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
]
