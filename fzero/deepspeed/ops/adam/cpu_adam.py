"""`deepspeed.ops.adam.cpu_adam`."""

from fzero.deepspeed.ops.adam.optimizers import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
