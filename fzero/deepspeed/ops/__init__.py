"""`deepspeed.ops`: optimizers and sparse attention under DeepSpeed's names."""

from __future__ import annotations

from fzero.deepspeed.ops import adagrad, adam, lion, sparse_attention

__all__ = ["adagrad", "adam", "lion", "sparse_attention"]
