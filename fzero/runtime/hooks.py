"""`Observer`: the protocol through which a step reports its batches and updates; a step
uses nothing else of an observer.

To observe steps, register a maker of observers before the step is made, as
`fzero.tuning.probe` does in a job that the autotuner started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fzero.config.config import Config
    from fzero.runtime.batches import LossFn


class Observer(Protocol):
    """Its methods are called while a step runs. Each may end the process."""

    def sees(self, batch: Any, *, is_call: bool = False) -> None:
        """A batch has arrived; `is_call`: the batch holds the arguments of the model
        (positional ones, and those by name).
        """

    def begins(self) -> None:
        """The work of a step begins."""

    def has_updated(self) -> None:
        """An update has been made."""


Maker = Callable[["Any", "nn.Module", "Config", "LossFn | None", "torch.device"], Observer | None]
"""Makes the observer of a step from its ranks, model, configuration, loss function and
device; None to observe nothing.
"""

_MAKERS: list[Maker] = []


def observe_steps(maker: Maker) -> None:
    """Registers a maker of observers for every step made from now on."""
    _MAKERS.append(maker)


def observer_of(
    axis: Any, model: nn.Module, cfg: Config, loss_fn: LossFn | None, device: torch.device
) -> Observer | None:
    """The observer of a step: the first that a registered maker returns; None where
    none does.
    """
    made = (maker(axis, model, cfg, loss_fn, device) for maker in _MAKERS)
    return next((observer for observer in made if observer is not None), None)
