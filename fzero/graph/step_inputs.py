"""Inputs of a captured step: the flat buffers as numbers and names, the arithmetic rules, the model with its loss.

Shape letters: P padded elements of a flat buffer, S elements of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import optree
import torch
from torch import Tensor, nn

from fzero.optim.transforms import Transform
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.runtime.finish import StepRules
from fzero.runtime.loss import LossFn, loss_of
from sharding import Replicated, Sharded
from sharding.views import torch_dtype

HookStates = Mapping[str, Mapping[str, Any]]
"""The states of the reductions' comm hooks, by flat buffer and axis: tensors, which a graph writes."""


class WithLoss(nn.Module):
    """The model and its loss as one module, for `functional_call`."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, **how: Any) -> None:
        super().__init__()
        self.model, self.loss_fn, self.how = model, loss_fn, how

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        return loss_of(self.model, self.loss_fn, batch, **self.how)


class Flat(NamedTuple):
    """The numbers and names of a flat buffer, which are constants of a graph."""

    key: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numels: tuple[int, ...]
    """Elements of each parameter, then of the padding."""
    padded_numel: int
    shard_numel: int
    trainable: bool
    num_param_axes: int
    """The number of shard axes along which the model's parameters are gathered; the others join updated shards."""
    sums_full: bool
    """Whether every rank gets the full reduced gradient."""
    collects_full: bool
    """Whether micro-steps add up the full gradient on each rank."""
    sums_late: bool
    """Whether micro-steps add up shards that are summed over the replicate axes only at the end."""
    updates_shard: bool
    joins: bool
    """Whether updated shards are all-gathered."""
    has_master: bool
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype

    @classmethod
    def of(cls, buffer: FlatParamPlan, plan: Plan) -> Self:
        layout, row, is_shared = buffer.layout, buffer.row, plan.world_size > 1
        updates_shard = isinstance(row.optimizer, Sharded)
        collects_full = buffer.grads.local_shape(plan.mesh)[0] == buffer.padded_numel
        return cls(
            buffer.key,
            layout.names,
            layout.shapes,
            (*layout.numels, buffer.padded_numel - layout.numel),
            buffer.padded_numel,
            buffer.shard_numel,
            buffer.trainable,
            len(row.params.axes) if isinstance(row.params, Sharded) else 0,
            isinstance(row.grads, Replicated),
            collects_full,
            bool(plan.replicate_axes) and not collects_full,
            updates_shard,
            updates_shard and buffer.params.local_shape(plan.mesh)[0] != buffer.shard_numel,
            buffer.has_master,
            # One rank sends nothing, and so does not round to the dtype of communication.
            torch_dtype(buffer.dtypes.reduce if is_shared else buffer.dtypes.grad),
            torch_dtype(buffer.dtypes.grad),
        )


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
