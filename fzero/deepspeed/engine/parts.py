"""Parts of an engine's module that a script calls by themselves in stage 3, where
parameters have no values outside of a forward.

A call of a submodule there is a forward of the engine of its own: its units are
gathered, and a backward goes back through it, as through any other. Inside of a
forward, and while the module has its values (`gathered`), a part runs as it is.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from fzero.model.binding import fill_flat_weights, is_bound
from fzero.model.own_params import untraced
from fzero.runtime.eager import ForwardBackward, saving


class RunsParts(Protocol):
    """An engine."""

    @property
    def has_values(self) -> bool: ...

    @property
    def repeated(self) -> ForwardBackward | None: ...

    def run_part(
        self,
        name: str,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any: ...


class ReplacedMethod(ABC):
    """Stands in a module's dict for a method. A copy of the module gets the original
    one.
    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        original: Any = getattr(module, name)
        functools.update_wrapper(self, original)
        self.module, self.original, self._name = module, original, name
        self._own = {key: module.__dict__[key] for key in (name,) if key in module.__dict__}
        module.__dict__[name] = self

    @abstractmethod
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """What is done instead."""

    def __getattr__(self, name: str) -> Any:
        if name == "__code__" and "original" in self.__dict__:  # torch.export checks it
            return self.original.__code__
        if name == "__globals__":  # torch.jit.script asks first for them
            raise AttributeError(
                f"{type(self.__dict__.get('module')).__name__}: must not be scripted while an "
                f"engine holds it, because TorchScript computes with its own tensors; script an "
                f"ordinary model that has loaded engine.module_state_dict()"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def undo(self) -> None:
        """The module has its own method again."""
        self.module.__dict__.pop(self._name, None)
        self.module.__dict__.update(self._own)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: the method of the copy's class, or the module's own
        original function.
        """
        if self._own:
            return _same, (self.original,)
        return getattr, (self.module, self._name)


def _same(x: Any) -> Any:
    return x


class PartForward(ReplacedMethod):
    """Replaces the `forward` of a submodule."""

    def __init__(self, engine: RunsParts, part: str, module: nn.Module) -> None:
        super().__init__(module)
        self.engine, self.part = engine, part

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        if is_bound(self.module):
            if (work := self.engine.repeated) is None:
                return self.original(*inputs, **kwargs)
            with saving(work):  # what the first run has hidden from the script's checkpoint
                return self._within(*inputs, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return untraced(PartForward.__call__)(self, *inputs, **kwargs)
        if self.engine.has_values:
            return self.original(*inputs, **kwargs)
        return self.engine.run_part(self.part, self._within, inputs, kwargs)

    def _within(self, *inputs: Any, **kwargs: Any) -> Any:
        # the hook for this has its turn before the module is bound
        if isinstance(self.module, nn.RNNBase):
            fill_flat_weights(self.module, inputs)
        return self.original(*inputs, **kwargs)


def hold_parts(engine: RunsParts, model: nn.Module) -> None:
    """Makes the calls of all submodules with parameters forwards of the engine."""
    for name, module in model.named_modules():
        has_forward = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
        if name and has_forward and any(True for _ in module.parameters()):
            PartForward(engine, name, module)


def release_parts(model: nn.Module) -> None:
    """Undoes `hold_parts`."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, PartForward):
            forward.undo()
