"""`UnitRules`: the numbers of a plan about gathers and reductions of units: sizes,
limits, kinds of memory.

The unit scheduler reads nothing else of a plan.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

from fzero.plans.flat_params import FlatParamPlan, UnitPlan
from sharding import Mesh, Placement


class FlatGrad(NamedTuple):
    """A trained flat buffer for the scheduler: its key, the elements in memory only
    until its reduction ends, whether this rank keeps the full gradient, and where that
    gradient lives."""

    key: str
    numel: int
    is_full: bool
    placement: Placement

    @classmethod
    def of(cls, buffer: FlatParamPlan, mesh: Mesh, *, is_hooked: bool = False) -> Self:
        """`is_hooked`: whether a comm hook sends it."""
        flow, placement = buffer.flow, buffer.grads.placement
        is_full = buffer.grads.local_shape(mesh) == (buffer.padded_numel,)
        # Two ranks sum the state's own tensor in place. More ranks receive parts, in memory of
        # about its size.
        is_in_place = (
            flow.reduces_to == "full" and flow.send_dtype == flow.keep_dtype and mesh.size <= 2
        )
        is_free = is_in_place and not placement.is_away and not is_hooked
        return cls(buffer.key, 0 if is_free else buffer.padded_numel, is_full, placement)


@dataclass(frozen=True)
class UnitRule:
    """The numbers of a unit that the scheduler reads.

    Attributes:
        gathered_numel: padded elements that its gather allocates; 0 where every rank
            holds it in full.
        num_staged: the number of flat buffers whose shard is read from a file, and
            keeps its host buffer until the unit is released; 0 on several shards.
        grads: its trained flat buffers.
        remembers: whether the comm hooks of its reductions have a state.
    """

    gathered_numel: int
    num_staged: int
    grads: tuple[FlatGrad, ...]
    remembers: bool

    @classmethod
    def of(
        cls,
        unit: UnitPlan,
        mesh: Mesh,
        *,
        num_shards: int,
        is_hooked: bool,
        hook_states: Collection[str],
    ) -> Self:
        """The rule of a unit.

        Args:
            is_hooked: whether reductions have a comm hook.
            hook_states: the keys of flat buffers whose comm hook has a state.
        """
        # On one shard the model computes with the very memory that a file was read into.
        num_staged = sum(b.param_placement.in_file for b in unit.buffers) if num_shards == 1 else 0
        grads = tuple(
            FlatGrad.of(buffer, mesh, is_hooked=is_hooked)
            for buffer in unit.buffers
            if buffer.trainable
        )
        return cls(
            unit.gathered_numel, num_staged, grads, any(grad.key in hook_states for grad in grads)
        )

    @cached_property  # a step asks for it several times per unit
    def reduced_numel(self) -> int:
        """Elements in memory only until its reductions end."""
        return sum(grad.numel for grad in self.grads)


@dataclass(frozen=True, slots=True)
class UnitRules:
    """The numbers of a plan that the scheduler reads; `Plan.unit_rules` is made once
    with the plan.

    Attributes:
        units: by name, in the order of their declaration.
        world_size, num_shards: the number of ranks, and of the finest shards.
        prefetches: whether the next unit may be gathered, and its shards loaded, while
            one is in use.
        max_live: the largest number of gathered elements that are live after a
            prefetch.
        max_reducing: the largest number of elements of full gradients that wait for
            their reduction, besides those of one unit and those that the state holds
            anyway and that are summed in place.
        max_staged: the largest number of flat buffers in the memory into which files
            are read; None sets no limit.
    """

    units: dict[str, UnitRule]
    world_size: int
    num_shards: int
    prefetches: bool
    max_live: int
    max_reducing: int
    max_staged: int | None

    def may_start_early(self, present: str, following: str) -> bool:
        """Whether the unit `following` may be gathered while `present` is in use."""
        one, other = self.units[present], self.units[following]
        has_room = self.max_staged is None or one.num_staged + other.num_staged <= self.max_staged
        return (
            self.prefetches
            and has_room
            and one.gathered_numel + other.gathered_numel <= self.max_live
        )

    def most_gathered(self, *, alike: bool = True) -> int:
        """The bound on gathered elements, live or under way: one unit is used while the
        next (or the same again) is gathered.

        Args:
            alike: whether every rank uses each unit that is gathered. If not, a rank
                takes part in gathers for other ranks while it uses a unit.
        """
        largest = max(unit.gathered_numel for unit in self.units.values())
        if not alike:
            return 2 * largest
        return max(largest, min(2 * largest, self.max_live)) if self.prefetches else largest
