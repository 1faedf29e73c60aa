"""`deepspeed.accelerator`: the device of this process."""

from __future__ import annotations

from fzero.deepspeed.accelerator.real_accelerator import (
    Accelerator,
    DeepSpeedAccelerator,
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)

__all__ = [
    "Accelerator",
    "DeepSpeedAccelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]
