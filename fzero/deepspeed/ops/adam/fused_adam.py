"""`deepspeed.ops.adam.fused_adam`."""

from fzero.deepspeed.engine.deepspeed_optimizers import FusedAdam

__all__ = ["FusedAdam"]
