"""One rank of a mesh, and the collectives along several axes, each made of those along one.

Shards are cut along the major axis first. So an all-gather joins neighbours along the minor axis first, and a
reduce-scatter goes the other way round: what crosses the minor axes has been divided by the size of the major one. Along
one axis each is the one collective, and nothing else.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards along `axes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from torch import Tensor

from fzero import collectives
from fzero.collectives import EVERYONE, Bound, Pending
from fzero.plan import Plan
from sharding import Sharded, Spec


@dataclass(frozen=True, slots=True)
class BoundMesh:
    """The axes of a plan's mesh, of which this process (or this thread) is one rank.

    Args:
        everyone: all ranks of the job; on one axis, that axis.
        axes: over which the finest shards lie, major first (`Plan.axes`).
        further: those along which other ranks hold the same shards (`Plan.further_axes`).
        shard: which of the finest shards this rank holds.
    """

    everyone: Bound
    axes: tuple[Bound, ...]
    further: tuple[Bound, ...]
    shard: int

    @classmethod
    def of(cls, everyone: Bound, plan: Plan) -> Self:
        """*Collective* where several axes are real: every rank; makes a process group for each, the first time."""
        mesh, shard = plan.mesh, plan.shard_of(everyone.rank)
        if mesh.axis_size(plan.axes[0]) == mesh.size:
            return cls(everyone, (everyone,), (), shard)
        axes, further = (
            tuple(collectives.along(everyone, mesh, name) for name in names) for names in names_along(plan)
        )
        return cls(replace(everyone, name=EVERYONE), axes, further, shard)

    @property
    def num_shards(self) -> int:
        """F."""
        return math.prod(axis.size for axis in self.axes)

    def axes_of(self, spec: Spec) -> tuple[Bound, ...]:
        """Those that the spec of a part of the state names: the first ones of `axes`."""
        return self.axes[: len(spec.axes)] if isinstance(spec, Sharded) else ()

    def start_all_gather(
        self, shard_S: Tensor, full: Tensor, axes: Sequence[Bound], *, label: str = "all_gather"
    ) -> Pending:
        """Starts to fill `full` with the shards of all ranks along `axes`, of which `shard_S` may be a slice.

        *Collective:* every rank of `axes`.
        """
        wholes = [full]
        for axis in axes[:-1]:
            wholes.append(_own(wholes[-1], axis))
        pending = None
        for axis in reversed(axes):
            whole = wholes.pop()
            pending = collectives.start_all_gather(shard_S, whole, axis, after=pending, label=label)
            shard_S = whole
        assert pending is not None
        return pending

    def start_reduce_scatter(
        self,
        full_P: Tensor,
        *,
        out_S: Tensor | None = None,
        further: Literal["now", "later"] = "now",
        held_S: Tensor | None = None,
        label: str = "reduce_scatter",
    ) -> Pending:
        """Starts to sum `full_P` over all ranks: along `axes` in order, each in rank order, and then along the further ones.

        *Collective:* every rank.

        Args:
            full_P: this rank's summand; must not change until the end, and is written where there are several axes.
            out_S: takes the result; may be this rank's shard of `full_P`. None makes a new tensor, or uses that shard.
            further: `"later"` leaves the sum along the further axes to a later call, which is given this result.
            held_S: what earlier calls left. The shard is added to it, in its dtype, before the sum along the further axes.
        """
        pending, summand = None, full_P
        for axis in self.axes:
            is_last = axis is self.axes[-1]
            target = out_S if is_last else None
            if target is None and (self.further or not is_last):
                target = _own(summand, axis)
            pending = collectives.start_reduce_scatter(summand, axis, out_S=target, after=pending, label=label)
            summand = full_P if target is None else target
        assert pending is not None
        if self.further and further == "now":
            first, *then = self.further
            pending = pending if held_S is None else _plus(pending, held_S)
            pending = collectives.start_all_reduce(summand, first, then=then, after=pending, label=label)
        return pending

    def start_all_reduce(self, full_P: Tensor, *, label: str = "all_reduce") -> Pending:
        """Starts to sum `full_P` over all ranks, in place and in the same order. *Collective:* every rank."""
        first, *then = [axis for axis in (*self.axes, *self.further) if axis.size > 1] or [self.everyone]
        return collectives.start_all_reduce(full_P, first, then=then, label=label)

    def all_gather(self, shard: Tensor, axes: Sequence[Bound], *, label: str = "all_gather") -> Tensor:
        """The shards of all ranks along `axes` joined. *Collective:* every rank of `axes`."""
        for axis in reversed(axes):
            shard = collectives.all_gather(shard, axis, label=label)
        return shard

    def stack(self, x: Tensor, *, label: str = "stack") -> Tensor:
        """The small tensors of all shards, along a new first dimension. *Collective:* every rank of `axes`."""
        *majors, minor = self.axes
        rows = collectives.stack(x, minor, label=label)
        for axis in reversed(majors):
            rows = collectives.stack(rows, axis, label=label).flatten(0, 1)
        return rows


def names_along(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which the finest shards lie, and the further ones, in the order in which ranks make their groups."""
    return plan.axes, plan.further_axes


def _plus(pending: Pending, x: Tensor) -> Pending:
    """The same collective, with its result added to `x` and made that sum."""

    def finish() -> Tensor:
        result = pending.finish()
        return result.copy_(x.add_(result))

    return Pending(pending.label, pending.works, finish)


def _own(full: Tensor, axis: Bound) -> Tensor:
    """This rank's part of a tensor that is cut along one axis, as a view."""
    numel = full.numel() // axis.size
    return full if axis.size == 1 else full[axis.rank * numel : (axis.rank + 1) * numel]
