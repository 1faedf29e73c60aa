"""A script's own values in a checkpoint: stored so that they are read back without
running code.

`plain(value)` turns a value into numbers, strings, tensors and containers of these,
which `torch.load(weights_only=True)` reads; `restored` turns it back. A value of a
class of the standard library or of numpy becomes a mapping with its kind,
`{KIND: "path", "of": "a/b"}`. A script's own dataclass, enum or named tuple would need
its class, so it comes back as a dict, as its value, as a tuple. Everything else is left
out, and `plain` names it.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

KIND = "fzero.kind"
_LEFT_OUT = object()
_ATOMS = (
    type(None),
    bool,
    float,
    complex,
    str,
    torch.Tensor,
    torch.nn.Parameter,
    torch.Size,
    torch.dtype,
    torch.device,
)
_BASES: tuple[type, ...] = (bool, int, float, complex, str, bytes)
_FACTORIES: dict[str, type] = {
    cls.__name__: cls for cls in (list, dict, set, int, float, str, bool, tuple)
}
_BY_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "path": (pathlib.PurePath, str, pathlib.Path),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "uuid": (uuid.UUID, str, uuid.UUID),
}
"""Kinds that are a text; the first whose class fits counts, and a datetime is a date.
"""


def plain(value: Any, name: str = "client") -> tuple[Any, list[str]]:
    """The value as it is stored, and a line for each part that comes back as another
    type, or not at all.

    >>> from pathlib import PurePosixPath
    >>> stored, lines = plain({"args": Namespace(out=PurePosixPath("a")), "log": print})
    >>> restored(stored), lines
    ({'args': Namespace(out=PosixPath('a'))}, ["client['log']: a builtin_function_or_method is left out"])
    """
    lines: list[str] = []
    found = _Plain(lines, []).of(value, name)
    return (None if found is _LEFT_OUT else found), lines


def restored(stored: Any) -> Any:
    """The value that `plain` stored."""
    if isinstance(stored, list | tuple | set) and type(stored) in (list, tuple, set):
        return type(stored)(map(restored, stored))
    if not isinstance(stored, dict):
        return stored
    if KIND not in stored:
        return type(stored)((key, restored(value)) for key, value in stored.items())
    kind, of = stored[KIND], stored["of"]
    if kind in _BY_TEXT:
        return _BY_TEXT[kind][2](of)
    if kind == "array":
        return np.frombuffer(bytearray(restored(of)), dtype=stored["dtype"]).reshape(
            stored["shape"]
        )
    if kind == "number":
        return np.frombuffer(of, dtype=stored["dtype"])[0]
    if kind == "defaultdict":
        return defaultdict(_FACTORIES.get(stored["factory"]), restored(of))
    if kind == "deque":
        return deque(restored(of), stored["maxlen"])
    if kind in ("dict", "ordered dict"):
        made = OrderedDict if kind == "ordered dict" else dict
        return made((restored(key), restored(value)) for key, value in of)
    return _BY_PARTS[kind](restored(of))


_BY_PARTS: dict[str, Callable[[Any], Any]] = {
    "namespace": lambda of: Namespace(**of),
    "simple namespace": lambda of: types.SimpleNamespace(**of),
    "timedelta": lambda of: datetime.timedelta(*of),
    "range": lambda of: range(*of),
    "slice": lambda of: slice(*of),
    "counter": Counter,
    "frozenset": frozenset,
    "set": set,
    "bytearray": bytearray,
    "bytes": lambda of: b"",
    "integer": lambda of: int(of, 16),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Plain:
    """Turns values into stored ones; `lines` collects what changes, `inside` has the
    containers that are under way.
    """

    lines: list[str]
    inside: list[int]

    def of(self, value: Any, name: str) -> Any:
        if type(value) in _ATOMS:
            return value
        if type(value) is int:  # torch does not read longer ones
            return value if value.bit_length() < 2000 else {KIND: "integer", "of": hex(value)}
        if type(value) is bytes:  # nor b"", which pickle makes by a call
            return value or {KIND: "bytes", "of": ""}
        if id(value) in self.inside:
            return self._without(name, "a container that holds itself is left out")
        self.inside.append(id(value))
        try:
            return self._by_kind(value, name)
        finally:
            self.inside.pop()

    def _by_kind(self, value: Any, name: str) -> Any:
        cls = type(value)
        if isinstance(value, enum.Enum):
            self.lines.append(f"{name}: a {cls.__name__} comes back as its value")
            return self.of(value.value, name)
        if isinstance(value, np.ndarray | np.generic):
            return self._of_numpy(value, name)
        for kind, (of, text, _) in _BY_TEXT.items():
            if isinstance(value, of):
                return {KIND: kind, "of": text(value)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.lines.append(f"{name}: a {cls.__name__} comes back as a dict of its fields")
            fields = {
                field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
            }
            return self._mapping(fields, name, of_attributes=True)
        if isinstance(value, Namespace | types.SimpleNamespace):
            kind = "namespace" if isinstance(value, Namespace) else "simple namespace"
            return {KIND: kind, "of": self._mapping(vars(value), name, of_attributes=True)}
        if isinstance(value, datetime.timedelta):
            return {KIND: "timedelta", "of": (value.days, value.seconds, value.microseconds)}
        if isinstance(value, range | slice):
            return self._labelled(cls.__name__, (value.start, value.stop, value.step), name)
        if isinstance(value, Mapping):
            return self._of_mapping(value, name)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return self._of_sequence(value, name)
        if isinstance(value, bytearray):
            return self._labelled("bytearray", bytes(value), name)
        for base in _BASES:
            if isinstance(value, base):
                return self.of(base(value), name)  # type: ignore[call-arg]
        return self._without(name, f"a {cls.__name__} is left out")

    def _of_numpy(self, value: Any, name: str) -> Any:
        if value.dtype.hasobject or value.dtype.names:
            return self._without(name, f"a numpy array of {value.dtype} is left out")
        dtype = value.dtype.str
        if isinstance(value, np.generic):
            return {KIND: "number", "dtype": dtype, "of": value.tobytes()}
        return {
            KIND: "array",
            "dtype": dtype,
            "shape": tuple(value.shape),
            "of": self.of(value.tobytes(), name),
        }

    def _of_mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        if isinstance(value, Counter):
            return self._labelled("counter", dict(value), name)
        if not isinstance(value, defaultdict):
            return self._mapping(value, name)
        factory = getattr(value.default_factory, "__name__", "")
        if (
            value.default_factory is not None
            and _FACTORIES.get(factory) is not value.default_factory
        ):
            self.lines.append(f"{name}: a defaultdict comes back without its function")
        return {KIND: "defaultdict", "of": self._mapping(value, name), "factory": factory}

    def _of_sequence(self, value: Any, name: str) -> Any:
        items = self._items(value, name)
        if isinstance(value, tuple):
            if type(value) is not tuple:
                self.lines.append(f"{name}: a {type(value).__name__} comes back as a tuple")
            return tuple(items)
        if isinstance(value, deque):
            return {KIND: "deque", "of": items, "maxlen": value.maxlen}
        if isinstance(value, set | frozenset):
            return (
                {KIND: "frozenset", "of": items} if isinstance(value, frozenset) else _set_of(items)
            )
        return items

    def _items(self, values: Iterable[Any], name: str) -> list[Any]:
        found = [self.of(value, f"{name}[{index}]") for index, value in enumerate(values)]
        return [None if value is _LEFT_OUT else value for value in found]

    def _mapping(self, value: Mapping[Any, Any], name: str, *, of_attributes: bool = False) -> Any:
        """Pairs whose key or value cannot be stored are left out."""
        pairs = []
        for key, inner in value.items():
            where = f"{name}.{key}" if of_attributes else f"{name}[{key!r}]"
            pair = self.of(key, where), self.of(inner, where)
            if all(part is not _LEFT_OUT for part in pair):
                pairs.append(pair)
        if any(
            type(key) not in (str, int, float, bool, type(None)) or key == KIND for key, _ in pairs
        ):
            return {KIND: "ordered dict" if isinstance(value, OrderedDict) else "dict", "of": pairs}
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)

    def _labelled(self, kind: str, of: Any, name: str) -> Any:
        return {KIND: kind, "of": self.of(of, name)}

    def _without(self, name: str, why: str) -> Any:
        self.lines.append(f"{name}: {why}")
        return _LEFT_OUT


def _set_of(items: list[Any]) -> Any:
    """A set, or a record of its items if one of them has no hash."""
    try:
        return set(items)
    except TypeError:
        return {KIND: "set", "of": items}
