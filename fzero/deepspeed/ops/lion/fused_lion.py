"""`deepspeed.ops.lion.fused_lion`."""

from fzero.deepspeed.engine.deepspeed_optimizers import FusedLion

__all__ = ["FusedLion"]
