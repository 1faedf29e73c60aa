"""`deepspeed.ops.adam.fused_adam`."""

from fzero.engine.deepspeed_optimizers import FusedAdam

__all__ = ["FusedAdam"]
