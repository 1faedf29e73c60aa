"""The plan of a training step: everything that is known before it runs, as integers and
names.

1. The model is cut into *units*, which are gathered and released together
  (`fzero.plans.units`).
2. The parameters of a unit lie in flat buffers, one for each set of dtypes, group and
  so on (`fzero.plans.flat_params`).
3. The ZeRO stage decides which of parameters, gradients and optimizer state are sharded
  (`fzero.config.stages`).
4. State may be placed in host memory or in files (`fzero.plans.placements`).

On a mesh of several axes (`fzero.plans.mesh_axes`) gradients and optimizer state are
sharded over `Plan.axes`, the parameters over "data" alone.

Shape letters: N elements of a buffer, P padded = F·S, S elements of a shard, F shards,
W ranks (on one axis F = W).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import optree
from rich.console import Group

from fzero.common.notebooks import as_html
from fzero.common.text_tables import as_text
from fzero.config.stages import STAGES, Stage, StageSpecs
from fzero.plans import owned, report, traffic
from fzero.plans.dataflow import CommHooks
from fzero.plans.flat_params import FlatParamPlan, UnitPlan
from fzero.plans.hook_choice import state_like
from fzero.plans.leaves import StateLeaf, state_leaves
from fzero.plans.mesh_axes import num_ranks, replicate_axes
from fzero.plans.streaming import Streaming
from fzero.plans.traffic import totals
from fzero.plans.unit_rules import UnitRule, UnitRules
from sharding import Mesh, Replicated, Sharded, TensorSpec
from sharding.dtypes import itemsize
from sharding.specs import Placement
from sharding.views import dtype_name, torch_dtype

__all__ = ["FlatParamPlan", "Plan", "UnitPlan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a training step that is known before it runs. `print(plan)`
    shows a table.

    Attributes:
        stage: the ZeRO stage.
        mesh: the ranks.
        axes: the axes over which the finest shards lie, major first; see
            `fzero.plans.mesh_axes`.
        units: in the order of their declaration.
        aliases: the other names of tied parameters and buffers, each with the name
            under which it is stored.
        optimizer: the specs of the optimizer state, by flat buffer.
        buffers: the specs of the module's own buffers, by name.
        prefetch: the largest number of elements that a compiled step gathers before
            their use. Compiled and eager steps gather at least the next unit early,
            unless it is 0; None is one unit.
        max_live: the largest number of gathered elements that are live after a
            prefetch; a single unit may exceed it.
        num_micro_steps: micro-batches of a step.
        seq_size: neighbours that share samples.
        activation_sends: the collectives of activations in a micro-step, known for a
            batch (`fzero.estimation.plan_for`); empty where none is given.
        max_reducing: see `UnitRules`.
        max_reuse_distance, gather_bucket, reduce_bucket: sizes for the compiled step
            (`PassOptions`); with None the compiled step chooses them.
        comm_hooks: the comm hooks through which parameters are gathered and gradients
            are reduced.
        streaming: how state that lives off the device moves.
        unit_rules: the part of the plan that the unit scheduler reads.
        flat_buffers: those of all units.
        param_units: the unit and the flat buffer of each parameter, by its name.
        flats: the name of the unit of each flat buffer, and the buffer itself, by its
            key.
        owners: by flat buffer, the rank that computes with each matrix.
    """

    stage: Stage
    mesh: Mesh
    axes: tuple[str, ...]
    units: tuple[UnitPlan, ...]
    aliases: dict[str, str] = field(repr=False)
    optimizer: dict[str, Any] = field(repr=False)
    buffers: dict[str, TensorSpec] = field(repr=False)
    prefetch: int | None
    max_live: int
    max_reducing: int
    num_micro_steps: int = 1
    seq_size: int = 1
    activation_sends: tuple[traffic.ActivationSend, ...] = field(default=(), repr=False)
    max_reuse_distance: int | None = None
    gather_bucket: int | None = None
    reduce_bucket: int | None = None
    comm_hooks: CommHooks = field(default_factory=CommHooks, repr=False, compare=False)
    streaming: Streaming = field(default_factory=Streaming, repr=False, compare=False)
    unit_rules: UnitRules = field(init=False, repr=False, compare=False)
    flat_buffers: tuple[FlatParamPlan, ...] = field(init=False, repr=False, compare=False)
    param_units: dict[str, tuple[UnitPlan, FlatParamPlan]] = field(
        init=False, repr=False, compare=False
    )
    flats: dict[str, tuple[str, FlatParamPlan]] = field(init=False, repr=False, compare=False)
    owners: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _leaves: dict[str, tuple[StateLeaf, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """A cache: the tensors of the state of flat buffers, by key."""

    def __post_init__(self) -> None:
        flats = {buffer.key: (unit.name, buffer) for unit in self.units for buffer in unit.buffers}
        object.__setattr__(self, "flats", flats)
        object.__setattr__(self, "flat_buffers", tuple(buffer for _, buffer in flats.values()))
        param_units = {
            name: (unit, buffer)
            for unit in self.units
            for buffer in unit.buffers
            for name in buffer.layout.names
        }
        object.__setattr__(self, "param_units", param_units)
        object.__setattr__(self, "owners", owned.owners_of(self.flat_buffers, self.world_size))
        states, num_shards = self.hook_states if self.comm_hooks.reduce else {}, self.num_shards
        how: dict[str, Any] = {"is_hooked": bool(self.comm_hooks.reduce), "hook_states": states}
        units = {
            unit.name: UnitRule.of(unit, self.mesh, num_shards=num_shards, **how)
            for unit in self.units
        }
        rules = UnitRules(
            units,
            self.world_size,
            num_shards,
            prefetches=self.prefetch != 0,
            max_live=self.max_live,
            max_reducing=self.max_reducing,
            max_staged=self.streaming.num_staged,
        )
        object.__setattr__(self, "unit_rules", rules)

    @property
    def row(self) -> StageSpecs:
        """The specs of the stage, on a mesh of one axis."""
        return STAGES[self.stage]

    @property
    def inner(self) -> Plan:
        """The plan of the forwards and backwards: this one; where a step gathers once,
        that of the gathered parameters.
        """
        if not any(buffer.flow.gathers_once for buffer in self.flat_buffers):
            return self
        units = (
            replace(unit, buffers=tuple(b.gathered(self.mesh, self.axes) for b in unit.buffers))
            for unit in self.units
        )
        return replace(self, units=tuple(units))

    @property
    def world_size(self) -> int:
        """The number of ranks W."""
        return self.mesh.size

    @property
    def num_shards(self) -> int:
        """The number of the finest shards F."""
        return num_ranks(self.mesh, self.axes)

    def shard_of(self, rank: int) -> int:
        """The index of the finest shard that a rank holds."""
        return self.mesh.shard_of(rank, Sharded(*self.axes))

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same shards, in the order in which
        gradients are added up.
        """
        return replicate_axes(self.mesh, self.axes)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """By rank, the number of its replica and the index of its finest shard."""
        return owned.places_of(self.mesh, self.axes, self.replicate_axes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the order of their shards, if the state were sharded over all
        axes of the mesh.

        Ranks that hold the same shard, or the same full tensor, are neighbours in this
        order.
        """
        order = Sharded(*self.axes, *self.replicate_axes)
        return tuple(
            sorted(range(self.world_size), key=lambda rank: self.mesh.shard_of(rank, order))
        )

    @property
    def padding(self) -> int:
        """Elements of padding in all flat buffers, all ranks together."""
        return sum(buffer.layout.partition.padding for buffer in self.flat_buffers)

    # --- memory ---

    @property
    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes of model state on one rank, padding included: `parameters`, `master`,
        `gradients` and `optimizer`.

        ZeRO §3: 4Ψ, 0, 4Ψ and 8Ψ bytes for fp32 and Adam, 2Ψ, 4Ψ, 2Ψ and 8Ψ for 16 bits
        with an fp32 master, each divided by the number of its shards (W on one axis) in
        the stages that shard it. The gradients are live only from the backward to the
        update.
        """
        trainable = [buffer for buffer in self.flat_buffers if buffer.trainable]
        held = {
            "parameters": sum(b.params.local_nbytes(self.mesh) for b in self.flat_buffers),
            "master": sum(
                b.master.local_nbytes(self.mesh) for b in self.flat_buffers if b.has_master
            ),
            "gradients": sum(b.grads.local_nbytes(self.mesh) for b in trainable),
            "optimizer": sum(_nbytes(self.optimizer[b.key], self.mesh) for b in trainable),
        }
        return held | (
            {"comm hooks": _nbytes(self.hook_states, self.mesh)} if self.hook_states else {}
        )

    @property
    def placements(self) -> dict[str, Placement]:
        """The placements of parameters, gradients and all other tensors that may live
        off the device, by `quantity/key/leaf`.
        """
        return {leaf.placed_as: leaf.spec.placement for leaf in self.divided_leaves}

    def leaves(self, buffer: FlatParamPlan) -> tuple[StateLeaf, ...]:
        """All tensors of the state of one flat buffer, with their names."""
        if (leaves := self._leaves.get(buffer.key)) is None:
            leaves = self._leaves[buffer.key] = tuple(state_leaves(buffer, self.optimizer))
        return leaves

    @property
    def divided_leaves(self) -> Iterator[StateLeaf]:
        """Tensors divided like their buffers."""
        return (
            leaf for buffer in self.flat_buffers for leaf in self.leaves(buffer) if leaf.is_divided
        )

    @property
    def bytes_by_memory(self) -> dict[str, dict[str, int]]:
        """`bytes_per_rank` by the kind of memory: `device`, `host` and `nvme`; empty
        entries are left out.
        """
        held: dict[str, Counter[str]] = {
            "device": Counter(self.bytes_per_rank),
            "host": Counter(),
            "nvme": Counter(),
        }
        titles = {"params": "parameters", "grads": "gradients"}
        for leaf in self.divided_leaves:
            title, nbytes = (
                titles.get(leaf.quantity, leaf.quantity),
                leaf.spec.local_nbytes(self.mesh),
            )
            held["device"][title] -= nbytes
            held[leaf.spec.placement.kind][title] += nbytes
        parts = {
            kind: {n: nbytes for n, nbytes in of_kind.items() if nbytes}
            for kind, of_kind in held.items()
        }
        return {kind: of_kind for kind, of_kind in parts.items() if of_kind}

    # --- comm hooks ---

    @property
    def copy_nbytes(self) -> int:
        """The bytes of all divided parameters in full, padding included: a full copy of
        them.
        """
        divided = [
            buffer for buffer in self.flat_buffers if not isinstance(buffer.params.spec, Replicated)
        ]
        return sum(buffer.padded_numel * itemsize(buffer.dtypes.param) for buffer in divided)

    @property
    def hook_states(self) -> dict[str, dict[str, Any]]:
        """The specs of the states of the reductions' comm hooks, by flat buffer and
        axis; every rank has its own.
        """
        found: dict[str, dict[str, Any]] = {}
        for buffer in self.flat_buffers:
            for axis, numel in self.summands(buffer).items():
                if axis in self.comm_hooks.reduce:
                    like = state_like(
                        self.comm_hooks.reduce[axis], numel, torch_dtype(buffer.dtypes.reduce)
                    )
                    if optree.tree_leaves(like):
                        specs = optree.tree_map(
                            lambda x: TensorSpec(tuple(x.shape), dtype_name(x.dtype)), like
                        )
                        found.setdefault(buffer.key, {})[axis] = specs
        return found

    def summands(self, buffer: FlatParamPlan) -> dict[str, int]:
        """The elements that a rank adds along each axis, in the order of the sums: P,
        P/L, …; none for a frozen buffer.
        """
        numel, summands = buffer.padded_numel, {}
        for axis in (
            (*buffer.flow.scatters_over, *buffer.flow.sums_over) if buffer.trainable else ()
        ):
            summands[axis] = numel
            numel //= self.mesh.axis_size(axis)
        return summands

    # --- traffic ---

    @property
    def sent_per_step(self) -> dict[str, int]:
        """Elements that one rank sends to the others in a step, by collective, padding
        included.

        ZeRO §7: 2Ψ(W-1)/W in stages 0–2, 3Ψ(W-1)/W in stage 3; with accumulation, stage
        2 reduces in every micro-step, and stage 3 gathers and reduces in every one. The
        last unit of the forward is the first of the backward and is not gathered twice.

        Two cases are known only after the first step (`TrainStep.schedule`): a unit
        whose weights the backward does not need (an embedding) is not gathered in it,
        and a unit that is used in several separate places is gathered for each.

        Activations are sent where ranks share sequences. How much depends on the batch:
        they count in plans for one (`fzero.estimation.plan_for`, `compare_plans`, `fit`).
        """
        return totals(self.sent_by_axis)

    @property
    def sent_by_axis(self) -> dict[str, dict[str, int]]:
        """The elements of `sent_per_step`, by the mesh axis along which they are sent.

        A reduce-scatter over `"data"` and then `"node"` sends P(L-1)/L along the first
        and P/L · (N-1)/N along the second, and so does the all-gather over both; an
        all-reduce sends twice that.
        """
        return self._sent(self.comm_hooks, traffic.in_elements)

    @property
    def sent_nbytes_by_axis(self) -> dict[str, dict[str, int]]:
        """`sent_by_axis` in bytes, after the compression of the comm hooks."""
        return self._sent(self.comm_hooks, traffic.in_bytes)

    @property
    def sent_nbytes_per_step(self) -> dict[str, int]:
        """The bytes that one rank sends to the others in a step, by collective, padding
        included.
        """
        return totals(self.sent_nbytes_by_axis)

    def _sent(self, hooks: CommHooks, size: traffic.Size) -> dict[str, dict[str, int]]:
        sent = traffic.sent_by_axis(
            self.units, self.mesh, hooks=hooks, num_micro_steps=self.num_micro_steps, size=size
        )
        sent = owned.with_exchanges(sent, self, size) if self.owners else sent
        num = self.num_micro_steps
        return traffic.with_activations(sent, self.activation_sends, num_micro_steps=num, size=size)

    def __rich__(self) -> Group:
        """The units as a table, and lines that say what a rank holds and sends."""
        lines = [
            report.dtype_line(self.units, self.buffers),
            *report.memory_lines(self.bytes_per_rank, self.bytes_by_memory),
            *report.traffic_lines(self.sent_by_axis, self.mesh),
            *owned.owner_lines(self.flat_buffers, self.owners, self.world_size),
        ]
        if self.comm_hooks:
            exact = self._sent(CommHooks(), traffic.in_bytes)
            lines += report.hook_lines(self.comm_hooks, self.sent_nbytes_by_axis, exact)
        return Group(
            report.unit_table(
                self.units,
                self.mesh,
                self.seq_size,
                stage=self.stage,
                is_counted=bool(self.activation_sends),
            ),
            *lines,
        )

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def _nbytes(specs: Any, mesh: Mesh) -> int:
    return sum(spec.local_nbytes(mesh) for spec in optree.tree_leaves(specs))
