"""Observers of steps, of which a step knows no more than this file says.

Who wants to see the batches of a step and its updates adds a maker of observers before the step is made, as
`fzero.tuning.probe` does in a job that the autotuner started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fzero.config.config import Config
    from fzero.runtime.loss import LossFn


class Observer(Protocol):
    """Sees a step at work. Each method may end the process."""

    def sees(self, batch: Any, *, is_call: bool = False) -> None:
        """A batch has come; `is_call` where it is the arguments of the model (positional, by name)."""

    def begins(self) -> None:
        """The work of a step begins."""

    def has_updated(self) -> None:
        """An update has been made."""


Maker = Callable[["Any", "nn.Module", "Config", "LossFn | None", "torch.device"], Observer | None]
"""Makes the observer of a step from its ranks, model, configuration, loss function and device; None to see nothing."""

_MAKERS: list[Maker] = []


def observe_steps(maker: Maker) -> None:
    """Has every step that is made from now on observed."""
    _MAKERS.append(maker)


def observer_of(
    axis: Any, model: nn.Module, cfg: Config, loss_fn: LossFn | None, device: torch.device
) -> Observer | None:
    """The first observer that somebody makes for a step; None where nobody observes it."""
    made = (maker(axis, model, cfg, loss_fn, device) for maker in _MAKERS)
    return next((observer for observer in made if observer is not None), None)
