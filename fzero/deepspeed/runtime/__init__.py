"""`deepspeed.runtime`: some functions in DeepSpeed's places."""

from __future__ import annotations

from fzero.deepspeed.runtime import lr_schedules, utils, zero

__all__ = ["lr_schedules", "utils", "zero"]
