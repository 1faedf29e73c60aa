"""Activation checkpointing: the choice of modules that save only their inputs for the backward, and run again in it.

`Checkpointing` names the modules: every n-th block of the model, or those that a function picks. While the model is bound, the
`forward` of each is the one of `fzero.runtime.recomputation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.runtime.module_changes import replaced_forwards

Choice = int | Callable[[str, nn.Module], bool]
"""n, for every n-th unit that is one module (the first included); or a function of a module and its name."""


class Moves(NamedTuple):
    """Functions that move an input to other memory until the module runs again, and back."""

    away: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def host_moves(device: torch.device) -> Moves | None:
    """Moves to pinned host memory and back to `device`; None on the CPU, where inputs are in host memory already."""
    if device.type == "cpu":
        return None

    def away(x: Tensor) -> Tensor:
        # Both copies run on the stream of the compute, so that neither needs an event of its own.
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)

    return Moves(away, lambda x: x.to(device, non_blocking=True))


def choose_modules(
    model: nn.Module, choice: Choice | None, *, blocks: Sequence[str], field: str = "checkpoint"
) -> tuple[str, ...]:
    """The names of the modules to checkpoint.

    Args:
        model: any module.
        choice: see `Choice`. A function is called for the modules inside `model` that have a forward. It chooses the outermost
            modules for which it is true. None chooses no module.
        blocks: names of the units that are one module.
        field: the argument or configuration field that `choice` comes from, for messages.

    Raises:
        ValueError: the choice is neither a positive number nor a function, or it matches no module.

    >>> stack = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    >>> choose_modules(stack, 2, blocks=["0", "1", "2"])
    ('0', '2')
    >>> choose_modules(stack, lambda name, module: name == "1", blocks=[])
    ('1',)
    """
    if choice is None:
        return ()
    modules = {name: module for name, module in model.named_modules() if name and _has_forward(module)}
    if callable(choice):
        chosen: list[str] = []
        for name, module in modules.items():  # named_modules yields a parent before its children
            if not any(name.startswith(f"{outer}.") for outer in chosen) and choice(name, module):
                chosen.append(name)
        if not chosen:
            raise ValueError(
                f"{field}: its function must be true of a module of {type(model).__name__} and is true of none; names look "
                f"like {', '.join(list(modules)[:4])}"
            )
        return tuple(chosen)
    if isinstance(choice, bool) or not isinstance(choice, int) or choice < 1:
        raise ValueError(
            f"{field}: must be a positive integer (n for every n-th unit) or a function of name and module, got {choice!r}; "
            f"pass 1 for every unit, or leave it out for none"
        )
    named = [name for name in blocks if name in modules]
    if not named:
        raise ValueError(
            f"{field}: needs units that are one module, got {choice} where {type(model).__name__} has no repeated blocks; "
            f"name modules in units=, or pass a function of name and module"
        )
    return tuple(named[::choice])


def _has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: a ModuleList, a ParameterList and the like are not."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """The checkpointed modules of a model, and the memory of their saved inputs.

    Attributes:
        names: the names of the modules.
        moves: move inputs that need a gradient to other memory; None keeps them where they are. Other inputs (a mask, a
            table of positions) are never moved, because most are the same for all blocks.
    """

    names: tuple[str, ...] = ()
    moves: Moves | None = None

    @contextmanager
    def applied(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        recomputing: Callable[[], AbstractContextManager[None]],
        aliases: Mapping[str, str],
        moving: frozenset[str] | None,
    ) -> Iterator[None]:
        """A context in which the modules are checkpointed if gradients are recorded; afterwards `model` is unchanged.

        Args:
            model: the model, already bound: its buffers are the state's.
            device: its random state is kept for the second run, in addition to the CPU's.
            recomputing: a context for each second run.
            aliases: the other names of tied buffers.
            moving: the names of the buffers that a forward changes; None while they are not known.
        """
        if not self.names:
            yield
            return
        from fzero.runtime.recomputation import (  # a step without such modules does not load it
            Site,
            checkpointed,
            slots_of,
        )

        anchor = torch.empty(0, device=device)

        def replaced(name: str, module: nn.Module) -> Callable[..., Any]:
            slots = slots_of(module, name, aliases)
            return checkpointed(Site(name, module.forward, slots, moving, self.moves, recomputing, anchor))

        with replaced_forwards(model, self.names, replaced):
            yield
