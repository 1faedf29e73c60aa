"""How is a model divided among ranks? Units, their flat buffers, and the specs that a ZeRO stage gives them.

1. The model is cut into *units*, gathered and released together: repeated blocks, and the modules between them, joined.
2. A unit has one flat buffer for each policy of dtypes, with separate ones for frozen parameters and for small parameters, which
   stage 3 keeps whole on every rank.
3. A stage is a row of `STAGES`: which of parameters, gradients and optimizer state each rank holds whole.

The layout is the same in all stages, so that all stages add the same numbers in the same order. A plan holds integers
and names only. On several axes (`fzero.plans.mesh_axes`) what is sharded is so over the axes that `Plan.axes` names, but for the
parameters, which always are over "data" alone.

Shape letters: N elements of a buffer, P padded = F·S, S elements of a shard, F shards (W ranks, on one axis all of them).
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fzero.common.arguments import check_model, check_names, refuse, shown
from fzero.common.text_tables import as_text
from fzero.comms.collectives import DATA
from fzero.comms.comm_hooks import CommHook
from fzero.comms.mesh import is_several
from fzero.config.config import Config, ConfigError, ZeroOptimization
from fzero.config.optimizers import Optimizer, with_overrides
from fzero.optim.fragments import ShardContents
from fzero.optim.matrix import is_cut
from fzero.optim.precision import Dtypes, mixed_precision
from fzero.optim.transforms import Transform, check_elementwise, leaf_names
from fzero.plans.comm_hooks import CommHooks, GivenHook, comm_hooks_of, state_like
from fzero.plans.mesh_axes import check_mesh, describe, mesh_of, num_ranks, shard_axes, sum_order
from fzero.plans.orders import GivenOrder, OrderFunction, check_named, ordered
from fzero.plans.placements import Chooser, GivenPlacements, Streaming
from sharding import (
    FlatLayout,
    Mesh,
    Partial,
    Replicated,
    Sharded,
    Spec,
    TensorSpec,
    declaration,
    plan_buckets,
    round_robin,
)
from sharding.dtypes import itemsize
from sharding.specs import DEVICE, Placement
from sharding.views import dtype_name, torch_dtype

ALIGNMENT = 32
"""Shards are a multiple of this many elements, so that a vectorised kernel meets the same lanes in every stage.

Where several ranks hold the same shard, each rank's part of it is, so that P is the same on all meshes of W ranks."""

BUCKET = 500_000_000
"""Elements of a bucket where the configuration names none: DeepSpeed's default."""


class StageSpecs(NamedTuple):
    """What one ZeRO stage does with a flat buffer (ZeRO §5, figure 1)."""

    params: Spec
    grads: Spec
    optimizer: Spec


STAGES = {
    0: StageSpecs(params=Replicated(), grads=Replicated(), optimizer=Replicated()),
    1: StageSpecs(params=Replicated(), grads=Partial(DATA), optimizer=Sharded(DATA)),
    2: StageSpecs(params=Replicated(), grads=Sharded(DATA), optimizer=Sharded(DATA)),
    3: StageSpecs(params=Sharded(DATA), grads=Sharded(DATA), optimizer=Sharded(DATA)),
}


def stage_specs(stage: int, axes: tuple[str, ...]) -> StageSpecs:
    """What a stage does where gradients and optimizer state are sharded over `axes`.

    >>> stage_specs(3, ("data", "node"))
    StageSpecs(params=Sharded('data'), grads=Sharded('data', 'node'), optimizer=Sharded('data', 'node'))
    """
    row = STAGES[stage]
    finest = {"grads": row.grads, "optimizer": row.optimizer}
    return row._replace(**{part: Sharded(*axes) for part, spec in finest.items() if isinstance(spec, Sharded)})


@dataclass(frozen=True, slots=True)
class FlatParamPlan:
    """One flat buffer of a unit: parameters of one dtype and group, all trainable or all frozen, all small or all not."""

    key: str
    layout: FlatLayout
    dtypes: Dtypes
    trainable: bool
    row: StageSpecs
    group: int = 0
    rule: str = ""
    """Which of its optimizer's ways the parameters go (`OptimizerBlock.kind_of`)."""
    elementwise: bool = True
    """Whether the optimizer treats each element by itself."""
    start: int = 0
    """Parameters whose optimizer state began in another update have another number (`starts_of`)."""
    placement: Placement = DEVICE
    """Where the master lives, if there is one."""
    param_placement: Placement = DEVICE
    grad_placement: Placement = DEVICE

    @property
    def padded_numel(self) -> int:
        return self.layout.partition.padded_numel

    @property
    def shard_numel(self) -> int:
        return self.layout.partition.shard_numel

    @property
    def has_master(self) -> bool:
        """Whether there is a copy of more bits, from which the parameters are made: that the optimizer updates, or a frozen
        parameter's own values."""
        return self.dtypes.master != self.dtypes.param

    def is_long(self, spec: TensorSpec) -> bool:
        """Whether a tensor of the optimizer's state has an element for each of the buffer's, and is divided as they are.

        (Sums over rows, which every rank has, may happen to be as many.)
        """
        return spec.shape == (self.padded_numel,) and spec.spec == self.row.optimizer

    @property
    def joins_shards(self) -> bool:
        """Whether a rank holds a shard of the parameters, and updates a part of that (hpZ)."""
        return isinstance(self.row.params, Sharded) and self.row.params != self.row.optimizer

    @property
    def updates_whole(self) -> bool:
        """Whether what lives elsewhere is updated as a whole, not by sub-groups: elements depend on each other, or are joined
        with those of other ranks before they go back."""
        return not self.elementwise or (self.joins_shards and self.param_placement.kind != "device")

    @property
    def params(self) -> TensorSpec:
        """What the model computes with."""
        return self._spec(self.row.params, self.dtypes.param, self.param_placement)

    @property
    def master(self) -> TensorSpec:
        """What the optimizer updates; in stages 1 and 2 without a copy of its own, a shard of `params`."""
        return self._spec(self.row.optimizer, self.dtypes.master, self.placement)

    @property
    def grads(self) -> TensorSpec:
        """Where gradients are collected."""
        return self._spec(self.row.grads, self.dtypes.grad, self.grad_placement)

    def _spec(self, spec: Spec, dtype: str, placement: Placement) -> TensorSpec:
        """The padded flat buffer (P), divided as `spec` says."""
        return TensorSpec((self.padded_numel,), dtype, spec, placement, ALIGNMENT)


class LiveLimitError(ConfigError):
    """`stage3_max_live_parameters` does not hold the largest unit."""


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Parameters that are gathered, released and reduced together."""

    name: str
    buffers: tuple[FlatParamPlan, ...]

    @property
    def numel(self) -> int:
        """Elements of the unit's parameters, without padding."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    @property
    def gathered_numel(self) -> int:
        """Padded elements that a gather of this unit brings to life; 0 when every rank holds it whole."""
        return sum(b.padded_numel for b in self.buffers if isinstance(b.row.params, Sharded))

    @property
    def trainable(self) -> bool:
        return any(buffer.trainable for buffer in self.buffers)


_COLLECTIVES = (
    "all_reduce of gradients",
    "reduce_scatter of gradients",
    "all_gather of updated parameters",
    "all_gather of momentum",
    "all_gather in the forward",
    "all_gather in the backward",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a training step that is known before it runs. `print(plan)` shows a table.

    Attributes:
        stage: the ZeRO stage.
        mesh: the ranks.
        axes: over which the finest shards lie, major first; see `fzero.plans.mesh_axes`.
        units: in the order of their declaration.
        aliases: the further names of tied parameters and buffers, each with the name under which it is stored.
        optimizer: the specs of the optimizer state, by flat buffer.
        buffers: the specs of the module's own buffers, by name.
        prefetch: most elements gathered before their use (compiled), at least the next unit (both); 0 is none, None one unit.
        max_live: most gathered elements that an early gather may lead to.
        num_micro_steps: micro-batches in one step.
        max_reducing: most elements of full gradients that wait for their reduction, besides those of one unit.
        max_reuse_distance, gather_bucket, reduce_bucket: for the compiled step (`PassOptions`); None where it chooses itself.
        comm hooks: through which comm hooks parameters are gathered and gradients are reduced.
        streaming: how state that lives off the device moves.
    """

    stage: int
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

    @property
    def world_size(self) -> int:
        """The number of ranks W."""
        return self.mesh.size

    @property
    def num_shards(self) -> int:
        """The number of the finest shards F."""
        return num_ranks(self.mesh, self.axes)

    def shard_of(self, rank: int) -> int:
        """Which of the finest shards a rank holds."""
        return self.mesh.shard_of(rank, Sharded(*self.axes))

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """Those along which ranks hold the same shards, in the order in which gradients are added up."""
        return tuple(name for name in sum_order(self.mesh) if name not in self.axes and self.mesh.axis_size(name) > 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the order of the finest shards that the mesh could have.

        A rank holds the shard, or the whole, that it shares with its neighbours in this order.
        """
        order = Sharded(*self.axes, *self.replicate_axes)
        return tuple(sorted(range(self.world_size), key=lambda rank: self.mesh.shard_of(rank, order)))

    @property
    def flat_buffers(self) -> tuple[FlatParamPlan, ...]:
        return tuple(buffer for unit in self.units for buffer in unit.buffers)

    @property
    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes of model state on one rank, padding included: `parameters`, `master`, `gradients` and `optimizer`.

        ZeRO §3: 4Ψ, 0, 4Ψ and 8Ψ bytes for fp32 and Adam, 2Ψ, 4Ψ, 2Ψ and 8Ψ for 16 bits with an fp32 master, each divided
        by the number of its shards (W on one axis) from the stage on that shards it. The gradients are alive from the
        backward to the update only.
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
        """Of every tensor that may live elsewhere, and of all parameters and gradients, by `quantity/key/leaf`."""
        return {name: spec.placement for buffer in self.flat_buffers for name, spec in self._flat_tensors(buffer)}

    def _flat_tensors(self, buffer: FlatParamPlan) -> Iterator[tuple[str, TensorSpec]]:
        """All that is as long as a flat buffer, by `quantity/key/leaf`."""
        yield f"params/{buffer.key}", buffer.params
        if buffer.has_master:
            yield f"master/{buffer.key}", buffer.master
        if buffer.trainable:
            yield f"grads/{buffer.key}", buffer.grads
            for leaf, spec in _long_leaves(self.optimizer, buffer):
                yield f"optimizer/{buffer.key}/{leaf}", spec

    @property
    def bytes_by_memory(self) -> dict[str, dict[str, int]]:
        """`bytes_per_rank`, by the kind of memory: `device`, `host` and `nvme`; what holds nothing is left out."""
        held: dict[str, Counter[str]] = {"device": Counter(self.bytes_per_rank), "host": Counter(), "nvme": Counter()}
        told = {"params": "parameters", "grads": "gradients"}
        for name, spec in (found for buffer in self.flat_buffers for found in self._flat_tensors(buffer)):
            quantity, nbytes = name.partition("/")[0], spec.local_nbytes(self.mesh)
            held["device"][told.get(quantity, quantity)] -= nbytes
            held[spec.placement.kind][told.get(quantity, quantity)] += nbytes
        parts = {kind: {n: nbytes for n, nbytes in of_kind.items() if nbytes} for kind, of_kind in held.items()}
        return {kind: of_kind for kind, of_kind in parts.items() if of_kind}

    @property
    def hook_states(self) -> dict[str, dict[str, Any]]:
        """The specs of what the comm hooks of reductions remember, by flat buffer and axis; every rank has its own."""
        return {
            buffer.key: states
            for buffer in self.flat_buffers
            if (states := {axis: state for axis, state in self._hook_states(buffer) if optree.tree_leaves(state)})
        }

    def _hook_states(self, buffer: FlatParamPlan) -> Iterator[tuple[str, Any]]:
        for axis, numel in self.summands(buffer).items():
            if axis in self.comm_hooks.reduce:
                like = state_like(self.comm_hooks.reduce[axis], numel, torch_dtype(buffer.dtypes.reduce))
                yield axis, optree.tree_map(lambda x: TensorSpec(tuple(x.shape), dtype_name(x.dtype)), like)

    def summands(self, buffer: FlatParamPlan) -> dict[str, int]:
        """The elements of what a rank adds along each axis, in the order of the sums: P, P/L, …; none where it is frozen."""
        numel, summands = buffer.padded_numel, {}
        for axis in sum_order(self.mesh) if buffer.trainable else ():
            summands[axis] = numel
            numel //= self.mesh.axis_size(axis)
        return summands

    @property
    def padding(self) -> int:
        """Elements of padding in all flat buffers, all ranks together."""
        return sum(buffer.layout.partition.padding for buffer in self.flat_buffers)

    @property
    def sent_per_step(self) -> dict[str, int]:
        """Elements that one rank sends to the others in a step, by collective, padding included.

        ZeRO §7: 2Ψ(W-1)/W in stages 0–2, 3Ψ(W-1)/W in stage 3; with accumulation stage 2 reduces and stage 3 gathers and
        reduces in every micro-step. The last unit of the forward is the first of the
        backward and is not gathered twice. Nor is one whose weights the backward does not need (an embedding), and one
        that is used in several separate places is gathered for each: `TrainStep.schedule` tells, after the first step.
        """
        return _totals(self.sent_by_axis)

    @property
    def sent_by_axis(self) -> dict[str, dict[str, int]]:
        """The same, by the axis of the mesh that it crosses.

        A reduce-scatter over `"data"` and then `"node"` sends P(L-1)/L along the first and P/L · (N-1)/N along the second, and
        so does the all-gather over both; an all-reduce sends twice that.
        """
        return self._sent(lambda numel, dtype, hook: numel)

    @property
    def sent_nbytes_by_axis(self) -> dict[str, dict[str, int]]:
        """The same in bytes, which are those of the comm hooks where there are some."""

        def nbytes(numel: int, dtype: str, hook: CommHook | None) -> int:
            return numel * itemsize(dtype) if hook is None else hook.nbytes(numel, itemsize(dtype))

        return self._sent(nbytes)

    @property
    def sent_nbytes_per_step(self) -> dict[str, int]:
        """The bytes that one rank sends to the others in a step, by collective, padding included."""
        return _totals(self.sent_nbytes_by_axis)

    def _sent(self, size: Callable[[int, str, CommHook | None], int]) -> dict[str, dict[str, int]]:
        """What one rank sends; `size` is of one message, by its elements, their dtype and the comm hook that they go through."""
        every = sum_order(self.mesh)
        micro_steps = self.num_micro_steps if self.num_shards > 1 else 1
        gathered = [unit for unit in self.units if unit.gathered_numel]
        last = gathered[-1].buffers if gathered else ()
        sent = {name: dict.fromkeys(_COLLECTIVES, 0) for name in self.mesh.names}

        def add(
            collective: str,
            numel: int,
            axes: Sequence[str],
            dtype: str,
            times: int = 1,
            hooks: Mapping[str, CommHook] = {},
        ) -> None:
            for name in axes:
                num_ranks_ = self.mesh.axis_size(name)
                numel //= num_ranks_
                sent[name][collective] += times * size(numel, dtype, hooks.get(name)) * (num_ranks_ - 1)

        for buffer in self.flat_buffers:
            row, numel, dtypes = buffer.row, buffer.padded_numel, buffer.dtypes
            in_params = row.params.axes if isinstance(row.params, Sharded) else ()
            hooks = self.comm_hooks.gather if buffer.trainable else self.comm_hooks.frozen
            add("all_gather in the forward", numel, in_params, dtypes.param, self.num_micro_steps, hooks)
            num_backward = self.num_micro_steps * (buffer not in last)
            add("all_gather in the backward", numel, in_params, dtypes.param, num_backward, hooks)
            if not buffer.trainable:
                continue

            def add_sums(numel: int, axes: Sequence[str], dtype: str = dtypes.reduce) -> None:
                """Of an all-reduce, whose sums are sent as they are."""
                add("all_reduce of gradients", numel, axes, dtype, hooks=self.comm_hooks.reduce)
                add("all_reduce of gradients", numel, axes, dtype)

            if isinstance(row.grads, Replicated):
                add_sums(numel, every)
                continue
            times = micro_steps if isinstance(row.grads, Sharded) else 1
            add("reduce_scatter of gradients", numel, self.axes, dtypes.reduce, times, self.comm_hooks.reduce)
            add_sums(buffer.shard_numel, self.replicate_axes)
            local_numel = buffer.params.local_shape(self.mesh)[0]
            add("all_gather of updated parameters", local_numel, self.axes[len(in_params) :], dtypes.param)
            if buffer.rule == "muon" and is_cut(buffer.layout):
                wide = "float64" if dtypes.master == "float64" else "float32"  # in which an update is computed
                add("all_gather of momentum", numel, self.axes, wide)
        return sent

    def __rich__(self) -> Group:
        return _report(self)

    def __str__(self) -> str:
        return as_text(self)


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
) -> Plan:
    """The plan of `model` under `cfg` on `world_size` ranks; reads shapes only, so the model may be on `meta`.

    Args:
        model: any module.
        cfg: a `Config`, or what `Config.load` takes.
        world_size: number of ranks W, at least 1; None is those of the mesh, or 1.
        mesh: how they stand along several axes; None is as the configuration says, or one axis.
        units: names of the modules to use as units, with `*` as a wildcard (the outermost matches count); None finds
            repeated blocks.
        param_groups: parameters with hyper-parameters of their own; see `ParamGroup`. The first that matches counts.
        transform: in place of the configuration's optimizer; see `make_train_step`.
        gather_hook, reduce_hook, placements, order: see `make_train_step`.
        trained: the names of the parameters that are trained; None is those that require gradients.
        starts: when the optimizer state of each parameter began, by name (`starts_of`); 0 where it has no name. One counter
            of updates serves a flat buffer, so parameters that began in different updates have flat buffers of their own.

    Raises:
        ConfigError, ValueError: the configuration does not fit, a name in `units` matches nothing, or `order` is none of the
            model's parameters.

    >>> blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    >>> [unit.name for unit in plan(blocks, {"zero_optimization": zero}, world_size=2).units]
    ['0', '1']
    """
    check_model(model)
    check_names("units", units)
    _check_groups(param_groups)
    check_mesh(mesh)
    cfg = Config.load(cfg)
    zero = cfg.zero_optimization
    if world_size is None:
        world_size = mesh.size if mesh else 1
    mesh = mesh_of(zero, world_size, mesh)
    optimizers = optimizers_of(cfg, param_groups, transform)
    for optimizer_ in optimizers:
        if isinstance(optimizer_, UserTransform):
            optimizer_.check()
    _check_has_shapes(model)
    modules, (owners, aliases) = dict(model.named_modules()), _owners(model)
    if not owners:
        raise ValueError(f"make_train_step: {type(model).__name__} has no parameters; pass a model with some")
    trained = {n for n, p in owners.items() if p.requires_grad} if trained is None else set(trained)
    _check_params(owners, trained, param_groups)
    check_named(order, list(owners), aliases)
    if order is None:
        order = round_robin if zero.round_robin_gradients else declaration
    unit_plans = tuple(
        UnitPlan(
            name,
            tuple(
                _plan_buffer(name, kind, [(n, owners[n]) for n in names], zero, mesh, optimizers, order)
                for kind, names in _by_kind(
                    members, modules, owners, cfg, param_groups, optimizers, trained, starts or {}
                ).items()
            ),
        )
        for name, members in _find_units(model, owners, units, zero.reduce_bucket_size or BUCKET)
    )
    largest = max(unit_plans, key=lambda unit: unit.gathered_numel)
    if largest.gathered_numel > zero.stage3_max_live_parameters:
        raise LiveLimitError(
            f"zero_optimization.stage3_max_live_parameters: must hold the largest unit, got "
            f"{zero.stage3_max_live_parameters} for unit {largest.name!r} of {largest.gathered_numel} elements; "
            f"raise it, or name smaller modules in units="
        )
    two_units = 2 * max(sum(b.padded_numel for b in u.buffers) for u in unit_plans)
    max_reducing = min(zero.reduce_bucket_size or BUCKET, two_units)
    precision = cfg.precision
    optimizer = place_optimizers([b for u in unit_plans for b in u.buffers if b.trainable], optimizers)
    unit_plans, optimizer = _placed(unit_plans, optimizer, cfg, placements, mesh)
    return Plan(
        stage=zero.stage,
        mesh=mesh,
        axes=shard_axes(mesh, zero),
        units=unit_plans,
        aliases=aliases,
        optimizer=optimizer,
        buffers={
            n: TensorSpec(tuple(t.shape), precision.buffer_dtype_of(dtype_name(t.dtype)))
            for n, t in model.named_buffers()
        },
        prefetch=zero.stage3_prefetch_bucket_size,
        max_live=zero.stage3_max_live_parameters,
        num_micro_steps=cfg.batch_sizes(mesh.size).num_micro_steps,
        max_reducing=max_reducing,
        max_reuse_distance=zero.stage3_max_reuse_distance,
        gather_bucket=zero.allgather_bucket_size,
        # Full gradients that no rank keeps must not gather in a bucket, either.
        reduce_bucket=max_reducing if zero.reduce_bucket_size and zero.stage >= 2 else zero.reduce_bucket_size,
        comm_hooks=comm_hooks_of(zero, mesh, gather_hook, reduce_hook),
        streaming=Streaming.of(zero.offload_optimizer, zero.offload_param, cfg.aio, zero.sub_group_size),
    )


class Kind(NamedTuple):
    """What the parameters of one flat buffer have in common."""

    dtypes: Dtypes
    trainable: bool
    small: bool
    group: int
    rule: str
    start: int

    def __str__(self) -> str:
        param, master = self.dtypes.param, self.dtypes.master
        parts = [
            param if master == param else f"{param}-{master}",
            "small" * self.small,
            "frozen" * (not self.trainable),
            f"group{self.group}" * bool(self.group),
            self.rule,
            f"start{self.start}" * bool(self.start),
        ]
        return "/".join(filter(None, parts))


ParamGroup = Mapping[str, Any]
"""Hyper-parameters that differ from the configuration's, or a `"transform"` (see `OwnTransform`) with or without an `"lr"`;
and under `"params"` whom they are for: a regular expression that is searched for in a parameter's name, or a function of
name and parameter."""

OwnTransform = Transform | Callable[[Any], Transform]
"""A user's transform, or a function of the learning rate that makes one; elementwise, for it works on shards.

The learning rate is a number, and a 0-d tensor where the whole step is compiled."""


@dataclass(frozen=True, slots=True)
class UserTransform:
    """A user's transform where otherwise an optimizer of the configuration stands; `check` says whether it can be."""

    field: str
    make: OwnTransform
    lr: float

    def __post_init__(self) -> None:
        if not isinstance(self.make, Transform) and not callable(self.make):
            raise ConfigError(
                f"{self.field}: must be a Transform or a function of the learning rate that makes one, got {self.make!r}; "
                f"see fzero.optim.transforms"
            )

    def check(self) -> None:
        """Raises a ConfigError unless it makes a transform, which is elementwise."""
        try:
            made = self.transform()
        except TypeError as error:  # a class of torch.optim, say, which takes parameters first
            raise ConfigError(
                f"{self.field}: must make a Transform of a learning rate, got {shown(self.make)}, which raises {error}; pass "
                f"lambda lr: fzero.optim.torch_optimizer(cls, lr=lr) for a class of torch.optim, or see fzero.optim.transforms"
            ) from error
        if not isinstance(made, Transform):
            raise ConfigError(
                f"{self.field}: must make a Transform of a learning rate, got {made!r}; return one, see fzero.optim.transforms"
            )
        try:
            check_elementwise(made, name=self.field)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def __repr__(self) -> str:
        return f"UserTransform({self.field!r}, lr={self.lr})"  # the same on all ranks

    @property
    def is_fixed(self) -> bool:
        """Whether no learning rate reaches it."""
        return isinstance(self.make, Transform)

    def is_elementwise(self, kind: str) -> bool:
        return True

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        return ""

    def transform(self, *, lr: float | Tensor | None = None, **_: Any) -> Transform:
        """The transform; of what `OptimizerBlock.transform` takes only the learning rate concerns it."""
        return self.make if isinstance(self.make, Transform) else self.make(self.lr if lr is None else lr)


def optimizers_of(
    cfg: Config, param_groups: Sequence[ParamGroup] = (), transform: OwnTransform | None = None
) -> list[Optimizer | UserTransform]:
    """The optimizer of each group: 0 is the configuration's or `transform`, for the parameters that no group takes.

    Raises:
        ConfigError: a group without `"params"`, or with a hyper-parameter that the optimizer does not have.
    """
    lr = cfg.optimizer.lr
    optimizers: list[Optimizer | UserTransform] = [
        cfg.optimizer if transform is None else UserTransform("transform", transform, lr)
    ]
    for index, group in enumerate(param_groups):
        if not isinstance(group.get("params"), str) and not callable(group.get("params")):
            raise ConfigError(
                f"param_groups[{index}].params: must be a regular expression or a function of name and parameter, got "
                f"{group.get('params')!r}; say whom the group is for"
            )
        overrides = {key: value for key, value in group.items() if key != "params"}
        field = f"param_groups[{index}]"
        own = overrides.pop("transform", transform)
        if own is None:
            optimizers.append(with_overrides(cfg.optimizer, overrides, field))
            continue
        optimizers.append(UserTransform(f"{field}.transform", own, overrides.pop("lr", lr)))
        if overrides:
            raise ConfigError(
                f"{field}.{min(overrides)}: a group of a transform has 'params', 'transform' and 'lr' only, got "
                f"{overrides[min(overrides)]!r}; make the transform with it"
            )
    return optimizers


def _check_has_shapes(model: nn.Module) -> None:
    by_kind: dict[str, Iterable[tuple[str, Tensor]]]
    by_kind = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    for kind, named in by_kind.items():
        for name, tensor in named:
            if is_lazy(tensor):
                raise ValueError(
                    f"{kind} {name!r}: must have a shape, and that of a lazy module has none before its first forward; run the "
                    f"model once on a batch before the step is made"
                )


def _check_groups(param_groups: object) -> None:
    """Raises unless these are mappings, one after the other."""
    fix = 'pass [{"params": r"norm|bias", "weight_decay": 0.0}], say'
    if isinstance(param_groups, str | Mapping) or not isinstance(param_groups, Sequence):
        refuse("param_groups", "a list of mappings", param_groups, fix)
    for index, group in enumerate(param_groups):
        if not isinstance(group, Mapping):
            refuse(f"param_groups[{index}]", "a mapping", group, fix)


def _check_params(
    owners: Mapping[str, nn.Parameter], trained: Collection[str], param_groups: Sequence[ParamGroup]
) -> None:
    for name, param in owners.items():
        if name in trained and param.is_complex():
            raise ValueError(
                f"parameter {name!r}: must be real to be trained, got {param.dtype}; register its real and imaginary parts "
                f"and join them in the forward with torch.complex"
            )
    for index, group in enumerate(param_groups):
        try:
            taken = any(_group_of(name, param, [group]) for name, param in owners.items())
        except re.error as error:
            raise ConfigError(
                f"param_groups[{index}].params: must be a regular expression, got {group['params']!r}: {error}; mend it"
            ) from None
        if not taken:
            names = ", ".join(list(owners)[:4])
            raise ConfigError(
                f"param_groups[{index}].params: must take a parameter of the model and takes none, got {group['params']!r}; "
                f"names look like {names}"
            )


def _group_of(name: str, param: nn.Parameter, param_groups: Sequence[ParamGroup]) -> int:
    """The first group that takes the parameter, counted from 1; 0 is none."""
    for index, group in enumerate(param_groups, 1):
        match = group["params"]
        if re.search(match, name) if isinstance(match, str) else match(name, param):
            return index
    return 0


def _by_kind(
    names: Sequence[str],
    modules: dict[str, nn.Module],
    owners: dict[str, nn.Parameter],
    cfg: Config,
    param_groups: Sequence[ParamGroup],
    optimizers: Sequence[Optimizer | UserTransform],
    trained: Collection[str],
    starts: Mapping[str, int],
) -> dict[Kind, list[str]]:
    kinds: dict[Kind, list[str]] = {}
    precision, threshold = cfg.precision, cfg.zero_optimization.stage3_param_persistence_threshold
    for name in names:
        param = owners[name]
        owner, is_trained = modules[name.rpartition(".")[0]], name in trained
        dtypes = precision.dtypes_of(dtype_name(param.dtype), owner, trainable=is_trained)
        group = _group_of(name, param, param_groups) if is_trained else 0
        rule = optimizers[group].kind_of(name, tuple(param.shape)) if is_trained else ""
        start = starts.get(name, 0) if is_trained else 0
        kind = Kind(dtypes, is_trained, param.numel() < threshold, group, rule, start)
        kinds.setdefault(kind, []).append(name)
    return kinds


def _plan_buffer(
    unit: str,
    kind: Kind,
    params: Sequence[tuple[str, nn.Parameter]],
    zero: ZeroOptimization,
    mesh: Mesh,
    optimizers: Sequence[Optimizer | UserTransform],
    order: OrderFunction | Sequence[str],
) -> FlatParamPlan:
    axes = shard_axes(mesh, zero)
    num_shards = num_ranks(mesh, axes)
    of_names = dict(params)
    params = [(name, of_names[name]) for name in ordered(tuple(of_names), order, num_shards)]
    layout = FlatLayout(
        tuple(name for name, _ in params), tuple(tuple(p.shape) for _, p in params), num_shards,
        multiple_of=ALIGNMENT * mesh.size // num_shards,
    )  # fmt: skip
    row = stage_specs(2 if kind.small and zero.stage == 3 else zero.stage, axes)
    elementwise = optimizers[kind.group].is_elementwise(kind.rule)
    return FlatParamPlan(
        f"{unit}/{kind}", layout, kind.dtypes, kind.trainable, row, kind.group, kind.rule, elementwise, kind.start
    )


def starts_of(plan: Plan) -> dict[str, int]:
    """When the optimizer state of each trained parameter began: the same number where it was in the same update."""
    return {name: b.start for b in plan.flat_buffers if b.trainable for name in b.layout.names}


def place_optimizers(
    buffers: Sequence[FlatParamPlan], optimizers: Sequence[Optimizer | UserTransform]
) -> dict[str, Any]:
    """The specs of the optimizer's state of each flat buffer."""
    elementwise: dict[tuple[int, str, str], Transform] = {}  # by what it depends on

    def transform_of(buffer: FlatParamPlan) -> Transform:
        made = optimizers[buffer.group].transform(contents=ShardContents(buffer.layout, ranks=(0,)), kind=buffer.rule)
        return mixed_precision(made, state_dtype=buffer.dtypes.optimizer)

    specs = {}
    for buffer in buffers:
        how = (buffer.group, buffer.rule, buffer.dtypes.optimizer)
        if not buffer.elementwise:
            transform = transform_of(buffer)
        elif (transform := elementwise.get(how)) is None:  # type: ignore[assignment]
            transform = elementwise[how] = transform_of(buffer)
        specs[buffer.key] = transform.specs(buffer.master)
    return specs


def _placed(
    units: tuple[UnitPlan, ...], optimizer: dict[str, Any], cfg: Config, given: GivenPlacements, mesh: Mesh
) -> tuple[tuple[UnitPlan, ...], dict[str, Any]]:
    """The units and the specs of the optimizer's state, with the placements that were asked for."""
    buffers = [buffer for unit in units for buffer in unit.buffers]
    trained = [buffer for buffer in buffers if buffer.trainable]
    shards = {b.key: b.params.local_shape(mesh)[0] for b in buffers if isinstance(b.row.params, Sharded)}
    kept = {b.key: b.master.local_shape(mesh)[0] for b in buffers if b.trainable or b.has_master}
    chooser = Chooser(cfg, given, kept, shards)
    masters = {b.key: chooser.of("master", b.key) for b in buffers if b.has_master}
    names, placed = [f"master/{key}" for key in masters], dict(optimizer)
    for buffer in trained:
        leaves, treespec = optree.tree_flatten(optimizer[buffer.key])
        at = {leaf: chooser.of("optimizer", buffer.key, leaf) for leaf, _ in _long_leaves(optimizer, buffer)}
        names += [f"optimizer/{buffer.key}/{leaf}" for leaf in at]
        of_leaves = zip(leaves, _short_names(optimizer[buffer.key]), strict=True)
        placed[buffer.key] = treespec.unflatten([replace(x, placement=at.get(n, x.placement)) for x, n in of_leaves])
    grads = {b.key: chooser.of("grads", b.key) for b in trained if isinstance(b.row.grads, Sharded)}
    params = {key: chooser.of("params", key) for key in shards}
    chooser.check_all_used([*names, *(f"grads/{key}" for key in grads), *(f"params/{key}" for key in params)])
    _check_staging(units, shards, params, cfg)

    def with_placements(buffer: FlatParamPlan) -> FlatParamPlan:
        master, param, grad = (of_all.get(buffer.key, DEVICE) for of_all in (masters, params, grads))
        return replace(buffer, placement=master, param_placement=param, grad_placement=grad)

    return tuple(replace(unit, buffers=tuple(map(with_placements, unit.buffers))) for unit in units), placed


def _check_staging(
    units: Sequence[UnitPlan], shards: Mapping[str, int], params: Mapping[str, Placement], cfg: Config
) -> None:
    """Raises a ConfigError where shards of parameters in files do not fit the buffers that the configuration allows."""
    block = cfg.zero_optimization.offload_param
    in_files = [[b.key for b in u.buffers if b.key in params and params[b.key].kind == "nvme"] for u in units]
    longest = max((shards[key] for keys in in_files for key in keys), default=0)
    most = max(map(len, in_files), default=0)
    if block is not None and block.buffer_size is not None and block.buffer_size < longest:
        raise ConfigError(
            f"zero_optimization.offload_param.buffer_size: must hold the longest shard of parameters in files, which has "
            f"{longest} elements, got {block.buffer_size}; raise it, leave it out, or name smaller modules in units="
        )
    if block is not None and block.buffer_count is not None and block.buffer_count < most:
        raise ConfigError(
            f"zero_optimization.offload_param.buffer_count: must hold the shards of one unit, which are {most} in files, got "
            f"{block.buffer_count}; raise it, or leave it out"
        )


def _long_leaves(optimizer: Mapping[str, Any], buffer: FlatParamPlan) -> list[tuple[str, TensorSpec]]:
    """The tensors of a buffer's optimizer state that have an element for each of its own, by name."""
    state = optimizer[buffer.key]
    return [
        (name, spec)
        for name, spec in zip(_short_names(state), optree.tree_leaves(state), strict=True)
        if buffer.is_long(spec)
    ]


def _short_names(state: Any) -> list[str]:
    """`exp_avg` of `state.exp_avg`, and `[1].exp_avg` of a chain's second."""
    return [name.removeprefix("state").removeprefix(".") for name in leaf_names(state)]


def _owners(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """The parameters by their first names; and every further name of a tied parameter or buffer, with the first one."""
    first: dict[int, str] = {}
    owners, aliases = {}, {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(param), name)
        if owner == name:
            owners[name] = param
        else:
            aliases[name] = owner
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner = first.setdefault(id(buffer), name)
        if owner != name:
            aliases[name] = owner
    return owners, aliases


# --- units -------------------------------------------------------------------------------------------------------


def _find_units(
    model: nn.Module, owners: dict[str, nn.Parameter], patterns: Sequence[str] | None, cap: int
) -> list[tuple[str, list[str]]]:
    """Every parameter in exactly one unit: (name of the unit, names of its parameters), as declared.

    A block is a unit. Modules between blocks are joined while they stay below the largest block (or, without blocks,
    the largest module) and below `cap` elements.
    """
    blocks = blocks_of(model, patterns)
    runs = _runs(blocks, owners)
    sizes = [sum(owners[name].numel() for name in names) for block, names in runs if block is not None]
    if not sizes:
        sizes = [sum(owners[name].numel() for name in names) for names in _by_module(list(owners)).values()]
    cap = min(cap, max(sizes))
    units: list[tuple[str, list[str]]] = []
    for block, names in runs:
        if block is not None:
            units.append((block, names))
            continue
        modules = list(_by_module(names).items())
        for bucket in plan_buckets([sum(owners[name].numel() for name in members) for _, members in modules], cap):
            first, last = modules[bucket[0]][0], modules[bucket[-1]][0]
            title = first if first == last else f"{first}..{last}"
            units.append((title, [name for index in bucket for name in modules[index][1]]))
    return units


def blocks_of(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """The names of the modules that are units by themselves: those named, or the repeated blocks."""
    return _named_blocks(model, patterns) if patterns is not None else _repeated_blocks(model)


def _by_module(names: Sequence[str]) -> dict[str, list[str]]:
    """The names by the module that owns them."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0] or "(root)", []).append(name)
    return modules


def _repeated_blocks(model: nn.Module, prefix: str = "") -> list[str]:
    """The outermost repeated modules: members of a ModuleList, and of a Sequential that repeats one.

    What is never called (a list in a list) is no block. A Sequential in a Sequential is one where another is made of the
    same classes: of an embedding, a stack and a head the stack's members are.
    """
    children = [(f"{prefix}{name}", child) for name, child in model.named_children() if _has_params(child)]
    counts = Counter(_kind_of(child) for _, child in children)
    is_list = isinstance(model, nn.ModuleList)
    repeats = isinstance(model, nn.Sequential) and any(
        count > 1 for kind, count in counts.items() if kind not in _CONTAINERS
    )
    blocks = []
    for name, child in children:
        if isinstance(child, _CONTAINERS):
            is_block = False
        elif isinstance(child, nn.Sequential):
            is_block = len(children) > 1 if is_list else repeats and counts[_kind_of(child)] > 1
        else:
            is_block = is_list or repeats
        blocks += [name] if is_block else _repeated_blocks(child, f"{name}.")
    return blocks


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Which have no forward."""


def _kind_of(module: nn.Module) -> Any:
    """What makes two modules alike: the class, and of a Sequential those of its members."""
    return (type(module), *map(_kind_of, module)) if isinstance(module, nn.Sequential) else type(module)


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, module in model.named_modules() if name and _has_params(module)]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"units: {pattern!r} must match a module with parameters and matches none of {type(model).__name__}'s; "
                f"names look like {', '.join(names[:4])}"
            )
    blocks: dict[str, None] = {}
    for name in names:  # named_modules tells a parent before its children
        inside = any(parent in blocks for parent in _parents(name))
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            blocks[name] = None
    return list(blocks)


def _parents(name: str) -> Iterator[str]:
    """The modules around what has that name, from the outermost in.

    >>> list(_parents("blocks.0.up.weight"))
    ['blocks', 'blocks.0', 'blocks.0.up']
    """
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _runs(blocks: Sequence[str], names: Iterable[str]) -> list[tuple[str | None, list[str]]]:
    """The names, as declared, cut wherever the block that they belong to changes; None is no block."""
    known = set(blocks)
    block_of: dict[str, str | None] = {}  # by module, which has several parameters as a rule
    runs: list[tuple[str | None, list[str]]] = []
    for name in names:
        module = name.rpartition(".")[0]
        if module not in block_of:
            block_of[module] = next((parent for parent in _parents(name) if parent in known), None)
        block = block_of[module]
        if not runs or runs[-1][0] != block:
            runs.append((block, []))
        runs[-1][1].append(name)
    return runs


# --- the table ---------------------------------------------------------------------------------------------------


def _totals(by_axis: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """What is sent along all axes together."""
    total: Counter[str] = Counter()
    for sent in by_axis.values():
        for collective, size in sent.items():
            total[collective] += size
    return dict(total)


def _nbytes(specs: Any, mesh: Mesh) -> int:
    return sum(spec.local_nbytes(mesh) for spec in optree.tree_leaves(specs))


def _report(plan: Plan) -> Group:
    """The units as a table, and in words what a rank holds and sends."""
    table = Table(title=f"ZeRO stage {plan.stage} on {describe(plan.mesh)}", title_justify="left")
    table.add_column("unit")
    table.add_column("flat buffer")
    for column in ("parameters", "elements", "padding", "on a rank"):
        table.add_column(column, justify="right")
    for unit in plan.units:
        for index, buffer in enumerate(unit.buffers):
            table.add_row(
                unit.name if index == 0 else "",
                " ".join([buffer.dtypes.param, *buffer.key.removeprefix(unit.name + "/").split("/")[1:]]),
                str(len(buffer.layout.names)),
                f"{buffer.layout.numel:,}",
                f"{buffer.layout.partition.padding:,}",
                f"{buffer.params.local_shape(plan.mesh)[0]:,}",
            )
    held = ", ".join(f"{name} {_human(nbytes)}" for name, nbytes in plan.bytes_per_rank.items() if nbytes)
    dtypes = dict.fromkeys(
        str(b.dtypes) if b.trainable else f"frozen {b.dtypes.param}" + f", own values {b.dtypes.master}" * b.has_master
        for b in plan.flat_buffers
    )
    buffers = ", ".join(dict.fromkeys(spec.dtype for spec in plan.buffers.values()))
    lines = {"": plan.sent_per_step}
    if is_several(plan.mesh):
        lines = {f" along {axis}": sent for axis, sent in plan.sent_by_axis.items()}
    return Group(
        table,
        f"dtypes: {'; '.join(dtypes)}" + (f"; module buffers {buffers}" if buffers else ""),
        f"a rank holds: {held}",
        *(
            f"of these {_MEMORIES[kind]}: " + ", ".join(f"{name} {_human(nbytes)}" for name, nbytes in parts.items())
            for kind, parts in plan.bytes_by_memory.items()
            if kind != "device"
        ),
        *(
            f"elements that a rank sends{along} in a step: "
            + (", ".join(f"{numel:,} in {name}" for name, numel in sent.items() if numel) or "none")
            for along, sent in lines.items()
        ),
        *(_hook_states(plan) if plan.comm_hooks else ()),
    )


_MEMORIES = {
    "host": "in host memory (where the model is on the CPU, the same memory)",
    "nvme": "in files",
}


def _hook_states(plan: Plan) -> Iterator[str]:
    yield f"comm hooks: {plan.comm_hooks}"
    exact = sum(_totals(replace(plan, comm_hooks=CommHooks()).sent_nbytes_by_axis).values())
    yield f"bytes that a rank sends in a step: {sum(plan.sent_nbytes_per_step.values()):,}, without comm hooks {exact:,}"


def _human(nbytes: float) -> str:
    """Bytes in the largest decimal unit below them."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} GB"
