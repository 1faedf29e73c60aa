"""`deepspeed.ops.adam.cpu_adam`."""

from fzero.engine.deepspeed_optimizers import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
