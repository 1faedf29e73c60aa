"""Changes of a module that are undone afterwards: another `forward`, and the attributes
that it gets in a trace.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn


@contextmanager
def replaced_forwards(
    model: nn.Module, names: Sequence[str], replace: Callable[[str, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, the `forward` of each named module is the result of
    `replace(name, module)`; afterwards `model` is unchanged.

    `replace` is called once for a module with several of the names.
    """
    found: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            if not any(module is other for other, _ in found):
                forward = replace(name, module)
                found.append((module, own_forward(module)))
                module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in found:
            module.__dict__.pop("forward", None)
            module.__dict__.update(own)


def own_forward(module: nn.Module) -> dict[str, Any]:
    """The module's own `forward`, by key, where it overrides that of its class."""
    return {key: module.__dict__[key] for key in ("forward",) if key in module.__dict__}


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own code object: `torch.compile` caches by code, and all objects
    of a class share a method's code.
    """
    if isinstance(function, MethodType):
        return MethodType(with_own_code(function.__func__), function.__self__)
    assert isinstance(function, FunctionType)
    code, name = function.__code__.replace(), function.__name__
    copy = FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores on exit which modules are in training mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the attributes of all modules on exit, including the contents of their
    lists, sets and dicts.

    For a run on tensors without memory: otherwise the model would keep such a tensor,
    for example a table that it makes once.
    """
    restore = _restorer(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def unchanged_if_raised(model: nn.Module) -> Iterator[None]:
    """`attributes_kept` where the body raises: what it has added to the modules by then
    is removed.
    """
    restore = _restorer(model)
    try:
        yield
    except BaseException:
        restore()
        raise


def _restorer(model: nn.Module) -> Callable[[], None]:
    """A function that gives all modules the attributes that they have now."""
    owned = [(vars(module), dict(vars(module))) for module in model.modules()]
    held = [
        (value, value.copy())
        for _, own in owned
        for value in own.values()
        if type(value) in _CONTAINERS
    ]

    def restore() -> None:
        for now, before in (*held, *owned):
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)

    return restore


_CONTAINERS = (list, set, dict, OrderedDict, defaultdict)
