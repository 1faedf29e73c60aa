"""`deepspeed.ops.lion.cpu_lion`."""

from fzero.deepspeed.ops.lion.optimizers import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
