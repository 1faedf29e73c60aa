"""How does a module compute with tensors that it does not own? It is bound to them while it runs.

Inside `bound(...)` every access to a parameter, in any module and from anywhere in its code, asks a function for the
tensor by the parameter's full name. That is the moment in which a unit is gathered: no hook has to guess which
parameters a forward will touch. Afterwards the module is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Fetch = Callable[[str], Tensor]


class _Parameters(dict[str, Any]):
    """A module's `_parameters` whose values come from `fetch`."""

    def __init__(self, own: dict[str, Any], names: dict[str, str], fetch: Fetch) -> None:
        super().__init__(own)
        self.names, self.fetch = names, fetch

    def __getitem__(self, key: str) -> Any:
        name = self.names.get(key)
        return None if name is None else self.fetch(name)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self.names else default

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((key, self[key]) for key in self)

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[key] for key in self)


@contextmanager
def bound(model: nn.Module, aliases: dict[str, str], fetch: Fetch, buffers: dict[str, Tensor]) -> Iterator[None]:
    """Runs `model` on the tensors of `fetch` and `buffers`; afterwards it is as it was found, also after an error.

    Args:
        model: the module; the tensors that it owns are neither read nor written.
        aliases: the further names of tied parameters and buffers, with the name that `fetch` and `buffers` know.
        fetch: the tensor of a parameter, by its full name.
        buffers: the module's buffers by full name. In-place changes reach these tensors; a buffer that the model
            assigns anew takes the old one's place in the mapping.
    """
    found = [(module, module._parameters, module._buffers) for module in model.modules()]
    recurrent = [(module, module._flat_weights) for module in model.modules() if isinstance(module, nn.RNNBase)]
    hooks = [module.register_forward_pre_hook(_fill_flat_weights) for module, _ in recurrent]
    homes: list[tuple[dict[str, Tensor | None], str, str]] = []
    try:
        for prefix, module in model.named_modules():
            dot = f"{prefix}." if prefix else ""
            names = {key: dot + key for key, own in module._parameters.items() if own is not None}
            names = {key: aliases.get(name, name) for key, name in names.items()}
            module.__dict__["_parameters"] = _Parameters(module._parameters, names, fetch)
            module.__dict__["_buffers"] = dict(module._buffers)
            for key, own in module._buffers.items():
                if own is not None:
                    name = aliases.get(dot + key, dot + key)
                    module._buffers[key] = buffers[name]
                    homes.append((module._buffers, key, name))
        yield
    finally:
        for slots, key, name in homes:
            now = slots.get(key)
            if now is not None and now is not buffers[name]:
                buffers[name] = now
        for module, own_parameters, own_buffers in found:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = own_parameters, own_buffers
        for hook in hooks:
            hook.remove()
        for module, own_weights in recurrent:
            module._flat_weights = own_weights


def _fill_flat_weights(module: nn.RNNBase, inputs: Any) -> None:
    """Recurrent modules keep a list of their weights beside `_parameters`, and hand that list to the kernel."""
    module._flat_weights = [
        getattr(module, name) if hasattr(module, name) else None for name in module._flat_weights_names
    ]
