"""`deepspeed.ops`: optimizers and sparse attention under DeepSpeed's names."""

from __future__ import annotations

from fzero.deepspeed.git_version_info import compatible_ops
from fzero.deepspeed.ops import adagrad, adam, lion, sparse_attention

__compatible_ops__ = compatible_ops
__all__ = ["adagrad", "adam", "lion", "sparse_attention"]
