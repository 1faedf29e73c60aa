"""Methods of a script's modules that an engine replaces while it holds them: calls of
the module and of its parts become calls of the engine.

In stage 3 parameters have no values outside of a forward. A call of a submodule there
is a forward of the engine of its own: its units are gathered, and a backward goes back
through it, as through any other. Inside of a forward, and while the module has its
values (`gathered`), a part runs as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fzero.model.binding import fill_flat_weights, is_bound
from fzero.model.own_params import untraced
from fzero.runtime.saving import saving

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine

Original = Callable[..., Any]


class ReplacedMethod:
    """Stands in a module's dict for a method. A copy of the module gets the original
    one.

    Args:
        instead: is called with the original method, and with the positional and the
            keyword arguments of a call.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        instead: Callable[[Original, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        original: Any = getattr(module, name)
        functools.update_wrapper(self, original)
        self.module, self.original, self._name, self._instead = module, original, name, instead
        self._own = {key: module.__dict__[key] for key in (name,) if key in module.__dict__}
        module.__dict__[name] = self

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._instead(self.original, inputs, kwargs)

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


def hold_parts(engine: Engine) -> Iterator[ReplacedMethod]:
    """Makes the calls of all submodules with parameters forwards of the engine."""
    for name, module in engine.module.named_modules():
        has_forward = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
        if name and has_forward and any(True for _ in module.parameters()):
            call = functools.partial(_call_part, engine, name, module)
            yield ReplacedMethod(module, "forward", call)


def _call_part(
    engine: Engine,
    name: str,
    module: nn.Module,
    original: Original,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    def within(*inputs: Any, **kwargs: Any) -> Any:
        # the hook for this has its turn before the module is bound
        if isinstance(module, nn.RNNBase):
            fill_flat_weights(module, inputs)
        return original(*inputs, **kwargs)

    if is_bound(module):
        if (work := engine.repeated) is None:
            return original(*inputs, **kwargs)
        with saving(work):  # what the first run has hidden from the script's checkpoint
            return within(*inputs, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return untraced(_call_part)(engine, name, module, original, inputs, kwargs)
    if engine.held_module.has_values:
        return original(*inputs, **kwargs)
    return engine.run_part(name, within, inputs, kwargs)
