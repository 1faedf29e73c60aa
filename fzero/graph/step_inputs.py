"""Inputs of a captured step: the arithmetic rules, the model with its loss, tensors that a graph writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import optree
import torch
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
        transforms: by flat buffer. Their learning rates and momentum are 0-d tensors that the caller fills before a step. (Dynamo
            first takes a 0-d float64 or int64 tensor on the CPU for a number, which costs a second capture.)
        places: by flat buffer, the index of its first element in the random stream of stochastic rounding; None without it.
    """

    end: StepRules
    transforms: dict[str, Transform]
    places: dict[str, int] | None
    salts: Tensor


class _Shielded(NamedTuple):
    """A 0-d float64 tensor on the CPU, viewed as (1,): torch takes a 0-d one for a number, and writes to it are lost."""

    value: Tensor


def shielded(tree: Any) -> Any:
    """The tree with every 0-d float64 CPU tensor as an argument that a graph can write."""
    return optree.tree_map(
        lambda x: _Shielded(x.view(1)) if not x.ndim and x.dtype == torch.float64 and x.device.type == "cpu" else x,
        tree,
    )


def bare(tree: Any) -> Any:
    """Inside a graph, the tree that was given to `shielded`; its 0-d tensors are views."""
    return optree.tree_map(
        lambda x: x.value.view(()) if isinstance(x, _Shielded) else x, tree, is_leaf=lambda x: isinstance(x, _Shielded)
    )
