"""`deepspeed.ops.adam`: Adam under DeepSpeed's names."""

from __future__ import annotations

from fzero.deepspeed.engine.deepspeed_optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
