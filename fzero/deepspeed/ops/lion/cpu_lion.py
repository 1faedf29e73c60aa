"""`deepspeed.ops.lion.cpu_lion`."""

from fzero.deepspeed.engine.deepspeed_optimizers import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
