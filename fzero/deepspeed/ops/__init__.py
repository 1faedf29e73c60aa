"""`deepspeed.ops`: optimizers under DeepSpeed's names."""

from __future__ import annotations

from fzero.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
