"""Which functions of a tensor compute with its values, and which only ask for its
shape, dtype or memory.
"""

from __future__ import annotations

from typing import Any

import torch

ALLOWED = {
    *(
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "storage_offset",
        "get_device",
    ),
    *(
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_same_size",
        "_is_view",
        "untyped_storage",
    ),
    *("data_ptr", "requires_grad_", "__repr__", "__hash__", "__format__", "detach"),
    "_has_compatible_shallow_copy_type",
}
"""Methods that work on a tensor without values."""
SHAPES = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "is_contiguous",
    "shape",
    "ndim",
}
"""Methods and attributes that return the full shape inside the forward."""
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes that need the values."""


def called(func: Any) -> tuple[str, str]:
    """The name of a function, and the name of the attribute that it reads or sets (its
    own name if there is none).
    """
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return name, attribute if name in ("__get__", "__set__") else name


def needs_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function of a tensor without elements computes with its values."""
    name, used = called(func)
    return not (
        used in ALLOWED or is_plain(name, used) or _changes_nothing(name, used, args, kwargs)
    )


def is_plain(name: str, used: str) -> bool:
    """Whether an attribute is read or set that needs no values."""
    return name in ("__get__", "__set__") and used not in _VALUES


CASTS = {"to", "cpu", "cuda", "half", "bfloat16", "float", "double", "type"}
"""Methods by which `module.to(...)`, `.half()` and the like give a tensor in another
dtype or on another device.
"""


def cast_to(name: str, args: Any, kwargs: Any) -> tuple[torch.dtype, torch.device] | None:
    """The dtype and the device that a method of `CASTS` would give its tensor, without
    its values; None if it gives no tensor.
    """
    probe = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    with torch._C.DisableTorchFunctionSubclass():
        now = getattr(probe, name)(*args[1:], **(kwargs or {}))
    return (now.dtype, now.device) if isinstance(now, torch.Tensor) else None  # x.type() is a name


def _changes_nothing(name: str, attribute: str, args: Any, kwargs: Any) -> bool:
    """Whether a call moves a parameter to the device where it already is (as
    `module.to(device)` does), or sets it to itself.
    """
    if name == "__set__":
        return attribute == "data" and args[0] is args[1]
    return name == "to" and cast_to(name, args, kwargs) == (args[0].dtype, args[0].device)
