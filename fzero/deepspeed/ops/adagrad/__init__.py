"""`deepspeed.ops.adagrad`: Adagrad under DeepSpeed's name."""

from __future__ import annotations

from fzero.deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
