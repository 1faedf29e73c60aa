"""`deepspeed.checkpointing`: the names of `deepspeed.runtime.activation_checkpointing.checkpointing`."""

from __future__ import annotations

from typing import Any

from fzero.deepspeed.runtime.activation_checkpointing import checkpointing
from fzero.deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]


def __getattr__(name: str) -> Any:
    return getattr(checkpointing, name)
