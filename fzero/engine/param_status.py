"""The attributes of parameters that DeepSpeed's stage 3 sets, and by which scripts ask what a rank holds."""

from __future__ import annotations

from enum import Enum

from torch import nn


class ZeroParamStatus(Enum):
    """Whether a rank holds the values of a parameter now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_SET = ("ds_id", "ds_status", "ds_numel", "ds_shape", "ds_persist")


def mark(param: nn.Parameter, index: int, *, is_here: bool, persists: bool) -> None:
    """Sets `ds_id`, `ds_status`, `ds_numel`, `ds_shape` and `ds_persist`."""
    status = ZeroParamStatus.AVAILABLE if is_here else ZeroParamStatus.NOT_AVAILABLE
    values = (index, status, param.numel(), param.shape, persists)
    param.__dict__.update(zip(_SET, values, strict=True))


def unmark(param: nn.Parameter) -> None:
    """Removes them."""
    for name in _SET:
        param.__dict__.pop(name, None)
