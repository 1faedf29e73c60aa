"""`Pipeline`: the argument `pipeline=` of `make_train_step`; it makes the runtime of
one stage.

A stage is a coordinate of the mesh axis "pipe". Its runtime is that of an ordinary
step: the model is this rank's layers (`StageLayers`), and the ranks are those along
"data" inside the coordinate. So ZeRO, precision, offload and units are those of any
step. Two things are a pipeline's own: the program (`fzero.pipeline.execution`) and the
agreements of the stages (`fzero.pipeline.stages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

from torch import nn

from fzero.comms import collectives
from fzero.comms.axes import AbstractAxis, ProcessAxis, RankAxis
from fzero.comms.hangs.progress import PROGRESS
from fzero.comms.process_group import along, once_more
from fzero.comms.records import Label
from fzero.config.config import Config, ConfigError
from fzero.pipeline.execution import PipelineProgram
from fzero.pipeline.layers import StageLayers
from fzero.pipeline.messages import Links, Mailbox
from fzero.pipeline.module import PipelineModule
from fzero.pipeline.order_check import plan_order
from fzero.pipeline.orders import Order, PipeOrder, with_transfers
from fzero.pipeline.partition import Bounds, owner
from fzero.pipeline.stages import Stages, Tie, order_of
from fzero.plans.param_groups import group_of
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.plans.staged import StagedPlan
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.step_spec import StepSpec, check_same
from sharding import DATA, Mesh

PIPE = "pipe"
"""The mesh axis of the stages."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a pipeline runs.

    Attributes:
        order: in which order each stage runs the forwards and backwards of its
            micro-batches: a function of the numbers of stages and micro-batches
            (`fzero.pipeline.orders`), or its name.
        partition: how layers are divided among chunks: a method, bounds or costs (see
            `PipelineModule`). None takes the module's.
        device: where this rank's layers of `LayerSpec`s are built; None is the current
            device. On "meta" they get no values: `init` makes those of a model on
            `meta`, or `fzero.load_weights` reads them, so that no layer is in memory
            twice.
    """

    order: Order | str = "1f1b"
    partition: str | Sequence[Any] | None = None
    device: str | None = None
    is_uniform: ClassVar[bool] = False

    @classmethod
    def of(cls, given: Any) -> Pipeline:
        """The value of `pipeline=`: a `Pipeline`, or an order.

        >>> Pipeline.of("gpipe")
        Pipeline(order='gpipe', partition=None, device=None)
        """
        if isinstance(given, Pipeline):
            return given
        if not isinstance(given, str) and not callable(given):
            raise ValueError(
                f"pipeline: must be an order (a function of stages and micro-batches, or its name) "
                f"or a Pipeline, got {given!r}; "
                f'pass "1f1b", say'
            )
        return cls(given)

    def division(self, spec: StepSpec, mesh: Mesh) -> tuple[PipelineModule, PipeOrder, Bounds]:
        """The layers of a model, the order of its stages, and the bounds of its chunks.

        Raises:
            ValueError: the model is no list of layers, or has fewer layers than chunks.
            OrderError: the order is wrong.
        """
        num_micro_batches = spec.cfg.batch_sizes(mesh.axis_size(DATA)).num_micro_steps
        order = plan_order(self.order, mesh.axis_size(PIPE), num_micro_batches)
        model = _module_of(spec.model, order.stages)
        return model, order, model.partition(order.num_chunks, self.partition)

    def staged(self, spec: StepSpec, mesh: Mesh, own: Plan | None = None) -> StagedPlan:
        """The plans of all stages. Layers of other stages are built on `meta`; sends
        nothing.
        """
        model, order, bounds = self.division(spec, mesh)
        num_data = mesh.axis_size(DATA)
        specs = (
            _stage_spec(spec, model, order, bounds, stage, device="meta")
            for stage in range(order.stages)
        )
        ranks = tuple(
            tuple(rank for rank in range(mesh.size) if mesh.coordinate(rank)[PIPE] == stage)
            for stage in range(order.stages)
        )
        return StagedPlan(mesh, tuple(own.plan(num_data) for own in specs), ranks)

    def runtime(self, spec: StepSpec, world: RankAxis | AbstractAxis) -> StepRuntime:
        """The runtime of this rank's stage. *Collective:* every rank; compares model
        and configuration.

        Raises:
            ConfigError, ValueError: the step cannot be a pipeline.
            OrderError: the order is wrong.
            MismatchError: on every rank, when ranks differ.
        """
        mesh = _checked_mesh(world)
        _check_spec(spec, mesh)
        model, order, bounds = self.division(spec, mesh)
        if spec.cfg.zero_optimization.row.shards("params"):
            _check_fits(self.staged(spec, mesh), spec.cfg)
        axis, inner = (along(world, mesh, name) for name in (PIPE, DATA))  # type: ignore[type-var]
        own = _stage_spec(spec, model, order, bounds, axis.rank, device=self.device)
        if spec.device.type == "cuda" and not any(p.is_meta for p in own.model.parameters()):
            own.model.to(spec.device)  # layers of specs have their seeds on the CPU
        layers = own.model
        assert isinstance(layers, StageLayers)
        run = StepRuntime.make(own, inner)
        if spec.cfg.precision.stochastic_rounding:
            run = _rounded_alike(run, spec, model)
        if isinstance(world, AbstractAxis) or isinstance(axis, AbstractAxis):
            return run
        arguments = {
            "order": str(order),
            "layers": ", ".join(map(_name_of, model.specs)),
            "bounds": str(bounds),
            "mesh": str(mesh),
        }
        check_same(world, {"configuration": spec.fingerprint_of_config, "pipeline": arguments})
        _check_groups(spec, layers, axis)
        links = Links(axis, once_more(axis))
        program = PipelineProgram(
            layers, bounds, order, evaluation=partial(_forwards, order),
            loss_fn=spec.loss_fn or model.loss_fn,  # type: ignore[arg-type]
            blocks=partial(_blocks, model, layers), mailbox=Mailbox(links, run.device),
        )  # fmt: skip
        return replace(
            run, runs=program, job=_stages(run, model, bounds, order, world, links), spec=own
        )


def _stage_spec(
    spec: StepSpec,
    model: PipelineModule,
    order: PipeOrder,
    bounds: Bounds,
    stage: int,
    device: str | None = None,
) -> StepSpec:
    """The arguments of the step of one stage, whose layers are built on `device`."""
    layers = model.build_ranges(
        [(bounds[chunk], bounds[chunk + 1]) for chunk in order.chunks_of(stage)], device=device
    )
    zero = spec.cfg.zero_optimization
    cfg = spec.cfg
    if zero.row.shards("params"):  # gathered and reduced once, for all micro-batches
        cfg = cfg.model_copy(
            update={"zero_optimization": zero.model_copy(update={"stage": "3 once"})}
        )
    return replace(
        spec,
        cfg=cfg,
        model=layers,
        loss_fn=None,
        units=_units(layers),
        parallelism=None,
        is_part=True,
    )


def _rounded_alike(run: StepRuntime, spec: StepSpec, model: PipelineModule) -> StepRuntime:
    """The runtime whose stochastic rounding does not depend on the stages: its draws
    are those of elements of the whole model.
    """
    whole = model.build(0, model.num_layer_specs, device="meta")
    buffers = (
        replace(spec, model=whole, units=_units(whole), parallelism=None)
        .plan(run.ranks.size)
        .flat_buffers
    )
    starts = accumulate((buffer.padded_numel for buffer in buffers), initial=0)
    places = {buffer.key: start for buffer, start in zip(buffers, starts, strict=False)}
    updater = replace(run.updater, first_elements=places)
    return replace(run, updater=updater, builder=replace(run.builder, updater=updater))


# --- the agreements of the stages -----------------------------------------------------------------


def _stages(
    run: StepRuntime,
    model: PipelineModule,
    bounds: Sequence[int],
    order: PipeOrder,
    world: RankAxis,
    links: Links,
) -> Stages:
    """*Collective* of the stages: sends the names of their parameters.

    Raises:
        ConfigError: on every rank, if tied layers are in files.
    """
    axis, first = (
        links.up,
        {f"tied_modules.{key}": tied.indices[0] for key, tied in model.tied.items()},
    )

    def layer_of(buffer: FlatParamPlan) -> int:
        unit = _module_in(buffer.layout.names[0])
        return first[unit] if unit in first else int(unit)

    measured = [
        (layer_of(b), b.key) for b in run.plan.flat_buffers if b.trainable and b.shard_numel
    ]
    names = list(run.stored_names)
    every = collectives.exchange(
        (measured, names, run.offload.has_files), axis, label=Label("compare")
    )
    if model.tied and any(has_files for *_, has_files in every):
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device: must be 'cpu' or 'none' where stages tie "
            f"layers, whose gradients they add in memory, got 'nvme' with the tied "
            f"{', '.join(model.tied)}; keep the state in host memory"
        )
    ties = []
    for key, tied in model.tied.items():
        holders = tuple(sorted({order.stage_of[owner(bounds, index)] for index in tied.indices}))
        keys = tuple(
            b.key
            for b in run.plan.flat_buffers
            if _module_in(b.layout.names[0]) == f"tied_modules.{key}"
        )
        if len(holders) > 1 and axis.rank in holders:
            ties.append(Tie(f"tied_modules.{key}", keys, holders))
    mesh = _checked_mesh(world)
    stage_of = [f"pipeline stage {mesh.coordinate(rank)[PIPE]}" for rank in range(world.size)]
    if isinstance(world, ProcessAxis):
        PROGRESS.places = {world.global_rank(rank): stage for rank, stage in enumerate(stage_of)}
    members = [f"{stage} (rank {rank})" for rank, stage in enumerate(stage_of)]

    def place(name: str) -> int:
        unit = _module_in(name)
        return first[unit] if unit in first else int(unit)

    in_order = sorted(dict.fromkeys(name for _, own, _ in every for name in own), key=place)
    buffers = tuple(order_of([own for own, *_ in every]))
    return Stages(
        world=world,
        links=links,
        members=tuple(members),
        buffers=buffers,
        most=max(len(own) for own, *_ in every),
        ties=tuple(ties),
        names=tuple(in_order),
        device=run.device,
    )


def _module_in(name: str) -> str:
    """The layer or tied module of a parameter: "3" or "tied_modules.embed".

    >>> _module_in("3.norm.weight"), _module_in("tied_modules.embed.weight")
    ('3', 'tied_modules.embed')
    """
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "tied_modules" else first


def _units(layers: StageLayers) -> list[str]:
    """One unit for each layer with parameters."""
    return list(dict.fromkeys(_module_in(name) for name, _ in layers.named_parameters()))


def _blocks(
    model: PipelineModule, layers: StageLayers, start: int, stop: int
) -> Sequence[tuple[int, int, bool]]:
    calls = [call for _, call in layers.calls(start, stop)]
    blocks: Sequence[tuple[int, int, bool]] = model.checkpoint_ranges(start, stop, calls)
    return blocks


def _forwards(order: PipeOrder, micro_batches: int) -> PipeOrder:
    """The forwards of an order alone, for any number of micro-batches."""
    one = [
        [event for event in order.events[stage] if event.kind == "forward"]
        for stage in range(order.stages)
    ]
    chunks = [list(dict.fromkeys(event.chunk for event in own)) for own in one]
    events = [
        [
            one[stage][0]._replace(micro_batch=i, chunk=chunk)
            for i in range(micro_batches)
            for chunk in own
        ]
        for stage, own in enumerate(chunks)
    ]
    transfers = with_transfers("forwards", events, order.stage_of)
    return PipeOrder("forwards", micro_batches, order.stage_of, transfers, (0,) * order.stages)


# --- checks ---------------------------------------------------------------------------------------


def _checked_mesh(world: RankAxis | AbstractAxis) -> Mesh:
    mesh = world.mesh
    if mesh is None or PIPE not in mesh.names or DATA not in mesh.names or len(mesh.names) > 2:
        raise ValueError(
            f"mesh: a pipeline needs a mesh of the axes 'pipe' and 'data', in this order, got "
            f"{mesh}; pass mesh=Mesh.of(pipe=2, data=2), say"
        )
    if mesh.size != world.size:
        raise ValueError(
            f"mesh: its axes must hold all {world.size} ranks of the job, got pipe "
            f"{mesh.axis_size(PIPE)} × data {mesh.axis_size(DATA)} = {mesh.size}; the number of "
            f"stages must divide the ranks"
        )
    return mesh


def _check_spec(spec: StepSpec, mesh: Mesh) -> None:
    """Raises where the arguments of a step do not fit a pipeline."""
    cfg, num_micro_batches = spec.cfg, spec.cfg.batch_sizes(mesh.axis_size(DATA)).num_micro_steps
    row, m = cfg.zero_optimization.row, num_micro_batches
    if row.number == 2:
        raise ConfigError(
            f"zero_optimization.stage: must be 0, 1 or 3 with a pipeline, got 2; each of its {m} "
            f"micro-batches would reduce the gradients of a stage, {m} reductions in place of one; "
            f"set stage to 1"
        )
    zero = cfg.zero_optimization
    others = {
        key: getattr(zero, key)
        for key in ("offload_param", "zero_hpz_partition_size", "mics_shard_size")
    }
    for key, value in others.items():
        if row.shards("params") and value is not None:
            raise ConfigError(
                f"zero_optimization.{key}: must be left out with a pipeline, whose stages gather "
                f"their parameters once in a step over all their ranks, got {value!r}; leave it out"
            )
    if zero.offload_optimizer is not None and zero.offload_optimizer.async_update:
        raise ConfigError(
            "zero_optimization.offload_optimizer.async_update: must be false with a pipeline, where "
            "a stage cannot report to the others that its update failed later, got true; leave it "
            "out"
        )
    refused = {
        "compile": spec.compile, "units": spec.units, "order": spec.order,
    }  # fmt: skip
    fixes = {
        "compile": (
            "leave it out: a stage goes from one micro-batch to another as the order says, "
            "in no one graph"
        ),
        "units": "leave it out: each layer is a unit",
        "order": "leave it out",
    }
    for name, value in refused.items():
        if value is not None:
            raise ConfigError(f"{name}: must be None with a pipeline, got {value!r}; {fixes[name]}")
    fields = [getattr(one, "field", "transforms") for one in spec.transforms]
    if "checkpoint" in fields:
        raise ConfigError(
            "checkpoint: must be None with a pipeline, got one; pass "
            "PipelineModule(activation_checkpoint_interval=…)"
        )
    if "random_ltd" in fields or cfg.drops_tokens:
        raise ConfigError(
            "random_ltd: must be off with a pipeline, whose ranks number their own layers only, "
            "got it on; leave it out"
        )
    if cfg.drops_layers:
        raise ConfigError(
            "progressive_layer_drop.enabled: must be false with a pipeline, whose layers take one "
            "input, got true; leave the block out"
        )
    if cfg.compresses:
        raise ConfigError(
            "compression_training: must be off with a pipeline, whose stages do not have all "
            "modules that it names, got it on; leave the block out"
        )
    if "transforms" in fields:
        raise ConfigError(
            "transforms: must be empty with a pipeline, whose stages do not have all modules that "
            "they change, got "
            f"{fields.count('transforms')}; leave them out"
        )


def _check_fits(staged: StagedPlan, cfg: Config) -> None:
    """Raises where ZeRO stage 3 would gather more than `stage3_max_live_parameters` for
    the micro-batches of a step.
    """
    numels = [sum(unit.gathered_numel for unit in plan.units) for plan in staged.stages]
    limit, most = cfg.zero_optimization.stage3_max_live_parameters, max(numels)
    if most > limit:
        m = staged.stages[0].num_micro_steps
        raise ConfigError(
            f"zero_optimization.stage: 3 gathers the parameters of a pipeline's stage once for all "
            f"micro-batches of a step, so they must be at most stage3_max_live_parameters, "
            f"{limit:,}, got {most:,} on stage {numels.index(most)}; use more stages, or raise it "
            f"(if each of {m} micro-batches gathered and reduced for itself, there were {3 * m} "
            f"transfers in place of 2)"
        )


def _module_of(model: nn.Module, num_stages: int) -> PipelineModule:
    """The description of a model."""
    found = PipelineModule.of(model)  # type: ignore[arg-type]  # which it checks
    if found is model and found.num_stages != num_stages:
        raise ValueError(
            f"mesh: its axis 'pipe' must have the {found.num_stages} stages of the PipelineModule, "
            f"got {num_stages}; give both the same number"
        )
    loss_fn = found.loss_fn
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise ValueError(
            f"loss_fn: must have no parameters, got {type(loss_fn).__name__} with some; make it "
            f"the last layer, and leave loss_fn out"
        )
    return found


def _check_groups(spec: StepSpec, layers: StageLayers, axis: RankAxis) -> None:
    """Raises on every rank if a parameter group takes no parameter of any stage.
    *Collective* of the stages.
    """
    groups = spec.param_groups
    own = [any(group_of(n, p, [group]) for n, p in layers.named_parameters()) for group in groups]
    every = collectives.exchange(own, axis, label=Label("compare")) if groups else []
    for index, taken in enumerate(zip(*every)):
        if not any(taken):
            raise ConfigError(
                f"param_groups[{index}].params: must take a parameter of the model and takes none "
                f"on any stage, got {groups[index]['params']!r}; names look like 3.weight"
            )


def _name_of(layer: Any) -> str:
    return (
        repr(layer)
        if not callable(layer) or isinstance(layer, nn.Module)
        else getattr(layer, "__name__", type(layer).__name__)
    )
