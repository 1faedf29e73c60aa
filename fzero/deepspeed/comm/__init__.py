"""`deepspeed.comm`: torch.distributed, and DeepSpeed's additions to it."""

from __future__ import annotations

from typing import Any

from fzero.deepspeed.comm import comm
from fzero.deepspeed.comm.comm import get_rank, get_world_size, init_distributed, log_summary

__all__ = ["comm", "get_rank", "get_world_size", "init_distributed", "log_summary"]


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
