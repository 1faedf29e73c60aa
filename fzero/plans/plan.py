"""The plan of a training step: everything that is known before it runs, as integers and names.

1. The model is cut into *units*, which are gathered and released together (`fzero.plans.units`).
2. The parameters of a unit lie in flat buffers, one for each set of dtypes, group and so on (`fzero.plans.flat_params`).
3. The ZeRO stage decides which of parameters, gradients and optimizer state are sharded (`fzero.config.stages`).
4. State may be placed in host memory or in files (`fzero.plans.placements`).

On a mesh of several axes (`fzero.plans.mesh_axes`) gradients and optimizer state are sharded over `Plan.axes`, the parameters
over "data" alone.

Shape letters: N elements of a buffer, P padded = F·S, S elements of a shard, F shards, W ranks (on one axis F = W).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import optree
from rich.console import Group
from torch import nn

from fzero.common.arguments import check_model, check_names
from fzero.common.collector import collector_paused
from fzero.config.config import Config
from fzero.config.stages import STAGES, Stage, StageSpecs
from fzero.plans.comm_hooks import CommHooks, GivenHook, state_like
from fzero.plans.flat_params import FlatParamPlan, UnitPlan, UnitPlanner, optimizer_specs
from fzero.plans.leaves import StateLeaf, state_leaves
from fzero.plans.mesh_axes import PIPE, check_mesh, mesh_of, num_ranks, replicate_axes, shard_axes
from fzero.plans.orders import GivenOrder, check_named, in_two_numbers
from fzero.plans.param_groups import OwnTransform, ParamGroup, UserTransform, check_groups, check_params, optimizers_of
from fzero.plans.streaming import Streaming
from fzero.plans.unit_rules import UnitRule, UnitRules
from fzero.plans.units import check_has_shapes, find_units, owners_of
from sharding import Mesh, Replicated, Sharded, TensorSpec, declaration, round_robin
from sharding.dtypes import itemsize
from sharding.specs import Placement
from sharding.views import dtype_name, torch_dtype

if TYPE_CHECKING:
    from fzero.plans.placements import GivenPlacements

__all__ = ["FlatParamPlan", "Plan", "UnitPlan", "plan", "starts_of"]

BUCKET = 500_000_000
"""Elements of a bucket where the configuration names none: DeepSpeed's default."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a training step that is known before it runs. `print(plan)` shows a table.

    Attributes:
        stage: the ZeRO stage.
        mesh: the ranks.
        axes: the axes over which the finest shards lie, major first; see `fzero.plans.mesh_axes`.
        units: in the order of their declaration.
        aliases: the other names of tied parameters and buffers, each with the name under which it is stored.
        optimizer: the specs of the optimizer state, by flat buffer.
        buffers: the specs of the module's own buffers, by name.
        prefetch: the largest number of elements that a compiled step gathers before their use. Compiled and eager steps gather at
            least the next unit early, unless it is 0; None is one unit.
        max_live: the largest number of gathered elements that are live after a prefetch; one unit always is.
        num_micro_steps: micro-batches in one step.
        max_reducing: see `UnitRules`.
        max_reuse_distance, gather_bucket, reduce_bucket: sizes for the compiled step (`PassOptions`); for None the compiled
            step chooses.
        comm_hooks: the comm hooks through which parameters are gathered and gradients are reduced.
        streaming: how state that lives off the device moves.
        unit_rules: the part of the plan that the unit scheduler reads.
        flat_buffers: those of all units.
        homes: the unit and the flat buffer of each parameter, by its name.
        flats: the name of the unit of each flat buffer, and the buffer itself, by its key.
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
    max_reuse_distance: int | None = None
    gather_bucket: int | None = None
    reduce_bucket: int | None = None
    comm_hooks: CommHooks = field(default_factory=CommHooks, repr=False, compare=False)
    streaming: Streaming = field(default_factory=Streaming, repr=False, compare=False)
    unit_rules: UnitRules = field(init=False, repr=False, compare=False)
    flat_buffers: tuple[FlatParamPlan, ...] = field(init=False, repr=False, compare=False)
    homes: dict[str, tuple[UnitPlan, FlatParamPlan]] = field(init=False, repr=False, compare=False)
    flats: dict[str, tuple[str, FlatParamPlan]] = field(init=False, repr=False, compare=False)
    _leaves: dict[str, tuple[StateLeaf, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)
    """A cache: the tensors of the state of flat buffers, by key."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "flat_buffers", tuple(buffer for unit in self.units for buffer in unit.buffers))
        homes: dict[str, tuple[UnitPlan, FlatParamPlan]] = {}
        for unit in self.units:
            for buffer in unit.buffers:
                homes |= dict.fromkeys(buffer.layout.names, (unit, buffer))
        object.__setattr__(self, "homes", homes)
        flats = {buffer.key: (unit.name, buffer) for unit in self.units for buffer in unit.buffers}
        object.__setattr__(self, "flats", flats)
        states, num_shards = self.hook_states if self.comm_hooks.reduce else {}, self.num_shards
        how: dict[str, Any] = {"is_hooked": bool(self.comm_hooks.reduce), "hook_states": states}
        units = {unit.name: UnitRule.of(unit, self.mesh, num_shards=num_shards, **how) for unit in self.units}
        rules = UnitRules(
            units, self.world_size, num_shards, prefetches=self.prefetch != 0, max_live=self.max_live,
            max_reducing=self.max_reducing, max_staged=self.streaming.num_staged,
        )  # fmt: skip
        object.__setattr__(self, "unit_rules", rules)

    @property
    def row(self) -> StageSpecs:
        """The specs of the stage, on a mesh of one axis."""
        return STAGES[self.stage]

    @property
    def inner(self) -> Plan:
        """The plan of the forwards and backwards: this one; where a step gathers once, that of the gathered parameters."""
        if not any(buffer.flow.gathers_once for buffer in self.flat_buffers):
            return self
        units = (
            replace(unit, buffers=tuple(b.gathered(self.mesh, self.axes) for b in unit.buffers)) for unit in self.units
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
        """The axes along which ranks hold the same shards, in the order in which gradients are added up."""
        return replicate_axes(self.mesh, self.axes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the order of their shards, if the state were sharded over all axes of the mesh.

        Ranks that hold the same shard, or the same full tensor, are neighbours in this order.
        """
        order = Sharded(*self.axes, *self.replicate_axes)
        return tuple(sorted(range(self.world_size), key=lambda rank: self.mesh.shard_of(rank, order)))

    @property
    def padding(self) -> int:
        """Elements of padding in all flat buffers, all ranks together."""
        return sum(buffer.layout.partition.padding for buffer in self.flat_buffers)

    # --- memory ---

    @property
    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes of model state on one rank, padding included: `parameters`, `master`, `gradients` and `optimizer`.

        ZeRO §3: 4Ψ, 0, 4Ψ and 8Ψ bytes for fp32 and Adam, 2Ψ, 4Ψ, 2Ψ and 8Ψ for 16 bits with an fp32 master, each divided by the
        number of its shards (W on one axis) in the stages that shard it. The gradients are live only from the backward to the
        update.
        """
        trainable = [buffer for buffer in self.flat_buffers if buffer.trainable]
        held = {
            "parameters": sum(b.params.local_nbytes(self.mesh) for b in self.flat_buffers),
            "master": sum(b.master.local_nbytes(self.mesh) for b in self.flat_buffers if b.has_master),
            "gradients": sum(b.grads.local_nbytes(self.mesh) for b in trainable),
            "optimizer": sum(_nbytes(self.optimizer[b.key], self.mesh) for b in trainable),
        }
        return held | ({"comm hooks": _nbytes(self.hook_states, self.mesh)} if self.hook_states else {})

    @property
    def placements(self) -> dict[str, Placement]:
        """The placements of parameters, gradients and all other tensors that may live off the device, by `quantity/key/leaf`."""
        return {leaf.placed_as: leaf.spec.placement for leaf in self.long_leaves}

    def leaves(self, buffer: FlatParamPlan) -> tuple[StateLeaf, ...]:
        """All tensors of the state of one flat buffer, with their names."""
        if (leaves := self._leaves.get(buffer.key)) is None:
            leaves = self._leaves[buffer.key] = tuple(state_leaves(buffer, self.optimizer))
        return leaves

    @property
    def long_leaves(self) -> Iterator[StateLeaf]:
        """All tensors that are as long as their flat buffer."""
        return (leaf for buffer in self.flat_buffers for leaf in self.leaves(buffer) if leaf.is_long)

    @property
    def bytes_by_memory(self) -> dict[str, dict[str, int]]:
        """`bytes_per_rank` by the kind of memory: `device`, `host` and `nvme`; empty entries are left out."""
        held: dict[str, Counter[str]] = {"device": Counter(self.bytes_per_rank), "host": Counter(), "nvme": Counter()}
        titles = {"params": "parameters", "grads": "gradients"}
        for leaf in self.long_leaves:
            title, nbytes = titles.get(leaf.quantity, leaf.quantity), leaf.spec.local_nbytes(self.mesh)
            held["device"][title] -= nbytes
            held[leaf.spec.placement.kind][title] += nbytes
        parts = {kind: {n: nbytes for n, nbytes in of_kind.items() if nbytes} for kind, of_kind in held.items()}
        return {kind: of_kind for kind, of_kind in parts.items() if of_kind}

    # --- comm hooks ---

    @property
    def copy_nbytes(self) -> int:
        """The bytes of all divided parameters in full, padding included: the copy that `fzero.generating` gathers."""
        divided = [buffer for buffer in self.flat_buffers if not isinstance(buffer.params.spec, Replicated)]
        return sum(buffer.padded_numel * itemsize(buffer.dtypes.param) for buffer in divided)

    @property
    def hook_states(self) -> dict[str, dict[str, Any]]:
        """The specs of the states of the reductions' comm hooks, by flat buffer and axis; every rank has its own."""
        found: dict[str, dict[str, Any]] = {}
        for buffer in self.flat_buffers:
            for axis, numel in self.summands(buffer).items():
                if axis in self.comm_hooks.reduce:
                    like = state_like(self.comm_hooks.reduce[axis], numel, torch_dtype(buffer.dtypes.reduce))
                    if optree.tree_leaves(like):
                        specs = optree.tree_map(lambda x: TensorSpec(tuple(x.shape), dtype_name(x.dtype)), like)
                        found.setdefault(buffer.key, {})[axis] = specs
        return found

    def summands(self, buffer: FlatParamPlan) -> dict[str, int]:
        """The elements that a rank adds along each axis, in the order of the sums: P, P/L, …; none for a frozen buffer."""
        numel, summands = buffer.padded_numel, {}
        for axis in (*buffer.flow.scatters_over, *buffer.flow.sums_over) if buffer.trainable else ():
            summands[axis] = numel
            numel //= self.mesh.axis_size(axis)
        return summands

    # --- traffic ---

    @property
    def sent_per_step(self) -> dict[str, int]:
        """Elements that one rank sends to the others in a step, by collective, padding included.

        ZeRO §7: 2Ψ(W-1)/W in stages 0–2, 3Ψ(W-1)/W in stage 3; with accumulation, stage 2 reduces in every micro-step, and stage
        3 gathers and reduces in every one. The last unit of the forward is the first of the backward and is not gathered twice.

        Two cases are known only after the first step (`TrainStep.schedule`): a unit whose weights the backward does not need
        (an embedding) is not gathered in it, and a unit that is used in several separate places is gathered for each.
        """
        from fzero.plans.traffic import totals  # a step does not count what it sends

        return totals(self.sent_by_axis)

    @property
    def sent_by_axis(self) -> dict[str, dict[str, int]]:
        """The elements of `sent_per_step`, by the mesh axis along which they are sent.

        A reduce-scatter over `"data"` and then `"node"` sends P(L-1)/L along the first and P/L · (N-1)/N along the second, and
        so does the all-gather over both; an all-reduce sends twice that.
        """
        return self._sent("elements", self.comm_hooks)

    @property
    def sent_nbytes_by_axis(self) -> dict[str, dict[str, int]]:
        """`sent_by_axis` in bytes, after the compression of the comm hooks."""
        return self._sent("bytes", self.comm_hooks)

    @property
    def sent_nbytes_per_step(self) -> dict[str, int]:
        """The bytes that one rank sends to the others in a step, by collective, padding included."""
        from fzero.plans.traffic import totals

        return totals(self.sent_nbytes_by_axis)

    def _sent(self, what: Literal["elements", "bytes"], hooks: CommHooks) -> dict[str, dict[str, int]]:
        from fzero.plans import traffic

        size = traffic.in_elements if what == "elements" else traffic.in_bytes
        return traffic.sent_by_axis(self.units, self.mesh, hooks=hooks, num_micro_steps=self.num_micro_steps, size=size)

    def __rich__(self) -> Group:
        """The units as a table, and lines that say what a rank holds and sends."""
        from fzero.plans import report

        lines = [
            report.dtype_line(self.units, self.buffers),
            *report.memory_lines(self.bytes_per_rank, self.bytes_by_memory),
            *report.traffic_lines(self.sent_by_axis, self.mesh),
        ]
        if self.comm_hooks:
            exact = self._sent("bytes", CommHooks())
            lines += report.hook_lines(self.comm_hooks, self.sent_nbytes_by_axis, exact)
        return Group(report.unit_table(self.units, self.mesh, stage=self.stage), *lines)

    def __str__(self) -> str:
        from fzero.common.text_tables import as_text

        return as_text(self)


@collector_paused()
def plan(
    model: nn.Module,
    cfg: Config | Any,
    *,
    world_size: int | None = None,
    mesh: Mesh | None = None,
    units: Sequence[str] | None = None,
    param_groups: Sequence[ParamGroup] = (),
    transform: OwnTransform | None = None,
    gather_hook: GivenHook = None,
    reduce_hook: GivenHook = None,
    placements: GivenPlacements = None,
    trained: Collection[str] | None = None,
    starts: Mapping[str, int] | None = None,
    order: GivenOrder = None,
    is_stage: bool = False,
) -> Plan:
    """The plan of `model` under `cfg` on `world_size` ranks; reads shapes only, so the model may be on `meta`.

    Args:
        model: any module.
        cfg: a `Config`, or an argument of `Config.load`.
        world_size: number of ranks W, at least 1; None is the size of the mesh, or 1.
        mesh: the arrangement of the ranks along several axes; None takes the configuration's, or one axis.
        units: names of the modules to use as units, with `*` as a wildcard (the outermost matches count); None finds
            repeated blocks.
        param_groups: parameters with hyper-parameters of their own; see `ParamGroup`. The first that matches counts.
        transform: replaces the configuration's optimizer; see `make_train_step`.
        gather_hook, reduce_hook, placements, order: see `make_train_step`.
        trained: the names of the parameters that are trained; None takes those that require gradients.
        starts: the update in which the optimizer state of each parameter began, by name (`starts_of`); 0 where a name is
            missing. One counter of updates serves a flat buffer, so parameters that began in different updates have flat
            buffers of their own.
        is_stage: whether `model` is only a stage of a pipeline, which may have no parameters, or none of a parameter group.

    Raises:
        ConfigError, ValueError: the configuration does not fit, a name in `units` matches nothing, or `order` does not order
            the model's parameters.

    >>> blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    >>> [unit.name for unit in plan(blocks, {"zero_optimization": zero}, world_size=2).units]
    ['0', '1']
    """
    check_model(model)
    check_names("units", units)
    check_groups(param_groups)
    check_mesh(mesh)
    _check_one_stage(mesh)
    cfg = Config.load(cfg)
    if world_size is None:
        world_size = mesh.size if mesh else 1
    mesh = mesh_of(cfg.zero_optimization, world_size, mesh)
    optimizers = optimizers_of(cfg, param_groups, transform)
    for optimizer in optimizers:
        if isinstance(optimizer, UserTransform):
            optimizer.check()
    owners, aliases = owners_of(model)
    module_buffers = dict(model.named_buffers())
    check_has_shapes(owners | module_buffers)
    if not owners and not is_stage:
        raise ValueError(f"make_train_step: {type(model).__name__} has no parameters; pass a model with parameters")
    trained = {n for n, p in owners.items() if p.requires_grad} if trained is None else set(trained)
    check_params(owners, trained, () if is_stage else param_groups)
    check_named(order, list(owners), aliases)
    if order is None:
        order = round_robin if cfg.zero_optimization.round_robin_gradients else declaration
    order = in_two_numbers(order) if callable(order) else order
    planner = UnitPlanner(cfg, mesh, param_groups, optimizers, trained, starts or {}, order)
    unit_plans = _unit_plans(model, owners, units, planner)
    specs = optimizer_specs([b for u in unit_plans for b in u.buffers if b.trainable], optimizers)
    zero = cfg.zero_optimization
    if any(given is not None for given in (placements, zero.offload_optimizer, zero.offload_param)):
        from fzero.plans.placements import with_placements  # a plan on the device does not load it

        unit_plans, specs = with_placements(unit_plans, specs, cfg, placements)
    hooks = CommHooks()
    if gather_hook is not None or reduce_hook is not None or zero.quantizes:
        from fzero.plans.hook_choice import comm_hooks_of  # a plan that sends exactly does not load it

        hooks = comm_hooks_of(zero, mesh, gather_hook, reduce_hook)
    buffer_dtype = cfg.precision.buffer_dtype_of
    buffers = {n: TensorSpec(tuple(t.shape), buffer_dtype(dtype_name(t.dtype))) for n, t in module_buffers.items()}
    return _made(cfg, mesh, unit_plans, aliases=aliases, optimizer=specs, buffers=buffers, hooks=hooks)


def _check_one_stage(mesh: Mesh | None) -> None:
    if mesh is not None and PIPE in mesh.names:
        raise ValueError(
            f"mesh: must have no axis {PIPE!r}, whose ranks hold different parameters, got {mesh}; the plan of a stage is "
            f"make_train_step(…).plan, those of all stages fzero.resharding.staged_plan(step), and "
            f"fzero.estimation.plan_pipeline predicts a pipeline"
        )


def starts_of(plan: Plan) -> dict[str, int]:
    """The update in which the optimizer state of each trained parameter began, by name."""
    return {name: b.start for b in plan.flat_buffers if b.trainable for name in b.layout.names}


def _unit_plans(
    model: nn.Module, owners: dict[str, nn.Parameter], patterns: Sequence[str] | None, planner: UnitPlanner
) -> tuple[UnitPlan, ...]:
    """The units with their flat buffers."""
    zero, modules = planner.cfg.zero_optimization, dict(model.named_modules())
    return tuple(
        planner.plan(name, {n: owners[n] for n in members}, modules)
        for name, members in find_units(model, owners, patterns, zero.reduce_bucket_size or BUCKET)
    )


def _made(
    cfg: Config,
    mesh: Mesh,
    units: tuple[UnitPlan, ...],
    *,
    aliases: dict[str, str],
    optimizer: dict[str, Any],
    buffers: dict[str, TensorSpec],
    hooks: CommHooks,
) -> Plan:
    """The plan of these parts, with the limits and sizes that the configuration sets."""
    zero = cfg.zero_optimization
    two_units = 2 * max((sum(b.padded_numel for b in unit.buffers) for unit in units), default=0)
    max_reducing = min(zero.reduce_bucket_size or BUCKET, two_units)
    return Plan(
        stage=zero.stage, mesh=mesh, axes=shard_axes(mesh, zero), units=units,
        aliases=aliases, optimizer=optimizer, buffers=buffers, comm_hooks=hooks,
        num_micro_steps=cfg.batch_sizes(mesh.size).num_micro_steps,
        prefetch=zero.stage3_prefetch_bucket_size, max_live=zero.stage3_max_live_parameters,
        max_reuse_distance=zero.stage3_max_reuse_distance, max_reducing=max_reducing,
        gather_bucket=zero.allgather_bucket_size,
        # No bucket may hold more full gradients than a rank may keep in stages 2 and 3.
        reduce_bucket=max_reducing if zero.reduce_bucket_size and zero.row.shards("grads") else zero.reduce_bucket_size,
        streaming=Streaming.of(zero.offload_optimizer, zero.offload_param, cfg.aio, zero.sub_group_size),
    )  # fmt: skip


def _nbytes(specs: Any, mesh: Mesh) -> int:
    return sum(spec.local_nbytes(mesh) for spec in optree.tree_leaves(specs))
