"""`deepspeed.ops.adam.fused_adam`."""

from fzero.deepspeed.ops.adam.optimizers import FusedAdam

__all__ = ["FusedAdam"]
