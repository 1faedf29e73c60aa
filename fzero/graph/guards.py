"""`Guard`: the Python values that a function read while it was traced. While they are the same, its graph is valid.

Recorded are:

- the attributes of modules that were read, with the contents of lists, dicts and plain objects such as a configuration;
- the globals that the forwards of the model's classes and the loss function name, and what the loss function has in its closure;
  of classes that are no installed package's, the globals that all their methods name;
- if such a global is a function, and no library's: the globals that it names; if it is a module: the attributes that are named;
- PyTorch's settings that decide which operators run (`settings`).

Functions, classes and modules are compared by identity, numbers and texts by value. An attribute that holds a tensor is an input
of the graph, so that only its shape, dtype and device are compared.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Self

import optree
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_MISSING = object()
_BY_VALUE = (int, float, complex, str, bytes, torch.Size)
_BY_IDENTITY = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
OF_RECURRENT = ("_flat_weights", "_flat_weight_refs")
"""Lists of a recurrent module's own parameters."""
_OF_THE_STATE = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "__dict__", "__class__", *OF_RECURRENT,
)  # fmt: skip
_DEEPEST = 6
_CHANGEABLE = (list, set, dict, deque)
_MOST_BYTES = 2**16
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a dict, such as an attribute of a module: the dict, the key, and a name for messages."""

    owner: MutableMapping[str, Any]
    key: Any
    name: str

    def get(self) -> Any:
        return self.owner.get(self.key, _MISSING)

    def set(self, value: Any) -> None:
        self.owner[self.key] = value


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
        return f"{self.dtype} of shape {tuple(self.shape)} and strides {self.stride} on {self.device}"


class Guard:
    """The values that a function read.

    `changed()` looks at them again. Its time is that of a few comparisons for each module.
    """

    def __init__(self) -> None:
        self._values: list[tuple[Place, Any]] = []
        self._contents: list[tuple[str, Any, Any]] = []
        self._seen: set[int] = set()
        self._attributes: set[int] = set()  # the `vars` of objects
        self._cached: list[Any] = []  # functions with lru_cache

    @classmethod
    @contextmanager
    def recording(cls, model: nn.Module, functions: Iterable[Callable[..., Any]]) -> Iterator[Self]:
        """Records which attributes of the model's modules the body reads, and the globals and closures of `functions`.

        Inside, every access to an attribute of a module takes a little longer, in all threads.
        """
        guard = cls()
        for function in functions:
            guard._record_function(function)
        for kind in {base for module in model.modules() for base in type(module).__mro__}:
            methods = [vars(kind).get("forward")] if _is_installed(kind) else list(vars(kind).values())
            for method in methods if kind.__module__.partition(".")[0] != "torch" else ():
                if isinstance(method, FunctionType):
                    guard._record_function(method)
                else:
                    guard._record_contents(method, kind.__name__, _DEEPEST)
        for name, module in model.named_modules():
            guard._attributes.add(id(module._modules))
            guard._contents.append((f"the modules of {name or 'model'}", module._modules, dict(module._modules)))
        names = {id(module): name for name, module in model.named_modules()}
        read: set[tuple[int, str]] = set()
        get = object.__getattribute__

        def access(self: nn.Module, key: str) -> Any:
            at = (id(self), key)
            own = get(self, "__dict__")
            is_replaced = key == "forward" and hasattr(own.get(key), "fzero_drops")  # only while a step runs
            if at not in read and at[0] in names and key not in _OF_THE_STATE and not is_replaced:
                read.add(at)
                kind = type(self)
                name = f"model.{names[at[0]]}{'.' if names[at[0]] else ''}{key}"
                if not any(key in own[slots] for slots in _OF_THE_STATE[:3]):
                    guard._record(Place(own, key, name), own.get(key, _MISSING))
                    base = next((base for base in kind.__mro__ if key in vars(base)), nn.Module)
                    if not _is_installed(base):
                        guard._record(Place(vars(base), key, f"{base.__name__}.{key}"), vars(base)[key])  # type: ignore[arg-type]
            return get(self, key)

        nn.Module.__getattribute__ = access  # type: ignore[method-assign, assignment]
        try:
            yield guard
        finally:
            del nn.Module.__getattribute__

    def changed(self) -> str | None:
        """A text about one value that has changed since; None if none has."""
        for place, then in self._values:
            now = place.get()
            if now is not then and not _is_same(now, then):
                return f"{place.name} == {_text(now)}, and was {_text(then)}"
        for name, container, contents in self._contents:
            if (contents or len(container)) and not _is_same_content(container, contents):
                return f"the contents of {name}"
        return None

    def undo(self) -> str | None:
        """Undoes what the body has done to the contents of containers; returns the name of one, or None.

        An object keeps its new attributes, unless one is a tensor of the trace: then the next capture sees them.
        """
        for cached in self._cached:
            cached.cache_clear()  # it may hold tensors of the trace
        changed = [x for x in self._contents if isinstance(x[1], _CHANGEABLE) and not _is_same_content(*x[1:])]
        changed = [x for x in changed if id(x[1]) not in self._attributes or has_traced(x[1])]
        for _, container, contents in changed:
            container.clear()
            container.extend(contents) if isinstance(container, list | deque) else container.update(contents)
        return changed[0][0] if changed else None

    def _record_function(self, function: Callable[..., Any]) -> None:
        """The globals that a function names, and its closure; of a callable object its attributes, too."""
        if isinstance(function, MethodType):
            self._record_method(function)
            return
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if not isinstance(function, FunctionType):
            if hasattr(function, "__dict__") and not isinstance(function, _BY_IDENTITY):
                self._record_contents(vars(function), type(function).__name__, 0)
            calls = [vars(kind).get("__call__") for kind in type(function).__mro__]
            for call in filter(None, calls[:1]):
                self._record_function(call)
            return
        self._record_contents(vars(function), function.__name__, 0)
        self._record_contents(function.__defaults__, f"the defaults of {function.__name__}", 0)
        names = _names(function.__code__)
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            self._record(Place(function.__globals__, name, name), value)
            if isinstance(value, FunctionType) and not _is_installed(value):
                self._record_function(value)
            elif isinstance(value, ModuleType) and not _is_installed(value):
                for attribute in names & vars(value).keys():
                    self._record(Place(vars(value), attribute, f"{name}.{attribute}"), vars(value)[attribute])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            self._record(Place(_Cell(cell), name, name), value)

    def _record_method(self, method: MethodType) -> None:
        """As `_record_function`, and the attributes of its object that it and the methods that it calls name."""
        owner, function = method.__self__, method.__func__
        self._record_function(function)
        own = vars(owner) if hasattr(owner, "__dict__") and not isinstance(owner, nn.Module | type) else {}
        names, found = {function.__name__} if own else set(), set[str]()
        while names - found:
            name = (names - found).pop()
            found.add(name)
            called = function if name == function.__name__ else getattr(type(owner), name, None)
            if name in own:
                self._record(Place(own, name, f"{type(owner).__name__}.{name}"), own[name])
            elif isinstance(called, FunctionType):
                self._record_function(called)
                names |= _names(called.__code__)

    def _record(self, place: Place, value: Any, depth: int = 0) -> None:
        if isinstance(value, Tensor) and place.name.startswith("model."):
            value = TensorKind.of(value)
        self._values.append((place, value))
        self._record_contents(value, place.name, depth)

    def _record_contents(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, FunctionType | MethodType) and not _is_installed(value):
            self._record_function(value)
        if hasattr(value, "cache_clear") and isinstance(getattr(value, "__wrapped__", None), FunctionType):
            self._cached.append(value)
        if isinstance(value, _BY_IDENTITY) or id(value) in self._seen or depth > _DEEPEST:
            return
        if isinstance(value, dict):
            items: Mapping[Any, Any] = dict(dict.items(value))  # a subclass may make its values anew
            contents: Any = items
        elif isinstance(value, list | set | tuple | deque):
            items, contents = dict(enumerate(value)), type(value)(value) if type(value) in (list, set) else tuple(value)
        elif hasattr(value, "tobytes") and getattr(value, "nbytes", _MOST_BYTES) < _MOST_BYTES:  # an array of NumPy
            items, contents = {}, value.tobytes()
        elif isinstance(value, logging.Logger | TensorKind):
            return
        elif hasattr(value, "__dict__"):
            items, contents = vars(value), dict(vars(value))
            value = vars(value)
            self._attributes.add(id(value))
        elif hasattr(type(value), "__slots__") and not _is_installed(type(value)):
            value = items = _Slots(value)
            contents = dict(value)
        else:
            return
        self._seen.add(id(value))
        self._contents.append((name, value, contents))
        for key, item in items.items():
            self._record_contents(item, f"{name}[{key!r}]" if isinstance(key, int) else f"{name}.{key}", depth + 1)


class _Cell(dict[str, Any]):
    """A cell of a closure as a dict of any one key."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self._cell = cell

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return default


class _Slots(Mapping[str, Any]):
    """The attributes of an object whose class has `__slots__`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, key: str) -> Any:
        return getattr(self._owner, key)

    def __iter__(self) -> Iterator[str]:
        names = (name for kind in type(self._owner).__mro__ for name in vars(kind).get("__slots__", ()))
        return (name for name in names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def settings() -> tuple[Any, ...]:
    """The settings of PyTorch on which the operators of a function depend."""
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.get_default_dtype(), *autocast, torch.are_deterministic_algorithms_enabled()


def _is_installed(value: Any) -> bool:
    """Whether a class, function or module belongs to fzero, Python or an installed package, whose globals are not followed."""
    name = str(value.__name__ if isinstance(value, ModuleType) else value.__module__)
    package = name.partition(".")[0]
    if package in ("fzero", "sharding") or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)


def has_traced(value: Any) -> bool:
    """Whether a value is, or holds, a tensor of a trace, also as an attribute of an object in it."""
    leaves = optree.tree_leaves(value, is_leaf=lambda x: isinstance(x, Mapping) and type(x) is not dict)
    inside = [vars(x) for x in leaves if hasattr(x, "__dict__") and not isinstance(x, _BY_IDENTITY)]
    inside += [dict(x) for x in leaves if isinstance(x, Mapping)]
    found = [*leaves, *optree.tree_leaves(inside)]
    return any(isinstance(x, FunctionalTensor | FakeTensor) for x in found)


def _text(value: Any) -> str:
    return (
        str(TensorKind.of(value)) if isinstance(value, Tensor) else "missing" if value is _MISSING else f"{value!r:.80}"
    )


def _is_same(now: Any, then: Any) -> bool:
    if isinstance(then, TensorKind):
        return isinstance(now, Tensor) and TensorKind.of(now) == then
    if type(now) is not type(then):
        return False
    if isinstance(then, _BY_VALUE):
        return bool(now == then)
    return isinstance(then, tuple) and len(now) == len(then) and all(map(_is_equal, now, then))


def _is_equal(now: Any, then: Any) -> bool:
    return now is then or _is_same(now, then)


def _is_same_content(now: Any, then: Any) -> bool:
    if isinstance(then, bytes):
        return bool(now.tobytes() == then)
    if len(now) != len(then):
        return False
    if isinstance(then, dict):
        held = dict.items(now) if isinstance(now, dict) else now.items()
        return all(key in then and _is_equal(value, then[key]) for key, value in held)
    if isinstance(then, set):
        return bool(now == then)
    return all(map(_is_equal, now, then))


def _names(code: CodeType) -> set[str]:
    """The names that code may read from its globals, its inner functions' too."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, CodeType)]
    return set(code.co_names).union(*inner)
