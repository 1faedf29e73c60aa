"""The collectives of `fzero.comms.mesh` in a captured step, as nodes of a graph.

A `TracedMesh` holds axes and ranks. Each axis is that of one rank (`TracedAxis`) or of all ranks at once (`StackedAxis`). The
ranks (`OneRank`, `Stacked`) know which shard is their own and how a function runs on them. Collectives along several axes are
made of collectives along one axis, in the order of the eager step, so that they give the same bits.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards along `axes`, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import optree
import torch
from torch import Tensor

from fzero.comms.axes import WORLD, AbstractAxis, ProcessAxis
from fzero.comms.comm_hooks import CommHook
from fzero.comms.mesh import Division, stack_along
from fzero.comms.process_group import along
from fzero.comms.stacked import Stacked, StackedAxis
from fzero.comms.traced import TracedAxis

T = TypeVar("T")


class AxisInGraph(Protocol):
    """The collectives along one axis; `TracedAxis` describes each."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, shard_S: Tensor) -> Tensor: ...
    def reduce_scatter(self, full_P: Tensor) -> Tensor: ...
    def all_reduce(self, full_P: Tensor) -> Tensor: ...
    def all_to_all(self, rows_WN: Tensor) -> Tensor: ...
    def stack(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """The rank that holds shard number `shard`, in a graph of one rank."""

    shard: int

    def each(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function` on this rank."""
        return function

    def drawing(self) -> AbstractContextManager[Any]:
        """A context for code that draws random numbers."""
        return nullcontext()

    def in_turn(self, function: Callable[..., None], *args: Any) -> None:
        """`function`, which writes into its arguments, on this rank."""
        function(*args)

    def own(self, flat: Tensor, numel: int) -> Tensor:
        """This rank's shard of `numel` elements: a view of a flat tensor that holds several shards in order."""
        start = self.shard % (flat.numel() // numel) * numel
        return flat[start : start + numel]

    def write_own(self, flat: Tensor, shard_S: Tensor) -> None:
        """Writes this rank's shard of such a tensor."""
        self.own(flat, shard_S.numel()).copy_(shard_S)

    def place(self, numel: int) -> int:
        """The start of this rank's shard, if shards have `numel` elements."""
        return self.shard * numel


@dataclass(frozen=True, slots=True)
class TracedMesh:
    """The axes of a plan's mesh in a graph; `world`, `axes` and `replicate_axes` as in a `RankMesh`."""

    ranks: OneRank | Stacked
    world: AxisInGraph
    axes: tuple[AxisInGraph, ...]
    replicate_axes: tuple[AxisInGraph, ...]

    @classmethod
    def of(cls, world: ProcessAxis | AbstractAxis, plan: Division, device: torch.device) -> Self:
        """The mesh of one rank. *Collective* on several axes of processes, like `RankMesh.of`."""
        axes, replicate_axes = (
            tuple(TracedAxis.of(along(world, plan.mesh, name), device) for name in names)
            for names in (plan.axes, plan.replicate_axes)
        )
        all_ranks = next((axis for axis in (*axes, *replicate_axes) if axis.size == world.size), None)
        return cls(
            OneRank(plan.shard_of(world.rank)),
            all_ranks or TracedAxis.of(world, device, name=WORLD),
            axes,
            replicate_axes,
        )

    @classmethod
    def of_all(cls, ranks: Stacked, plan: Division) -> Self:
        """The mesh of all ranks at once."""
        axes, replicate_axes = (
            tuple(StackedAxis.of(plan.mesh, name, ranks) for name in names)
            for names in (plan.axes, plan.replicate_axes)
        )
        return cls(ranks, StackedAxis(plan.world_size, ranks=ranks), axes, replicate_axes)

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.world.size

    @property
    def num_shards(self) -> int:
        """F."""
        return math.prod([axis.size for axis in self.axes])

    @property
    def by_group(self) -> dict[str, TracedAxis]:
        """The axes of one rank, by the names of their groups in a graph."""
        axes = [axis for axis in (self.world, *self.axes, *self.replicate_axes) if isinstance(axis, TracedAxis)]
        return {axis.group_name: axis for axis in axes if axis.size > 1}

    def all_gather(self, shard: Tensor, axes: Sequence[AxisInGraph], hooks: Mapping[str, CommHook] = {}) -> Tensor:
        """The shards of all ranks along `axes`, gathered along the last axis first; hooks must be stateless."""
        for axis in reversed(axes):
            if axis.name in hooks and axis.size > 1 and shard.numel():
                shard = hooks[axis.name].gather(shard, axis, None)[0]
            else:
                shard = axis.all_gather(shard)
        return shard

    def reduce_scatter(self, full_P: Tensor, through: Through) -> Tensor:
        """This rank's shard of the sum along `axes`, P → S."""
        for axis in self.axes:
            full_P = through.reduce_scatter(full_P, axis)
        return full_P

    def sum_replicas(self, shard_S: Tensor, through: Through) -> Tensor:
        """The sum along the replicate axes."""
        return _all_reduce(shard_S, self.replicate_axes, through)

    def all_reduce(self, full_P: Tensor, through: Through) -> Tensor:
        """The sum over all ranks: along `axes`, and then along the replicate axes."""
        return _all_reduce(full_P, (*self.axes, *self.replicate_axes), through)

    def stack(self, x: Tensor) -> Tensor:
        """The small tensors of all ranks along a new first dimension."""
        return self.world.stack(x)

    def stack_shards(self, x: Tensor) -> Tensor:
        """The small tensors of all shards along a new first dimension."""
        return stack_along(x, self.axes, lambda x, axis: axis.stack(x))


class Through(NamedTuple):
    """The comm hooks of one flat buffer's reductions, and their states (tensors that are overwritten), by axis."""

    hooks: Mapping[str, CommHook]
    states: Mapping[str, Any]

    def reduce_scatter(self, full: Tensor, axis: AxisInGraph) -> Tensor:
        """This rank's shard of the sum along one axis."""
        if axis.name not in self.hooks or axis.size == 1 or not full.numel():
            return axis.reduce_scatter(full)
        state = self.states.get(axis.name)
        shard, after = self.hooks[axis.name].reduce_scatter(full, axis, state)
        for kept, now in zip(optree.tree_leaves(state), optree.tree_leaves(after), strict=True):
            kept.copy_(now)
        return shard


def _all_reduce(x: Tensor, axes: Sequence[AxisInGraph], through: Through) -> Tensor:
    """The sum along several axes: those after the first come between its two halves, where tensors are small."""
    several = [axis for axis in axes if axis.size > 1]
    is_exact = not any(axis.name in through.hooks for axis in several)
    if is_exact and len(several) < 2:
        return several[0].all_reduce(x) if several else x
    first, *then = several
    shard = through.reduce_scatter(x, first)
    return first.all_gather(_all_reduce(shard, then, through) if then else shard)
