"""`deepspeed.ops.adagrad.cpu_adagrad`."""

from fzero.engine.deepspeed_optimizers import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
