"""`ModuleIndex`: the modules of a model by name, and the entries in which they hold
tensors.

It is read once from a model, in place of a walk at each use. It holds modules, not
tensors: an entry is read when it is asked for, because a module has other tensors while
it is bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from torch import nn


class Slot(NamedTuple):
    """The entry of a module for a parameter or buffer, and its full name."""

    name: str
    module: nn.Module
    key: str
    kind: Literal["_parameters", "_buffers"]

    @property
    def owner(self) -> dict[str, Any]:
        """The module's present mapping. (A binding replaces it.)"""
        mapping: dict[str, Any] = getattr(self.module, self.kind)
        return mapping

    @property
    def is_cache(self) -> bool:
        """Whether it is a buffer that a state dict leaves out."""
        return self.kind == "_buffers" and self.key in self.module._non_persistent_buffers_set


@dataclass(frozen=True, slots=True)
class ModuleIndex:
    """The modules of a model, as they were when it was made.

    Attributes:
        modules: each module by the first of its names, a parent before its children.
        every: the modules under all of their names.
        recurrent: those that keep a list of their weights beside their parameters.
        children: the children of each module.
    """

    modules: Mapping[str, nn.Module]
    every: Mapping[str, nn.Module]
    recurrent: tuple[nn.RNNBase, ...]
    children: list[dict[str, nn.Module | None]]

    @classmethod
    def of(cls, model: nn.Module, prefix: str = "") -> Self:
        """The modules of `model`, whose own name is `prefix`."""
        modules = dict(model.named_modules(prefix=prefix))
        return cls(
            modules,
            dict(model.named_modules(prefix=prefix, remove_duplicate=False)),
            tuple(x for x in modules.values() if isinstance(x, nn.RNNBase)),
            [dict(module._modules) for module in modules.values()],
        )

    def slots(
        self, *kinds: Literal["_parameters", "_buffers"], every: bool = False
    ) -> Iterator[Slot]:
        """The present entries of the modules, of both kinds or one; with `every`, under
        all of their names.
        """
        for prefix, module in (self.every if every else self.modules).items():
            for kind in kinds or ("_parameters", "_buffers"):
                for key in getattr(module, kind):
                    yield Slot(f"{prefix}.{key}" if prefix else key, module, key, kind)

    def attributes(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """The present attributes of the modules: full name, the module's `vars`, key."""
        for prefix, module in self.modules.items():
            for key in vars(module):
                yield f"{prefix}.{key}" if prefix else key, vars(module), key
