"""Inputs of a captured step: the flat buffers as numbers and names, the arithmetic rules, the model with its loss.

Shape letters: P padded elements of a flat buffer, S elements of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import optree
import torch
from torch import Tensor, nn

from fzero.optim.loss_scale import LossScaling
from fzero.optim.transforms import Transform
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.runtime.loss import LossFn, LossRules, loss_of
from sharding import Replicated, Sharded
from sharding.views import torch_dtype

HookStates = Mapping[str, Mapping[str, Any]]
"""What the comm hooks of reductions remember, by flat buffer and axis: tensors, which a graph writes."""


class WithLoss(nn.Module):
    """The model and what is made of its output, as one module to be called with other tensors."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, **how: Any) -> None:
        super().__init__()
        self.model, self.loss_fn, self.how = model, loss_fn, how

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        return loss_of(self.model, self.loss_fn, batch, **self.how)


class Flat(NamedTuple):
    """A flat buffer as a graph may know it: numbers and names."""

    key: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numels: tuple[int, ...]
    """Of the parameters, and of the padding."""
    padded_numel: int
    shard_numel: int
    trainable: bool
    num_param_axes: int
    """Of the axes over which the finest shards lie, how many the model's parameters are brought together along."""
    sums_whole: bool
    """Whether every rank gets all of the reduced gradient."""
    collects_whole: bool
    """Whether micro-steps add up all of the gradient on each rank."""
    sums_late: bool
    """Whether they add up what is summed along the replicate axes at the end."""
    updates_shard: bool
    joins: bool
    """Whether updated shards are joined."""
    has_master: bool
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype

    @classmethod
    def of(cls, buffer: FlatParamPlan, plan: Plan) -> Self:
        layout, row, is_shared = buffer.layout, buffer.row, plan.world_size > 1
        updates_shard = isinstance(row.optimizer, Sharded)
        collects_whole = buffer.grads.local_shape(plan.mesh)[0] == buffer.padded_numel
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
            collects_whole,
            bool(plan.replicate_axes) and not collects_whole,
            updates_shard,
            updates_shard and buffer.params.local_shape(plan.mesh)[0] != buffer.shard_numel,
            buffer.has_master,
            # Where nothing is sent, gradients are in the dtype in which they are kept.
            torch_dtype(buffer.dtypes.reduce if is_shared else buffer.dtypes.grad),
            torch_dtype(buffer.dtypes.grad),
        )


class Rules(NamedTuple):
    """What a compiled step is told about the arithmetic, once.

    `transforms` are by flat buffer; learning rates and momentum are 0-d tensors in them, that somebody else fills. (0-d float64
    and int64 tensors on the CPU are numbers to Dynamo, at first: they cost a second capture.)
    `places` are what stochastic rounding counts a whole flat buffer's elements from, None where it does not round so.
    """

    measures: LossRules
    scaling: LossScaling
    skips_overflow: bool
    transforms: dict[str, Transform]
    places: dict[str, int] | None
    salts: Tensor


class _Shielded(NamedTuple):
    """A 0-d float64 tensor on the CPU, as (1,). As 0-d torch takes it for a number, and forgets what is written to it."""

    value: Tensor


def shielded(tree: Any) -> Any:
    return optree.tree_map(
        lambda x: _Shielded(x.view(1)) if not x.ndim and x.dtype == torch.float64 and x.device.type == "cpu" else x,
        tree,
    )


def bare(tree: Any) -> Any:
    """The tensors as they were shielded, in a graph; each a view."""
    return optree.tree_map(
        lambda x: x.value.view(()) if isinstance(x, _Shielded) else x, tree, is_leaf=lambda x: isinstance(x, _Shielded)
    )
