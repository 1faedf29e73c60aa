"""`deepspeed.ops.lion`: Lion under DeepSpeed's names."""

from __future__ import annotations

from fzero.deepspeed.engine.deepspeed_optimizers import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
