"""`Guard`: the Python values that a function read while it was traced. While they are
the same, its graph is valid.

Recorded are:

- the attributes of the model's modules that were read;
- the globals that the forwards of the model's classes and the loss function name, and
  what they have in their closures;
- what these values hold, and so on: items of containers, attributes of objects, of
  classes and of modules outside the model, the bytes of arrays, the state of iterators
  and generators;
- of each function, method and class found on the way, the globals that its code names.
  If such a global is a module: the attributes that are named. In installed packages
  only the forwards and the loss function count as code;
- hooks of all modules, `os.environ` where it is named, and PyTorch's settings that
  decide which operators run (`settings`).

Functions, classes and modules are compared by identity, numbers and texts by value. An
attribute that holds a tensor is an input of the graph, so that only its shape, dtype
and device are compared.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Self

import optree
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fzero.graph.holdings import (
    CONTAINERS,
    MISSING,
    Holding,
    Structure,
    TensorKind,
    are_same,
    has_attributes_beside,
    is_installed,
    is_same,
    is_source,
    look_at,
)  # fmt: skip
from fzero.model.module_index import ModuleIndex

_BY_IDENTITY = (
    Tensor,
    nn.Module,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    partial,
)
OF_RECURRENT = ("_flat_weights", "_flat_weight_refs")
"""Lists of a recurrent module's own parameters."""
_OF_THE_STATE = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "__dict__",
    "__class__",
    *OF_RECURRENT,
)
_DEEPEST = 6
"""The most objects of installed packages that lie within each other; they may lead far
away from what the model reads.
"""
_CHANGEABLE = (list, set, dict, deque)


@dataclass(frozen=True, slots=True)
class DictEntry:
    """An entry of a dict, such as an attribute of a module: the dict, the key, and a
    name for messages.
    """

    owner: MutableMapping[str, Any]
    key: Any
    name: str

    def get(self) -> Any:
        return self.owner.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        if value is MISSING:
            self.owner.pop(self.key, None)
        else:
            self.owner[self.key] = value


class Guard:
    """The values that a function read.

    `changed()` looks at them again. Its time is that of a few comparisons for each
    module.
    """

    def __init__(self) -> None:
        self._values: list[tuple[DictEntry, Any]] = []
        self._holdings: list[Holding] = []
        # the dicts that were empty, as most of a module's are (its hooks)
        self._empty: list[tuple[str, dict[Any, Any]]] = []
        # keyed by id(); the values keep the objects alive, so no id is reused
        self._followed: dict[int, Any] = {}
        self._own: set[int] = set()  # the attributes of the model's modules
        self._todo: deque[tuple[Any, str, int]] = deque()
        self._cached: list[Any] = []  # functions with lru_cache

    @classmethod
    @contextmanager
    def recording(
        cls, index: ModuleIndex, functions: Iterable[Callable[..., Any]]
    ) -> Iterator[Self]:
        """Records which attributes of the modules the body reads, and what its
        forwards and `functions` read.

        Inside, every access to an attribute of a module takes a little longer, in all
        threads.
        """
        guard = cls()
        names = {id(x): f"model.{name}".rstrip(".") for name, x in index.modules.items()}
        for module in index.modules.values():
            guard._followed[id(module)] = module
            guard._own.add(id(vars(module)))
            guard._hold(names[id(module)], Structure(module))
            for key, value in (
                *module._parameters.items(),
                *module._buffers.items(),
                *vars(module).items(),
            ):
                # its attributes only: the guard must not keep its memory
                if isinstance(value, Tensor):
                    guard._follow(vars(value), f"{names[id(module)]}.{key}")
        for function in functions:
            guard._follow_code(function)
        for kind in {base for module in index.modules.values() for base in type(module).__mro__}:
            forward = vars(kind).get("forward")
            if isinstance(forward, FunctionType) and kind.__module__.partition(".")[0] != "torch":
                guard._follow_function(forward)
            guard._follow(kind, kind.__name__)
        guard._follow_code(nn.Module._call_impl)  # it names the hooks of all modules
        read: set[tuple[int, str]] = set()
        get = object.__getattribute__

        def access(self: nn.Module, key: str) -> Any:
            at, own = (id(self), key), get(self, "__dict__")
            if key == "__dict__":
                if (
                    at not in read
                    and at[0] in names
                    and _is_of_the_user(sys._getframe(1).f_globals)
                ):
                    read.add(at)
                    for each in own.keys() - set(_OF_THE_STATE):
                        if not _is_of_a_step(own[each]):
                            guard._record(DictEntry(own, each, f"{names[at[0]]}.{each}"))
            elif (
                at not in read
                and at[0] in names
                and key not in _OF_THE_STATE
                and not _is_of_a_step(own.get(key))
            ):
                read.add(at)
                if not any(key in own[slots] for slots in _OF_THE_STATE[:3]):
                    guard._record(DictEntry(own, key, f"{names[at[0]]}.{key}"))
            return get(self, key)

        nn.Module.__getattribute__ = access  # type: ignore[method-assign, assignment]
        try:
            yield guard
        finally:
            del nn.Module.__getattribute__

    @property
    def functions(self) -> list[FunctionType]:
        """The functions of the user on the way, and the forwards of installed packages."""
        return [x for x in self._followed.values() if isinstance(x, FunctionType)]

    def changed(self) -> str | None:
        """A text about one value that has changed since; None if none has."""
        for entry, then in self._values:
            now = entry.get()
            if now is not then and not is_same(now, then):
                return f"{entry.name} == {_text(now)}, and was {_text(then)}"
        for holding in self._holdings:
            if not are_same(holding.look(holding.value), holding.parts):
                return f"the contents of {holding.name}"
        for name, value in self._empty:
            if value:
                return f"the contents of {name}"
        return None

    def undo(self) -> str | None:
        """Undoes what the body has done to the contents of containers; returns the name
        of one, or None.

        Other values stay as the body has set them, unless they are tensors of the
        trace: then the next capture sees them.
        """
        for cached in self._cached:
            cached.cache_clear()  # it may hold tensors of the trace
        found = []
        for entry, then in self._values:
            if (
                (now := entry.get()) is not then
                and id(entry.owner) not in self._own
                and has_traced(now)
            ):
                entry.set(then)
                found.append(entry.name)
        for holding in self._holdings:
            now = holding.look(holding.value)
            if are_same(now, holding.parts):
                continue
            if (
                isinstance(holding.value, _CHANGEABLE)
                or is_source(holding.value)
                or has_traced(now)
            ):
                holding.restore()
                found.append(holding.name)
        for name, value in self._empty:
            if value:
                value.clear()
                found.append(name)
        return found[0] if found else None

    # --- what values hold -------------------------------------------------------------------------

    def _record(self, entry: DictEntry, depth: int = 0) -> None:
        """Records an entry, and what its value holds."""
        value = entry.get()
        is_input = isinstance(value, Tensor) and id(entry.owner) in self._own
        self._values.append((entry, TensorKind.of(value) if is_input else value))
        self._follow(value, entry.name, depth)

    def _hold(self, name: str, value: Any) -> list[tuple[Any, Any]]:
        """Records the parts of a value; returns them with their names or numbers,
        without those that bytes stand for.
        """
        if type(value) in (dict, OrderedDict) and not value:
            self._empty.append((name, value))
            return []
        if (found := look_at(value)) is None:
            return []
        look, has_names = found
        holding = Holding(name, value, look, look(value), has_names)
        self._holdings.append(holding)
        return holding.items

    def _follow(self, value: Any, name: str, depth: int = 0) -> None:
        """Records what a value holds, and what its code reads.

        Args:
            depth: the number of objects of installed packages on the way to it.
        """
        self._todo.append((value, name, depth))
        if len(self._todo) > 1:
            return  # the loop below is at work
        while self._todo:
            self._follow_next(*self._todo[0])
            self._todo.popleft()

    def _follow_next(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, type | FunctionType | ModuleType) and is_installed(value):
            return
        if id(value) in self._followed or isinstance(value, ModuleType) or depth > _DEEPEST:
            return
        if isinstance(value, FunctionType):
            self._follow_function(value)
            return
        self._followed[id(value)] = value
        if isinstance(value, MethodType):
            self._follow_method(value)
            return
        # Classes are asked, because an object's own `__getattr__` may answer anything, or raise.
        if hasattr(type(value), "cache_clear") and isinstance(
            getattr(value, "__wrapped__", None), FunctionType
        ):
            self._cached.append(value)
        if has_attributes_beside(value):
            self._follow(vars(value), name, depth)
        if items := self._hold(name, value):
            for kind in (type(value), *(value.__bases__ if isinstance(value, type) else ())):
                self._follow(kind, kind.__name__)
            depth += is_installed(type(value)) and not isinstance(
                value, (dict, *CONTAINERS, nn.Module)
            )
            for key, held in items:
                self._follow(
                    held, f"{name}[{key!r}]" if isinstance(key, int) else f"{name}.{key}", depth
                )

    def _follow_code(self, function: Callable[..., Any]) -> None:
        """A function or a callable object of the user, also if an installed package
        defines it.
        """
        self._follow(function, getattr(function, "__name__", type(function).__name__))
        call = (
            function if isinstance(function, FunctionType) else vars(type(function)).get("__call__")
        )
        if isinstance(call, FunctionType):
            self._follow_function(call)

    def _follow_function(self, function: FunctionType) -> None:
        """The values of a function: its attributes, the globals that it names, and its
        closure.
        """
        if id(function) in self._followed:
            return
        self._followed[id(function)] = function
        for key, held in self._hold(function.__name__, function):
            self._follow(held, f"{function.__name__}.{key}")
        names = names_of_code(function.__code__)
        for name in sorted(names & function.__globals__.keys()):
            self._record(DictEntry(function.__globals__, name, name))
            if isinstance(value := function.__globals__[name], ModuleType):
                self._follow_module(value, names, name, set())
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._record(DictEntry(_Cell(cell), name, name))

    def _follow_module(
        self, module: ModuleType, names: set[str], path: str, above: set[int]
    ) -> None:
        """The attributes of a module that code names, also those of modules in it."""
        if module is os and not names.isdisjoint(("environ", "getenv")):
            self._follow(os.environ, "os.environ")
        for name in sorted(names & vars(module).keys()) if id(module) not in above else ():
            entry, value = DictEntry(vars(module), name, f"{path}.{name}"), vars(module)[name]
            self._values.append((entry, value)) if is_installed(module) else self._record(entry)
            if isinstance(value, ModuleType):
                self._follow_module(value, names, entry.name, above | {id(module)})

    def _follow_method(self, method: MethodType) -> None:
        """A method's code, and the attributes of its object that it and the methods
        that it calls name.
        """
        owner, function = method.__self__, method.__func__
        if isinstance(function, FunctionType):
            self._follow_function(function)
        if isinstance(owner, type | nn.Module) or not hasattr(owner, "__dict__"):
            self._follow(owner, type(owner).__name__)
            return
        own, kinds = vars(owner), [kind for kind in type(owner).__mro__ if not is_installed(kind)]
        names, found = {function.__name__}, set[str]()
        while left := names - found:
            found.add(name := left.pop())
            if name in own:
                self._record(DictEntry(own, name, f"{type(owner).__name__}.{name}"))
                continue
            for kind in kinds:
                if name in vars(kind):
                    self._record(DictEntry(_OfClass(kind), name, f"{kind.__name__}.{name}"))
            called = getattr(type(owner), name, None)
            called = called.fget if isinstance(called, property) else called
            if isinstance(called, FunctionType):
                self._follow_function(called)
                names |= names_of_code(called.__code__)


class _Cell(dict[str, Any]):
    """A cell of a closure as a dict of any one key."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self._cell = cell

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not yet assigned
            return default

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value


class _OfClass(dict[str, Any]):
    """The attributes of a class as a dict that can be written."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def get(self, key: str, default: Any = None) -> Any:
        return vars(self._kind).get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._kind, key, value)


def settings() -> tuple[Any, ...]:
    """The settings of PyTorch on which the operators of a function depend."""
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    attention = [is_on() for is_on in _ATTENTION]
    return (
        torch.get_default_dtype(),
        *autocast,
        torch.are_deterministic_algorithms_enabled(),
        *attention,
    )


_ATTENTION = [
    getattr(torch.backends.cuda, f"{name}_sdp_enabled")
    for name in ("flash", "math", "mem_efficient", "cudnn")
]


def _is_of_a_step(value: Any) -> bool:
    """Whether a module has this attribute only while a step runs."""
    return isinstance(value, FunctionType | MethodType) and hasattr(value, "fzero_bound")


def _is_of_the_user(scope: Mapping[str, Any]) -> bool:
    """Whether the globals of a function are those of a module that is not installed."""
    return scope is not _OF_MODULES and not is_installed(
        sys.modules.get(scope.get("__name__", ""), torch)
    )


_OF_MODULES = vars(sys.modules[nn.Module.__module__])


def has_traced(value: Any) -> bool:
    """Whether a value is, or holds, a tensor of a trace, also as an attribute of an
    object in it.
    """
    leaves = optree.tree_leaves(
        value, is_leaf=lambda x: isinstance(x, Mapping) and type(x) is not dict
    )
    inside = [vars(x) for x in leaves if hasattr(x, "__dict__") and not isinstance(x, _BY_IDENTITY)]
    inside += [dict(x) for x in leaves if isinstance(x, Mapping)]
    found = [*leaves, *optree.tree_leaves(inside)]
    return any(isinstance(x, FunctionalTensor | FakeTensor) for x in found)


def _text(value: Any) -> str:
    return (
        str(TensorKind.of(value))
        if isinstance(value, Tensor)
        else "missing"
        if value is MISSING
        else f"{value!r:.80}"
    )


def names_of_code(code: CodeType) -> set[str]:
    """The names that code may read from its globals, its inner functions' too, and the
    texts in it, for `getattr`.
    """
    inner = [names_of_code(x) for x in code.co_consts if isinstance(x, CodeType)]
    texts = (x for x in code.co_consts if isinstance(x, str))
    return {*code.co_names, *texts}.union(*inner)
