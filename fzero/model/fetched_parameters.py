"""`FetchedParameters`: the `_parameters` of a module that is bound to tensors which it does not own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fzero.model.own_params import Fetch


class FetchedParameters(dict[str, Any]):
    """A module's `_parameters` whose values come from `fetch`, unless the model assigns another value."""

    def __init__(self, own: dict[str, Any], names: dict[str, str], fetch: Fetch) -> None:
        super().__init__(own)
        self.names, self.fetch = names, fetch
        self.put: set[str] = set()
        """The keys to which the model has assigned a value of its own."""
        self.is_changed = False
        """Whether the model has assigned or deleted any value."""

    def __getitem__(self, key: str) -> Any:
        name = self.names.get(key)
        return super().__getitem__(key) if name is None else self.fetch(name)

    def __setitem__(self, key: str, value: Any) -> None:
        # `torch.func.functional_call` inside the model's own code swaps parameters like this, then restores a tensor of
        # `fetch`. After its unit is gathered again this tensor must not be used, so only its name is kept.
        self.is_changed, name = True, getattr(value, "fzero_name", None)
        if name is not None:
            self.names[key] = name
            self.put.discard(key)
        else:
            self.names.pop(key, None)
            self.put.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.is_changed = True
        self.names.pop(key, None)
        self.put.discard(key)
        super().__delitem__(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {
            key: copy.deepcopy(self[key], memo) for key in self
        }  # for a module that the model copies in its forward

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - `get` would call itself

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((key, self[key]) for key in self)

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[key] for key in self)


# --- Python attributes of parameters ---------------------------------------------------------------------------------

_NOT_PASSED = ("ds_", "fzero_", "_dynamo_")
"""Prefixes of attributes that describe the module's own tensors; these attributes are not copied to fetched ones."""


_OF_TRACED = ("elem", "_inference_mode_base")
"""PyTorch's own attributes of a `FunctionalTensor`, which stands for a tensor while a step is captured."""


def marks_of(param: Tensor) -> dict[str, Any]:
    """The Python attributes that code has set on a tensor."""
    own = _OF_TRACED if type(param) is FunctionalTensor else ()
    return {key: value for key, value in param.__dict__.items() if not key.startswith(_NOT_PASSED) and key not in own}


def new_marks(param: Tensor) -> list[str]:
    """The attributes that a forward has set on a fetched parameter."""
    own = param.__dict__.get("fzero_marks", {})
    return [key for key, value in marks_of(param).items() if key not in own or own[key] is not value]


def marked(fetch: Fetch, marks: Mapping[str, dict[str, Any]], name: str) -> Tensor:
    """`fetch(name)` with the class and the Python attributes of the module's own parameter."""
    tensor = fetch(name)
    if name in marks:
        untraced(_mark)(tensor, marks[name])
    return tensor


def _mark(tensor: Tensor, marks: Mapping[str, Any]) -> None:
    if "fzero_marks" not in tensor.__dict__:
        tensor.__class__ = marks.get("__class__", type(tensor))
        tensor.__dict__.update(marks, fzero_marks=marks)
        tensor.__dict__.pop("__class__", None)


_UNTRACED: dict[Callable[..., Any], Callable[..., Any]] = {}


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a module or class, hidden from torch.compile, which would otherwise trace it as part of a model that
    compiles its own code."""
    if "torch._dynamo" not in sys.modules:  # importing it takes longer than all of fzero
        return function
    if function not in _UNTRACED:
        _UNTRACED[function] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return _UNTRACED[function]
