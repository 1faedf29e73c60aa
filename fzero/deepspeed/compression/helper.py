"""`deepspeed.compression.helper`: modules by their dotted names, and Conv1D layers of
Transformers as Linears.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = [
    "convert_conv1d_to_linear",
    "is_module_compressible",
    "recursive_getattr",
    "recursive_setattr",
]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The module with a dotted name.

    >>> type(recursive_getattr(nn.Sequential(nn.Sequential(nn.ReLU())), "0.0")).__name__
    'ReLU'
    """
    found: Any = model
    for part in module_name.split("."):
        found = getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Puts a module in the place of a dotted name."""
    prefix, _, key = module_name.rpartition(".")
    setattr(recursive_getattr(model, prefix) if prefix else model, key, module)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replaces the modules of a type like Transformers' Conv1D, whose weight is
    transposed, by Linears; returns the model.

    Args:
        convert_type: the type of Conv1D.
    """
    inner = getattr(model, "module", model)
    found = [
        (name, module) for name, module in inner.named_modules() if isinstance(module, convert_type)
    ]
    for name, module in found:
        weight: Any = module.weight
        bias: Any = module.bias
        num_in, num_out = weight.shape
        linear = nn.Linear(
            num_in, num_out, bias=bias is not None, device="meta", dtype=weight.dtype
        )
        linear.weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().reshape(-1).clone(), bias.requires_grad)
        linear.train(module.training)
        recursive_setattr(inner, name, linear)
    return model


def is_module_compressible(module: nn.Module, mpu: Any = None) -> bool:
    """Whether techniques apply to a module's kind."""
    return isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding | torch.nn.BatchNorm2d)
