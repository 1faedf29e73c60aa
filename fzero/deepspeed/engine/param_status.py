"""The attributes that DeepSpeed's stage 3 sets on parameters. Scripts read them to
learn what a rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn


class ZeroParamStatus(Enum):
    """Whether a rank holds the values of a parameter now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@contextmanager
def available() -> Iterator[None]:
    """Inside, `ds_status` of a tensor without one is AVAILABLE: in a forward or
    backward of stage 3 code gets parameters with their values, in tensors that are not
    the module's own (TRL's fused losses ask for it).
    """
    is_outermost = not hasattr(Tensor, "ds_status")
    Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if is_outermost:
            del Tensor.ds_status  # type: ignore[attr-defined]


_SET = ("ds_id", "ds_status", "ds_numel", "ds_shape", "ds_persist", "ds_tensor")


def mark(
    param: nn.Parameter,
    index: int,
    shape: tuple[int, ...],
    own: Tensor | None,
    *,
    is_here: bool,
    persists: bool,
) -> None:
    """Sets `ds_id`, `ds_status`, `ds_numel`, `ds_shape`, `ds_persist` and `ds_tensor`.

    Args:
        shape: the full shape, which the parameter itself has only while this rank holds
            its values.
        own: this rank's elements (1-d); None where they are in a file, and there is no
            `ds_tensor`.
    """
    status = ZeroParamStatus.AVAILABLE if is_here else ZeroParamStatus.NOT_AVAILABLE
    values = (index, status, math.prod(shape), torch.Size(shape), persists, own)
    param.__dict__.update(zip(_SET, values, strict=True))
    if own is None:
        del param.__dict__["ds_tensor"]


def unmark(param: nn.Parameter) -> None:
    """Removes them."""
    for name in _SET:
        param.__dict__.pop(name, None)
