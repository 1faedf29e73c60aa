"""`deepspeed.ops.lion.fused_lion`."""

from fzero.deepspeed.ops.lion.optimizers import FusedLion

__all__ = ["FusedLion"]
