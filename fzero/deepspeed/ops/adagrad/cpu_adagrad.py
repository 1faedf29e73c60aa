"""`deepspeed.ops.adagrad.cpu_adagrad`."""

from fzero.deepspeed.engine.deepspeed_optimizers import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
