"""Inputs of a captured step: the arithmetic rules, the model with its loss, tensors that a graph writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fzero.optim.transforms import Transform
from fzero.runtime.finish import StepRules
from fzero.runtime.loss import LossFn, loss_of

HookStates = Mapping[str, Mapping[str, Any]]
"""The states of the reductions' comm hooks, by flat buffer and axis: tensors, which a graph writes."""


class WithLoss(nn.Module):
    """The model and its loss as one module, for `functional_call`."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, **how: Any) -> None:
        super().__init__()
        self.model, self.loss_fn, self.how = model, loss_fn, how

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        return loss_of(self.model, self.loss_fn, batch, **self.how)


class Rules(NamedTuple):
    """The arithmetic of a compiled step.

    Attributes:
        end: by which a step ends.
        transforms: by flat buffer. Their learning rates and momentum are 0-d tensors that the caller fills before a step.
        places: by flat buffer, the index of its first element in the random stream of stochastic rounding; None without it.
    """

    end: StepRules
    transforms: dict[str, Transform]
    places: dict[str, int] | None
    salts: Tensor
