"""The axes of a mesh, and collectives along several axes. Each of these is a sequence
of collectives along one axis.

Shards are cut along the major axis first. So an all-gather joins neighbours along the
minor axis first. A reduce-scatter starts with the major axis: the traffic along minor
axes is divided by the size of the major one. On a mesh of one axis, each of them is a
single collective.

A collective gets the tensor that will hold the result of the previous collective
(`Pending.out`), and waits for that collective (`after`). The same code works in a graph
and on stacked ranks, where `out` is a new value.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards
along `axes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import WORLD, AbstractAxis, ProcessAxis, RankAxis, observed
from fzero.comms.collectives import GATHER, OTHER, REDUCE, AnyAxis, Axis
from fzero.comms.comm_hooks import CommHook, Sending, State
from fzero.comms.pending import Pending, ended
from fzero.comms.process_group import AnyRank, along, once_more
from fzero.comms.records import CommRecord, Label
from fzero.comms.stacked import StackedAxis
from fzero.comms.traced import TracedAxis
from sharding import DATA, Mesh

if TYPE_CHECKING:
    from fzero.comms.stacked import Stacked, StackedAxis
    from fzero.comms.traced import TracedAxis

T = TypeVar("T")
Hooks = Mapping[str, CommHook]
States = Mapping[str, State]
"""The comm hooks of one flat buffer, and their states, by axis."""
_NONE: Mapping[str, Any] = {}
SEQ = "seq"
"""The axis whose ranks share the tokens of the same samples (`fzero.sequence`). For ZeRO
they are ranks of "data" like any other: `fzero.plans.mesh_axes.folded`
makes one axis of both.
"""


class MeshPlan(Protocol):
    """The part of a plan that these collectives read: how it divides the state among
    the ranks of a mesh.
    """

    @property
    def mesh(self) -> Mesh: ...
    @property
    def world_size(self) -> int: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def replicate_axes(self) -> tuple[str, ...]: ...
    @property
    def seq_size(self) -> int: ...
    def shard_of(self, rank: int) -> int: ...


def unfolded(mesh: Mesh, seq_size: int) -> Mesh:
    """The mesh of the ranks, of which `fzero.plans.mesh_axes.folded` makes the mesh of the state.

    >>> unfolded(Mesh.of(node=2, data=8), 2).axes
    (('node', 2), ('data', 4), ('seq', 2))
    """
    if seq_size == 1:
        return mesh
    axes: list[tuple[str, int]] = []
    for name, size in mesh.axes:
        is_data = name == DATA
        axes += [(name, size // seq_size), (SEQ, seq_size)] if is_data else [(name, size)]
    return Mesh(tuple(axes))


def is_several(mesh: Mesh) -> bool:
    """Whether a mesh has axes besides "data"."""
    return mesh.axis_size(DATA) != mesh.size


@dataclass(frozen=True, slots=True)
class AxisMesh(Generic[AnyAxis]):
    """The axes of a plan's mesh.

    Args:
        world: all ranks of the job; on one axis, that axis.
        axes: the axes over which the finest shards lie, major first (`Plan.axes`).
        replicate_axes: the axes along which other ranks hold the same shards
            (`Plan.replicate_axes`).
        seq: the ranks that share the tokens of the same samples (`Plan.seq_size`); None
            where each rank has samples of its own.
    """

    world: AnyAxis
    axes: tuple[AnyAxis, ...]
    replicate_axes: tuple[AnyAxis, ...]
    seq: AnyAxis | None = field(default=None, kw_only=True)

    def start_all_gather(
        self,
        shard_S: Tensor,
        full: Tensor | None,
        axes: Sequence[AnyAxis],
        *,
        hooks: Hooks = _NONE,
        label: Label = GATHER,
    ) -> Pending:
        """Starts to write the shards of all ranks along `axes` into `full`. `shard_S`
        may be a slice of it.

        *Collective:* every rank of `axes`.

        Args:
            full: None makes a new tensor.
            hooks: stateless comm hooks by axis.
        """
        if full is None and axes and isinstance(axes[0], RankAxis):
            numel = shard_S.numel() * math.prod(axis.size for axis in axes)
            shard_S, full = shard_S.contiguous(), shard_S.new_empty(numel)
        targets = [full]
        for axis in axes[:-1]:
            targets.append(_own(targets[-1], axis))
        pending = None
        for axis in reversed(axes):
            x, target = _out(pending, shard_S), targets.pop()
            if _is_hooked(axis, x, hooks):  # a comm hook does not wait for another collective
                x = x if pending is None else pending.wait()
                sending = hooks[axis.name].start_gather(x, axis, None, full_P=target, label=label)
                pending = _into(target, sending.pending)
            else:
                pending = collectives.start_all_gather(x, target, axis, after=pending, label=label)
        return pending or ended(shard_S, label)

    def start_reduce_scatter(
        self,
        full_P: Tensor,
        *,
        out_S: Tensor | None = None,
        sum_replicas: Literal["now", "later"] = "now",
        accumulated_S: Tensor | None = None,
        hooks: Hooks = _NONE,
        states: States = _NONE,
        label: Label = REDUCE,
    ) -> Sending:
        """Starts to sum `full_P` over all ranks: along `axes` in order, each in rank
        order, and then along the replicate axes.

        *Collective:* every rank.

        Args:
            full_P: this rank's summand; must not change until the end. On several axes
                it is overwritten.
            out_S: the result is written here; may be this rank's shard of `full_P`.
                None makes a new tensor, or uses that shard.
            sum_replicas: `"later"` leaves the sum along the replicate axes to
                `start_sum_replicas`, which takes this result.
            accumulated_S: the sum of earlier calls. The shard is added to it, in its
                dtype, before the sum along the replicate axes.
            hooks: the comm hooks, by axis.
            states: the states of the hooks, by axis; the returned `Sending` gives the
                new ones.
        """
        pending, through = None, _Through(hooks, states, {})
        for axis in self.axes:
            x, is_last = _out(pending, full_P), axis is self.axes[-1]
            target = out_S if is_last else None
            if target is None and (self.replicate_axes or not is_last):
                target = _own(x, axis)
            pending = through.start_reduce_scatter(x, axis, target, pending, label)
        assert pending is not None
        if self.replicate_axes and sum_replicas == "now":
            pending = pending if accumulated_S is None else _plus(pending, accumulated_S)
            pending = through.start_sum(_out(pending, full_P), self.replicate_axes, pending, label)
        return Sending(pending, through.now)

    def start_sum_replicas(
        self,
        shard_S: Tensor,
        *,
        hooks: Hooks = _NONE,
        states: States = _NONE,
        label: Label = REDUCE,
    ) -> Sending:
        """Starts to sum shards along the replicate axes, in place. *Collective:* every
        rank of these.
        """
        through = _Through(hooks, states, {})
        return Sending(through.start_sum(shard_S, self.replicate_axes, None, label), through.now)

    def start_all_reduce(
        self, full_P: Tensor, *, hooks: Hooks = _NONE, states: States = _NONE, label: Label = REDUCE
    ) -> Sending:
        """Starts to sum `full_P` over all ranks, in place and in the same order.
        *Collective:* every rank.
        """
        through = _Through(hooks, states, {})
        return Sending(
            through.start_sum(full_P, (*self.axes, *self.replicate_axes), None, label), through.now
        )

    def all_gather(
        self, shard: Tensor, axes: Sequence[AnyAxis], *, label: Label = GATHER
    ) -> Tensor:
        """The shards of all ranks along `axes`, in order. *Collective:* every rank of
        `axes`.
        """
        return self.start_all_gather(shard, None, axes, label=label).wait()

    def stack(self, x: Tensor, *, label: Label = OTHER) -> Tensor:
        """Stacks the small tensors of all shards along a new first dimension.
        *Collective:* every rank of `axes`.
        """
        *majors, minor = self.axes
        rows = collectives.stack(x, minor, label=label)
        for axis in reversed(majors):
            rows = collectives.stack(rows, axis, label=label).flatten(0, 1)
        return rows


@dataclass(frozen=True, slots=True)
class RankMesh(AxisMesh[RankAxis]):
    """The axes of a plan's mesh, of which this process (or this thread) is one rank.

    Args:
        shard: the index of this rank's shard in the finest division.
    """

    shard: int

    @classmethod
    def of(cls, world: RankAxis, plan: MeshPlan) -> Self:
        """The axes of this rank. *Collective* on several axes of processes: the first
        call makes a process group for each.
        """
        return cls(*_axes(world, plan), plan.shard_of(world.rank), seq=seq_axis(world, plan))

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same ranks, whose collectives are also reported to `observe`."""
        both = (self.axes, self.replicate_axes)
        axes, replicate_axes = (tuple(observed(axis, observe) for axis in own) for own in both)
        return replace(
            self,
            world=observed(self.world, observe),
            axes=axes,
            replicate_axes=replicate_axes,
            seq=None if self.seq is None else observed(self.seq, observe),
        )


def _axes(
    world: AnyRank, plan: MeshPlan
) -> tuple[AnyRank, tuple[AnyRank, ...], tuple[AnyRank, ...]]:
    """All ranks, the shard axes and the replicate axes of one rank."""
    if not is_several(plan.mesh):
        world = replace(world, name=plan.axes[0])
        return world, (world,), ()
    both = (plan.axes, plan.replicate_axes)
    axes, replicate_axes = (
        tuple(along(world, plan.mesh, name) for name in names) for names in both
    )
    return replace(world, name=WORLD), axes, replicate_axes


def seq_axis(world: Any, plan: MeshPlan) -> Any:
    """The ranks that share the tokens of this rank's samples, an axis of the kind of
    `world`; None where it has its own. *Collective* on processes, like `RankMesh.of`.
    """
    if plan.seq_size == 1:
        return None
    axis = along(world, unfolded(plan.mesh, plan.seq_size), SEQ)
    # The collectives of a forward must not come between those of the state in one group.
    is_all = axis.size == world.size and not isinstance(axis, AbstractAxis)
    return once_more(axis) if is_all else axis


# --- meshes in a graph ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneRank:
    """In a graph of one rank, the rank that holds shard number `shard`.

    `fzero.comms.stacked.Stacked` is for all ranks, and documents the methods.
    """

    shard: int

    def map(self, function: Callable[..., T]) -> Callable[..., T]:
        return function

    def random_per_rank(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def rank_by_rank(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def shard_of(self, flat: Tensor, numel: int) -> Tensor:
        start = self.shard % (flat.numel() // numel) * numel
        return flat[start : start + numel]

    def write_shard(self, flat: Tensor, shard_S: Tensor) -> None:
        self.shard_of(flat, shard_S.numel()).copy_(shard_S)

    def shard_start(self, numel: int) -> int:
        return self.shard * numel


def traced_mesh(
    world: ProcessAxis | AbstractAxis, plan: MeshPlan, device: torch.device
) -> AxisMesh[TracedAxis]:
    """The mesh of one rank in a graph. *Collective* on several axes of processes, like
    `RankMesh.of`.
    """
    all_ranks, *several = _axes(world, plan)
    axes, replicate_axes = (tuple(TracedAxis.of(axis, device) for axis in own) for own in several)
    # An axis as long as the world has the world's group, so both take one name.
    as_long = (axis for axis in (*axes, *replicate_axes) if axis.size == world.size)
    seq = seq_axis(world, plan)
    return AxisMesh(
        next(as_long, None) or TracedAxis.of(all_ranks, device),
        axes,
        replicate_axes,
        seq=None if seq is None else TracedAxis.of(seq, device),
    )


def stacked_mesh(ranks: Stacked, plan: MeshPlan) -> AxisMesh[StackedAxis]:
    """The mesh of all ranks at once."""
    axes, replicate_axes = (
        tuple(map(ranks.axis, names)) for names in (plan.axes, plan.replicate_axes)
    )
    mesh = unfolded(plan.mesh, plan.seq_size)
    seq = None if plan.seq_size == 1 else StackedAxis.of(mesh, SEQ, ranks)
    return AxisMesh(StackedAxis(plan.world_size, ranks=ranks), axes, replicate_axes, seq=seq)


# --- parts of collectives along several axes ------------------------------------------------------


class _Through(NamedTuple):
    """One reduction that uses the comm hooks of some axes."""

    hooks: Hooks
    before: States
    after: dict[str, Callable[[], State]]
    """Functions that return the new states, by axis."""

    def now(self) -> States:
        """The states of the comm hooks, after the reduction has ended."""
        return {**self.before, **{axis: state() for axis, state in self.after.items()}}

    def start_reduce_scatter(
        self, full: Tensor, axis: Axis, out: Tensor | None, after: Pending | None, label: Label
    ) -> Pending:
        if not _is_hooked(axis, full, self.hooks):
            return collectives.start_reduce_scatter(full, axis, out_S=out, after=after, label=label)
        hook, state = self.hooks[axis.name], self.before.get(axis.name)
        sending = hook.start_reduce_scatter(full, axis, state, out_S=out, after=after, label=label)
        if axis.name in self.before:
            self.after[axis.name] = sending.state
        return _into(out, sending.pending)

    def start_sum(
        self, full: Tensor, axes: Sequence[Axis], after: Pending | None, label: Label
    ) -> Pending:
        """Starts to sum along one axis after the other, in place. The sums are gathered
        without comm hooks.

        The other axes are summed between the two halves of the all-reduce along the
        first axis, because tensors are small there.
        """
        several = [axis for axis in axes if axis.size > 1] or axes[:1]
        if not several:
            return after or ended(full, label)
        first, *then = several
        is_hooked = _is_hooked(first, full, self.hooks)
        if not then and not is_hooked:
            return collectives.start_all_reduce(full, first, after=after, label=label)
        halves = first if is_hooked else collectives.in_halves(full, first, label)
        reduction = self.start_reduce_scatter(full, halves, _own(full, first), after, label)
        if then:
            reduction = self.start_sum(_out(reduction, full), then, reduction, label)
        return collectives.start_all_gather(
            _out(reduction, full), full, halves, after=reduction, label=label
        )


def _is_hooked(axis: Axis, x: Tensor, hooks: Hooks) -> bool:
    """Whether a comm hook sends `x` along an axis. One rank alone sends nothing, and an
    empty tensor is not sent.
    """
    return axis.name in hooks and axis.size > 1 and x.numel() > 0


def _out(pending: Pending | None, first: Tensor) -> Tensor:
    """The tensor that the next collective sends: the result of the previous collective,
    or `first` if there is none.
    """
    if pending is None:
        return first
    assert pending.out is not None
    return pending.out


def _into(out: Tensor | None, pending: Pending) -> Pending:
    """The collective of a comm hook, with its result in `out`. (The hook may have
    written the result to other memory.)
    """
    if out is not None:
        return pending.then(
            lambda result: result if result.data_ptr() == out.data_ptr() else out.copy_(result), out
        )
    return pending if pending.works else ended(pending.finish(), pending.label)


def _plus(pending: Pending, x: Tensor) -> Pending:
    """The same collective, with `x` added to its result; the sum is also written into
    `x`.
    """
    return pending.then(lambda result: result.copy_(x.add_(result)), pending.out)


def _own(full: Tensor | None, axis: Axis) -> Tensor | None:
    """This rank's shard of a tensor that is divided along one axis, as a view to write
    to; None if there is no such memory.
    """
    if full is None or not isinstance(axis, RankAxis):
        return None
    numel = full.numel() // axis.size
    return full if axis.size == 1 else full[axis.rank * numel : (axis.rank + 1) * numel]
