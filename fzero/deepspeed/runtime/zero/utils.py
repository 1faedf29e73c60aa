"""`deepspeed.runtime.zero.utils`: questions about optimizers and parameters."""

from __future__ import annotations

import torch

from fzero.config.fields import ConfigError as ZeRORuntimeException
from fzero.deepspeed.runtime.zero.partition_parameters import is_zero_param

ZERO_SUPPORTED_OPTIMIZERS = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.SGD,
]


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Whether it is an optimizer: `initialize` takes every elementwise class."""
    return isinstance(optimizer, torch.optim.Optimizer)


__all__ = [
    "ZERO_SUPPORTED_OPTIMIZERS",
    "ZeRORuntimeException",
    "is_zero_param",
    "is_zero_supported_optimizer",
]
