"""`deepspeed.ops`: optimizers under DeepSpeed's names."""

from __future__ import annotations

from fzero.deepspeed.ops import adam

__all__ = ["adam"]
