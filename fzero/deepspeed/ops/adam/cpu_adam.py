"""`deepspeed.ops.adam.cpu_adam`."""

from fzero.deepspeed.engine.deepspeed_optimizers import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
