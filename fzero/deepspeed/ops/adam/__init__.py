"""`deepspeed.ops.adam`: Adam under DeepSpeed's names."""

from __future__ import annotations

from fzero.deepspeed.ops.adam.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
