"""`deepspeed.utils.nvtx`: ranges of functions in a profile."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def instrument_w_nvtx(func: Callable[..., T]) -> Callable[..., T]:
    """The function, whose calls are ranges in a profile of torch."""

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> T:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return call
