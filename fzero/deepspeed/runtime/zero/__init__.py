"""`deepspeed.runtime.zero`: DeepSpeed's estimates of memory."""

from __future__ import annotations

from fzero.deepspeed.runtime.zero import stage3, stage_1_and_2

__all__ = ["stage3", "stage_1_and_2"]
