"""Activation checkpointing: the choice of modules that save only their inputs for the
backward, and run again in it.

1. `Checkpointing` is the transform. It names the modules: every n-th block of the
   model, or those that a function picks. While the model is bound, the `forward` of
   each goes through the non-reentrant `torch.utils.checkpoint` (`checkpointed`). Graph
   and numbers are the same as without checkpointing. A captured step recomputes in its
   graph (`Changes.recomputed`).
2. A `_Call` is one call of such a module. The first run uses the arguments as they were
   passed. Later runs use the saved arguments in the same containers, with the same
   random state and the module buffers of the first run.

The second run fetches its parameters in the backward, as the first did in the forward,
and thereby enters the unit. This gather replaces the gather that the saved tensors
would have needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_checkpointed

from fzero.graph.host_inputs import copy_to_host, kept_on_host
from fzero.model.module_index import ModuleIndex, Slot
from fzero.model.transforms import Call, Changes, Choice, TransformedStep, Wrap
from fzero.plans.units import blocks_of


class Moves(NamedTuple):
    """Functions that move an input to other memory until the module runs again, and
    back.
    """

    away: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def host_moves(device: torch.device) -> Moves | None:
    """Moves to pinned host memory and back to `device`; None on the CPU, where inputs
    are in host memory already.
    """
    if device.type == "cpu":
        return None
    return Moves(copy_to_host, lambda x: x.to(device, non_blocking=True))


def choose_modules(
    model: nn.Module, choice: Choice | None, *, blocks: Sequence[str], field: str = "checkpoint"
) -> tuple[str, ...]:
    """The names of the modules to checkpoint.

    Args:
        model: any module.
        choice: see `Choice`. A function is called for the modules inside `model` that
            have a forward. It chooses the outermost modules for which it is true. None
            chooses no module.
        blocks: names of the units that are one module.
        field: the argument or configuration field that `choice` comes from, for
            messages.

    Raises:
        ValueError: the choice is neither a positive number nor a function, or it
            matches no module.

    >>> stack = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    >>> choose_modules(stack, 2, blocks=["0", "1", "2"])
    ('0', '2')
    >>> choose_modules(stack, lambda name, module: name == "1", blocks=[])
    ('1',)
    """
    if choice is None:
        return ()
    modules = {
        name: module for name, module in model.named_modules() if name and _has_forward(module)
    }
    if callable(choice):
        chosen: list[str] = []
        for name, module in modules.items():  # named_modules yields a parent before its children
            if not any(name.startswith(f"{outer}.") for outer in chosen) and choice(name, module):
                chosen.append(name)
        if not chosen:
            raise ValueError(
                f"{field}: its function must be true of a module of {type(model).__name__} and is "
                f"true of none; names look like {', '.join(list(modules)[:4])}"
            )
        return tuple(chosen)
    if isinstance(choice, bool) or not isinstance(choice, int) or choice < 1:
        raise ValueError(
            f"{field}: must be a positive integer (n for every n-th unit) or a function of name "
            f"and module, got {choice!r}; pass 1 for every unit, or leave it out for none"
        )
    named = [name for name in blocks if name in modules]
    if not named:
        raise ValueError(
            f"{field}: needs units that are one module, got {choice} where {type(model).__name__} "
            f"has no repeated blocks; name modules in units=, or pass a function of name and module"
        )
    return tuple(named[::choice])


def _has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: a ModuleList, a ParameterList and the like are
    not.
    """
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """The transform that checkpoints modules (`fzero.model.transforms`).

    Attributes:
        choice: which modules; see `Choice`.
        field: the argument or key that asks for it.
        on_host: whether inputs that need a gradient are kept in host memory. Other
            inputs (a mask, a table of positions) are never moved, because most are the
            same for all modules.
    """

    choice: Choice | None
    field: str = "checkpoint"
    on_host: bool = False

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`."""
        names = choose_modules(
            spec.model, self.choice, blocks=blocks_of(spec.model, spec.units), field=self.field
        )
        moves = host_moves(spec.device) if self.on_host else None

        def forwards(call: Call) -> Mapping[str, Wrap]:
            if call.in_graph and moves is not None:
                return dict.fromkeys(names, lambda name, module: kept_on_host(module.forward))
            if call.again is None:
                return {}
            again, anchor = call.again, torch.empty(0, device=call.device)

            def wrap(name: str, module: nn.Module) -> Callable[..., Any]:
                slots = slots_of(module, name, call.aliases)
                return checkpointed(
                    Site(name, module.forward, slots, call.moving, moves, again, anchor)
                )

            return dict.fromkeys(names, wrap)

        return Changes(
            name="checkpoint",
            text=", ".join(names),
            forwards=forwards if names else None,
            recomputed=names,
            is_exact=True,
        )


def slots_of(module: nn.Module, name: str, aliases: Mapping[str, str]) -> list[Slot]:
    """The buffers of a module and of those in it. `name` is the module's own."""
    return [
        slot._replace(name=aliases.get(slot.name, slot.name))
        for slot in ModuleIndex.of(module, name).slots("_buffers")
        if slot.owner[slot.key] is not None
    ]


class Site(NamedTuple):
    """One checkpointed module, while the model is bound."""

    name: str
    forward: Callable[..., Any]
    slots: list[Slot]
    moving: frozenset[str] | None
    moves: Moves | None
    recomputing: Callable[[], AbstractContextManager[None]]
    anchor: Tensor


def checkpointed(site: Site) -> Callable[..., Any]:
    """The forward of a module that saves only its inputs for the backward, and runs
    again in it.
    """

    @functools.wraps(site.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # A transform of torch.func ends before the backward, and its wrapped tensors cannot be used
        # in a second run.
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return site.forward(*args, **kwargs)
        args = tuple(_without_cache(arg, site.name) for arg in args)
        kwargs = {key: _without_cache(arg, site.name) for key, arg in kwargs.items()}
        call = _Call(site, args, kwargs)
        # torch reads the device of the random state from the anchor. This works even if no argument
        # is a tensor. Tensors are separate arguments: torch saves them as autograd does, and
        # detects changes in place.
        return run_checkpointed(call, site.anchor, *call.tensors, use_reentrant=False)

    return forward


def _without_cache(arg: Any, module: str) -> Any:
    """The argument; None instead of an empty key-value cache (for generation), because
    a second run would append to it again.
    """
    if not (
        callable(getattr(arg, "get_seq_length", None)) and callable(getattr(arg, "update", None))
    ):
        return arg
    if arg.get_seq_length():
        raise ValueError(
            f"checkpoint: module {module!r} must be given an empty {type(arg).__name__} or none, "
            f"because its second run would append to it again, got {arg.get_seq_length()} "
            f"positions; pass use_cache=False"
        )
    return None


class _Call:
    """One call of a checkpointed module: the first run uses the arguments themselves,
    later runs the saved ones.

    Containers are rebuilt for each later run, so a module may change those it is given.
    """

    __slots__ = (
        "_away",
        "_buffers",
        "_first",
        "_leaves",
        "_places",
        "_site",
        "_treespec",
        "tensors",
    )

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._site = site
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._leaves, self._treespec = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        self._away: dict[int, Tensor] = {}
        self._places: list[int] = []
        self.tensors: list[Tensor] = []
        for place, leaf in enumerate(self._leaves):
            if not isinstance(leaf, Tensor):
                continue
            self._leaves[place] = None
            if site.moves is not None and leaf.requires_grad:
                self._away[place] = site.moves.away(leaf.detach()).requires_grad_()
            else:
                self._places.append(place)
                self.tensors.append(leaf)
        self._buffers = [_Found.of(slot, site.moving) for slot in site.slots]

    def __call__(self, anchor: Tensor, *tensors: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            self.tensors = []  # torch has them
            return self._site.forward(*args, **kwargs)
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        for place, tensor in self._away.items():
            assert self._site.moves is not None
            # Autograd records the move, so the result is no leaf: a leaf could not be changed in
            # place.
            leaves[place] = self._site.moves.back(tensor)
        args, kwargs = optree.tree_unflatten(self._treespec, leaves)
        with self._site.recomputing(), _buffers_as_found(self._buffers):
            return self._site.forward(*args, **kwargs)


class _Found(NamedTuple):
    """A module buffer at the start of a call: a copy if the forward changes it,
    otherwise the buffer itself and its version.
    """

    slot: Slot
    value: Tensor
    version: int | None

    @classmethod
    def of(cls, slot: Slot, moving: frozenset[str] | None) -> _Found:
        value = slot.owner[slot.key]
        if value is not None and (moving is None or slot.name in moving):
            return cls(slot, value.detach().clone().requires_grad_(value.requires_grad), None)
        return cls(slot, value, None if value is None else value._version)

    def again(self) -> Tensor:
        """The value for another run, which may change it."""
        if self.version is None:
            return self.value if self.value is None else self.value.clone()
        if self.value._version != self.version:
            raise ValueError(
                f"buffer {self.slot.name!r}: must change in the first forward or never where its "
                f"module is checkpointed, changed first in a later step, and its old value is "
                f"lost; change it once in the first forward"
            )
        return self.value


@contextmanager
def _buffers_as_found(found: Sequence[_Found]) -> Iterator[None]:
    """Inside, the buffers have the values of the first run. Changes are dropped,
    because the first run has made them.
    """
    now = [slot.owner[slot.key] for slot, _, _ in found]
    try:
        for buffer in found:
            buffer.slot.owner[buffer.slot.key] = buffer.again()
        yield
    finally:
        for buffer, value in zip(found, now, strict=True):
            buffer.slot.owner[buffer.slot.key] = value
