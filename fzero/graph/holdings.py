"""`Holding`: what a value held, such as the items of a list or the attributes of an
object, to be compared later.

`look_at` says how to look at what a value holds: one row of parts. Rows are compared
part by part: numbers and texts by their values, others by identity (`is_same`).
"""

from __future__ import annotations

import pickle
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from hashlib import sha1
from logging import Logger
from operator import is_
from random import Random
from types import BuiltinFunctionType, FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch._ops import OperatorBase, OpOverloadPacket

MISSING = object()
"""The value of an entry that is not there."""
_BY_VALUE = (int, complex, str, bytes, torch.Size)
_OPERATORS = (OperatorBase, OpOverloadPacket)
"""An operator of PyTorch holds caches of its kernels, which grow in a trace."""
CONTAINERS = (list, tuple, set, frozenset, deque)
_NAMED_PARTS: dict[type, tuple[str, ...]] = {
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__dict__"),
    BuiltinFunctionType: ("__self__",),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    partial: ("func", "args", "keywords"),
}
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class TensorKind(NamedTuple):
    """The properties of a tensor on which a graph depends."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Self:
        return cls(x.shape, x.stride(), x.dtype, x.device)

    def __str__(self) -> str:
        return (
            f"{self.dtype} of shape {tuple(self.shape)} and strides {self.stride} on {self.device}"
        )


class Structure(NamedTuple):
    """A module of the model: its class and forward, the names of its tensors, gradient
    hooks, and the modules in it.
    """

    module: nn.Module


class Holding(NamedTuple):
    """A value that holds others, and what it held.

    Attributes:
        look: returns what such a value holds now, in one row.
        parts: what it returned.
        has_names: whether names are the first half of the row.
    """

    name: str
    value: Any
    look: Callable[[Any], Any]
    parts: Any
    has_names: bool

    @property
    def items(self) -> list[tuple[Any, Any]]:
        if isinstance(self.parts, bytes):
            return []
        half = len(self.parts) // 2
        return list(zip(self.parts, self.parts[half:]) if self.has_names else enumerate(self.parts))

    def restore(self) -> None:
        """Gives the value back what it held; what bytes stand for stays as it is."""
        value, before = self.value, dict(self.items)
        if isinstance(value, list | set | deque):
            value.clear()
            value.extend(self.parts) if isinstance(value, list | deque) else value.update(
                self.parts
            )
        elif isinstance(value, dict):
            value.clear()
            value.update(before)
        elif self.look is _in_object or self.look is _in_class:
            now = self.look(value)
            for key in now[: len(now) // 2]:
                if key not in before:
                    delattr(value, key)
            for key, held in before.items():
                if held is not MISSING and key != "__class__":
                    setattr(value, key, held)


def look_at(value: Any) -> tuple[Callable[[Any], Any], bool] | None:
    """How to look at what a value holds, and whether the parts have names; None if it
    holds nothing that may change.
    """
    if isinstance(value, dict):
        return _in_dict, True
    if isinstance(value, Structure):
        return _in_structure, False
    if isinstance(value, (TensorKind, Tensor, Logger, *_OPERATORS, *_BY_VALUE)):
        return None
    if isinstance(value, CONTAINERS):
        return tuple, False
    if (names := _NAMED_PARTS.get(type(value))) is not None:
        return lambda value: (*names, *(getattr(value, name) for name in names)), True
    if isinstance(value, type):
        return _in_class, True
    if isinstance(value, ref | ContextVar):
        return lambda value: (value() if isinstance(value, ref) else value.get(None),), False
    if isinstance(value, GeneratorType):
        return _in_generator, False
    is_array = hasattr(type(value), "tobytes")
    # an array of Python objects
    if is_array and getattr(getattr(value, "dtype", None), "hasobject", False):
        return lambda value: tuple(value.ravel().tolist()), False
    if isinstance(value, bytearray) or is_array:
        return lambda value: sha1(
            bytes(value) if isinstance(value, bytearray) else value.tobytes()
        ).digest(), False
    if is_source(value):
        # an object that cannot be pickled, such as a file, is not compared
        with suppress(Exception):
            pickle.dumps(value)
            return pickle.dumps, False
    if isinstance(getattr(value, "__dict__", None), dict):
        return _in_object, True
    return (
        (_in_object, True) if not is_installed(type(value)) and any(_slots(type(value))) else None
    )


def has_attributes_beside(value: Any) -> bool:
    """Whether a text, container, array or tensor is of a class whose objects have
    attributes, too.
    """
    is_whole = isinstance(value, (dict, Tensor, *CONTAINERS, *_BY_VALUE)) or hasattr(
        type(value), "tobytes"
    )
    return is_whole and isinstance(getattr(value, "__dict__", None), dict)


def _in_dict(value: dict[Any, Any]) -> tuple[Any, ...]:
    """Not by the methods of the dict: a subclass may make its values anew."""
    return (*value, *dict.values(value)) if value else ()


def _in_structure(value: Structure) -> tuple[Any, ...]:
    module, kind = value.module, type(value.module)
    params, modules = module._parameters, module._modules
    hooks = (
        [None if param is None else param._backward_hooks for param in params.values()]
        if params
        else ()
    )
    return (kind, kind.forward, *params, *hooks, *modules, *modules.values(), *module._buffers)


def _in_class(value: type) -> tuple[Any, ...]:
    held = {
        key: x
        for key, x in vars(value).items()
        if not key.startswith("__") or isinstance(x, FunctionType)
    }
    return (*held, *held.values())


def _in_generator(value: Any) -> tuple[Any, ...]:
    frame = value.gi_frame
    return () if frame is None else (frame.f_lasti, *dict(frame.f_locals).values())


def _in_object(value: Any) -> tuple[Any, ...]:
    kind, own = type(value), getattr(value, "__dict__", {})
    slots = () if is_installed(kind) else tuple(_slots(kind))
    return (
        "__class__",
        *slots,
        *own,
        kind,
        *(getattr(value, key, MISSING) for key in slots),
        *own.values(),
    )


def is_source(value: Any) -> bool:
    """Whether a value is an iterator or a generator of random numbers: what it gives
    next depends on what it has given.
    """
    is_iterator = hasattr(type(value), "__next__") and not hasattr(value, "__dict__")
    return (
        is_iterator
        or isinstance(value, Random)
        or type(value).__module__.startswith("numpy.random")
    )


def _slots(kind: type) -> Iterator[str]:
    """The names of the attributes for which the objects of a class have slots."""
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def is_installed(value: Any) -> bool:
    """Whether a class, function or module belongs to fzero, Python or an installed
    package, whose globals are not followed.
    """
    name = str(value.__name__ if isinstance(value, ModuleType) else value.__module__)
    package = name.partition(".")[0]
    if package in ("fzero", "sharding") or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)


def is_same(now: Any, then: Any) -> bool:
    if isinstance(then, TensorKind):
        return isinstance(now, Tensor) and TensorKind.of(now) == then
    if type(now) is not type(then):
        return False
    if isinstance(then, float):
        return bool(now.hex() == then.hex())  # 0.0 equals -0.0, and NaN does not equal itself
    if isinstance(then, _BY_VALUE):
        return bool(now == then)
    return isinstance(then, tuple) and are_same(now, then)


def are_same(now: Any, then: Any) -> bool:
    """Whether two rows of values, or of bytes, are the same."""
    if now is then:
        return True
    if len(now) != len(then):
        return False
    if isinstance(then, bytes):
        return bool(now == then)
    return all(map(is_, now, then)) or all(map(_is_equal, now, then))


def _is_equal(now: Any, then: Any) -> bool:
    return now is then or is_same(now, then)
