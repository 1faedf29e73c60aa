"""One rank of a mesh, and the collectives along several axes, each made of collectives along one axis.

Shards are cut along the major axis first. So an all-gather joins neighbours along the minor axis first. A reduce-scatter
starts with the major axis: the traffic along minor axes is divided by the size of the major one. On a mesh of one axis each
is a single collective.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards along `axes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import DATA, WORLD, Bound, observed
from fzero.comms.collectives import GATHER, OTHER, REDUCE
from fzero.comms.comm_hooks import CommHook, Sending, State
from fzero.comms.pending import Pending
from fzero.comms.process_group import along
from fzero.comms.records import CommRecord, Label
from sharding import Mesh, Sharded, Spec

AnyAxis = TypeVar("AnyAxis")
States = Mapping[str, State]
"""The states of the comm hooks of one flat buffer, by axis."""


class Division(Protocol):
    """The part of a plan that these collectives read: how it divides the state among the ranks of a mesh."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def world_size(self) -> int: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def replicate_axes(self) -> tuple[str, ...]: ...
    def shard_of(self, rank: int) -> int: ...


def is_several(mesh: Mesh) -> bool:
    """Whether a mesh has axes besides "data"."""
    return mesh.axis_size(DATA) != mesh.size


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The axes of a plan's mesh, of which this process (or this thread) is one rank.

    Args:
        world: all ranks of the job; on one axis, that axis.
        axes: the axes of the finest division into shards, major first (`Plan.axes`).
        replicate_axes: the axes along which other ranks hold the same shards (`Plan.replicate_axes`).
        shard: the index of this rank's shard in the finest division.
    """

    world: Bound
    axes: tuple[Bound, ...]
    replicate_axes: tuple[Bound, ...]
    shard: int

    @classmethod
    def of(cls, world: Bound, plan: Division) -> Self:
        """*Collective* on several axes of processes: every rank; the first call makes a process group for each axis."""
        mesh, shard = plan.mesh, plan.shard_of(world.rank)
        if not is_several(mesh):
            world = replace(world, name=plan.axes[0])
            return cls(world, (world,), (), shard)
        axes, replicate_axes = (
            tuple(along(world, mesh, name) for name in names) for names in (plan.axes, plan.replicate_axes)
        )
        return cls(replace(world, name=WORLD), axes, replicate_axes, shard)

    @property
    def num_shards(self) -> int:
        """F."""
        return math.prod(axis.size for axis in self.axes)

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same ranks, whose collectives are also reported to `observe`."""
        axes, replicate_axes = (
            tuple(observed(axis, observe) for axis in own) for own in (self.axes, self.replicate_axes)
        )
        return replace(self, world=observed(self.world, observe), axes=axes, replicate_axes=replicate_axes)

    def axes_of(self, spec: Spec) -> tuple[Bound, ...]:
        """The axes that the spec of a part of the state names: the first ones of `axes`."""
        return self.axes[: len(spec.axes)] if isinstance(spec, Sharded) else ()

    def start_all_gather(
        self,
        shard_S: Tensor,
        full: Tensor,
        axes: Sequence[Bound],
        *,
        hooks: Mapping[str, CommHook] = {},
        label: Label = GATHER,
    ) -> Pending:
        """Starts to write the shards of all ranks along `axes` into `full`. `shard_S` may be a slice of it.

        *Collective:* every rank of `axes`.

        Args:
            hooks: stateless comm hooks by axis; only for one axis.
        """
        if hooks:
            (axis,) = axes
            return hooks[axis.name].start_gather(shard_S, axis, None, full_P=full, label=label).pending
        targets = [full]
        for axis in axes[:-1]:
            targets.append(_own(targets[-1], axis))
        pending = None
        for axis in reversed(axes):
            target = targets.pop()
            pending = collectives.start_all_gather(shard_S, target, axis, after=pending, label=label)
            shard_S = target
        assert pending is not None
        return pending

    def start_reduce_scatter(
        self,
        full_P: Tensor,
        *,
        out_S: Tensor | None = None,
        sum_replicas: Literal["now", "later"] = "now",
        held_S: Tensor | None = None,
        hooks: Mapping[str, CommHook] = {},
        states: Mapping[str, State] = {},
        label: Label = REDUCE,
    ) -> Sending:
        """Starts to sum `full_P` over all ranks: along `axes` in order, each in rank order, and then along the replicate axes.

        *Collective:* every rank.

        Args:
            full_P: this rank's summand; must not change until the end. On several axes it is overwritten.
            out_S: the result is written here; may be this rank's shard of `full_P`. None makes a new tensor, or uses that shard.
            sum_replicas: `"later"` leaves the sum along the replicate axes to a later call, which takes this result.
            held_S: the sum of earlier calls. The shard is added to it, in its dtype, before the sum along the replicate axes.
            hooks: the comm hooks, by axis.
            states: the states of the hooks, by axis; the returned `Sending` gives the new ones.
        """
        pending, summand, through = None, full_P, _Through(hooks, states, {})
        for axis in self.axes:
            is_last = axis is self.axes[-1]
            target = out_S if is_last else None
            if target is None and (self.replicate_axes or not is_last):
                target = _own(summand, axis)
            pending = through.start_along(axis, summand, target, pending, label)
            summand = full_P if target is None else target
        assert pending is not None
        if self.replicate_axes and sum_replicas == "now":
            pending = pending if held_S is None else _plus(pending, held_S)
            pending = through.start_sum(summand, self.replicate_axes, pending, label)
        return Sending(pending, through.now)

    def start_all_reduce(
        self,
        full_P: Tensor,
        *,
        hooks: Mapping[str, CommHook] = {},
        states: Mapping[str, State] = {},
        label: Label = REDUCE,
    ) -> Sending:
        """Starts to sum `full_P` over all ranks, in place and in the same order. *Collective:* every rank."""
        axes = [axis for axis in (*self.axes, *self.replicate_axes) if axis.size > 1] or [self.world]
        through = _Through(hooks, states, {})
        return Sending(through.start_sum(full_P, axes, None, label), through.now)

    def all_gather(self, shard: Tensor, axes: Sequence[Bound], *, label: Label = GATHER) -> Tensor:
        """The shards of all ranks along `axes`, in order. *Collective:* every rank of `axes`."""
        for axis in reversed(axes):
            shard = collectives.all_gather(shard, axis, label=label)
        return shard

    def stack(self, x: Tensor, *, label: Label = OTHER) -> Tensor:
        """The small tensors of all shards, along a new first dimension. *Collective:* every rank of `axes`."""
        return stack_along(x, self.axes, lambda x, axis: collectives.stack(x, axis, label=label))


def stack_along(x: Tensor, axes: Sequence[AnyAxis], stack: Callable[[Tensor, AnyAxis], Tensor]) -> Tensor:
    """The tensors of all ranks along `axes`, major first, in a new first dimension; `stack` is the same along one axis."""
    *majors, minor = axes
    rows = stack(x, minor)
    for axis in reversed(majors):
        rows = stack(rows, axis).flatten(0, 1)
    return rows


class _Through(NamedTuple):
    """One reduction that uses the comm hooks of some axes."""

    hooks: Mapping[str, CommHook]
    before: States
    after: dict[str, Callable[[], State]]
    """Functions that return the new states, by axis."""

    def now(self) -> States:
        """The states of the comm hooks, after the reduction has ended."""
        return {**self.before, **{axis: state() for axis, state in self.after.items()}}

    def start_along(
        self, axis: Bound, full: Tensor, out: Tensor | None, after: Pending | None, label: Label
    ) -> Pending:
        """Starts a reduce-scatter along one axis."""
        if axis.name not in self.hooks:
            return collectives.start_reduce_scatter(full, axis, out_S=out, after=after, label=label)
        hook, state = self.hooks[axis.name], self.before.get(axis.name)
        sending = hook.start_reduce_scatter(full, axis, state, out_S=out, after=after, label=label)
        if axis.name in self.before:
            self.after[axis.name] = sending.state
        return sending.pending if out is None else _into(out, sending.pending)

    def start_sum(self, full: Tensor, axes: Sequence[Bound], after: Pending | None, label: Label) -> Pending:
        """Starts to sum along one axis after the other, in place. The sums are gathered without comm hooks."""
        first, *then = axes
        if not any(axis.name in self.hooks for axis in axes):
            return collectives.start_all_reduce(full, first, then=then, after=after, label=label)
        own = _own(full, first)
        reduction = self.start_along(first, full, own, after, label)
        if then:
            reduction = self.start_sum(own, then, reduction, label)
        return collectives.start_all_gather(own, full, first, after=reduction, label=label)


def _into(out: Tensor, pending: Pending) -> Pending:
    """The same collective, with its result in `out`; a comm hook may leave it in other memory."""

    def finish() -> Tensor:
        result = pending.finish()
        return result if result.data_ptr() == out.data_ptr() else out.copy_(result)

    return Pending(pending.label, pending.works, finish)


def _plus(pending: Pending, x: Tensor) -> Pending:
    """The same collective, whose result is the sum of its result and `x`; `x` becomes that sum, too."""

    def finish() -> Tensor:
        result = pending.finish()
        return result.copy_(x.add_(result))

    return Pending(pending.label, pending.works, finish)


def _own(full: Tensor, axis: Bound) -> Tensor:
    """This rank's shard of a tensor that is divided along one axis, as a view."""
    numel = full.numel() // axis.size
    return full if axis.size == 1 else full[axis.rank * numel : (axis.rank + 1) * numel]
