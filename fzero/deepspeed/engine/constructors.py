"""`constructing`: models that are divided while they are made.

Inside, the parameters of every module are divided when its constructor ends, so at most
the parameters of one module are whole on a rank. A constructor that uses the divided
parameters of a child (to initialise them, or to copy from one to another) gets their
values, and rank 0's result counts; afterwards they are divided again. Every rank runs
the same constructors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import optree
import torch
from torch import nn

from fzero.config.config import ConfigError
from fzero.deepspeed.engine.divided_params import (
    CONSTRUCTORS,
    DividedParameter,
    Rules,
    divide,
    gathered,
    hide,
    show,
)
from fzero.model.tensor_uses import SHAPES, called, needs_values
from fzero.pipeline.module import PipelineModule


class _Constructor:
    """The constructor of one module.

    Attributes:
        shown: the divided parameters that it has used, which may have views; they are
            divided again when it ends.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shown: list[nn.Parameter] = []

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a function of divided parameters, which sees their shapes, and their
        values if it needs them.
        """
        name, used = called(func)
        found = {
            id(x): x
            for x in optree.tree_leaves((tuple(args), kwargs))
            if isinstance(x, DividedParameter)
        }
        params: list[Any] = list(found.values())
        if used in SHAPES:
            args, kwargs = optree.tree_map(_with_shape, (tuple(args), kwargs))
        elif needs_values(func, args, kwargs):
            # in place, so no view outlives the call
            if name.endswith("_") and not name.endswith("__"):
                with gathered(params, 0):
                    return func(*args, **kwargs)
            show(params)
            self.shown += params
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _with_shape(x: Any) -> Any:
    return (
        torch.empty((), dtype=x.dtype).expand(x.fzero_divided.shape)
        if isinstance(x, DividedParameter)
        else x
    )


@contextmanager
def constructing(rules: Rules) -> Iterator[None]:
    """Inside, modules are divided as they are made. Not to be nested. *Collective:*
    every rank makes the same modules.
    """
    originals: dict[type, Any] = {}
    applies = nn.Module.apply

    def finish(constructor: _Constructor) -> None:
        hide(constructor.shown, source=0)
        divide(constructor.module.parameters(), rules)

    def wrap(cls: type) -> None:
        own = cls.__dict__.get("__init__")
        if isinstance(own, FunctionType) and cls not in originals:
            originals[cls] = own
            cls.__init__ = _wrapped(own, finish)  # type: ignore[misc]

    def of_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**kwargs)
        wrap(cls)

    def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        def on_values(part: nn.Module) -> None:
            with gathered(part.parameters(recurse=False), 0):
                fn(part)

        return applies(module, on_values)

    for cls in _subclasses(nn.Module):
        wrap(cls)
    nn.Module.__init_subclass__ = classmethod(of_subclass)  # type: ignore[assignment]
    nn.Module.apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del nn.Module.__init_subclass__
        nn.Module.apply = applies  # type: ignore[method-assign]
        for cls, own in originals.items():
            if getattr(cls.__dict__["__init__"], "__wrapped__", None) is own:
                cls.__init__ = own  # type: ignore[misc]


def _wrapped(
    own: Callable[..., None], finish: Callable[[_Constructor], None]
) -> Callable[..., None]:
    @functools.wraps(own)
    def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # a base class's, called by the constructor
        if CONSTRUCTORS and CONSTRUCTORS[-1].module is module:
            return own(module, *args, **kwargs)
        if isinstance(module, PipelineModule):
            raise ConfigError(
                f"zero.Init: a {type(module).__name__} must be made outside, because ranks make "
                f"the layers of their own stages, got one inside; leave zero.Init out (stages "
                f"divide the parameters already)"
            )
        constructor = _Constructor(module)
        CONSTRUCTORS.append(constructor)
        try:
            own(module, *args, **kwargs)
        except BaseException:
            hide(constructor.shown, source=None)
            raise
        finally:
            CONSTRUCTORS.pop()
        finish(constructor)

    return construct


def _subclasses(cls: Any) -> Iterator[type]:
    """A class and all classes below it, some of them twice."""
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)
