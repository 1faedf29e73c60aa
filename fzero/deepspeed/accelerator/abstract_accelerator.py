"""`deepspeed.accelerator.abstract_accelerator`: the class of `get_accelerator()`."""

from fzero.deepspeed.accelerator.real_accelerator import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
