"""`plan_pipeline`: stages, bubble, seconds and bytes of a pipeline, predicted from a
trace of the model, for any number of ranks.

    planned = plan_pipeline(model, cfg, stages=8, world_size=1024, batch=batch, micro_batches=64)
    print(planned)                            # a row for each stage; the bubble, the seconds, the largest stage

1. A trace (`trace_activations`) gives the operators of one micro-batch. They are
   divided among *layers*: the units of the plan, in the order in which the forward uses
   them (`layer_costs`). A unit that is used in two places is two layers.
2. The layers are cut so that the slowest stage is fastest (`partition_by_cost`), or by
  given bounds.
3. The timeline of an order (`fzero.pipeline.timeline`) gives the seconds and the bytes.
   After its last backward, each stage reduces its gradients over its data ranks. The
   update itself takes no time here.

The ZeRO stage is 0, 1 or 3, which gathers once in a step and so costs as 1; in stage 2
every micro-batch would reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from torch import nn

from fzero.common.text_tables import as_text, scale_of, shown
from fzero.common.timelines import draw_timelines
from fzero.config.config import ConfigError
from fzero.config.files import changed
from fzero.estimation.activation_trace import Activations
from fzero.estimation.compare import keys_of, quietly
from fzero.estimation.ledger import Device
from fzero.estimation.pipeline_layers import (
    PlannedLayers,
    TracedLayers,
    of_stages,
    pipeline_config,
    recomputed,
)
from fzero.pipeline.order_check import plan_order
from fzero.pipeline.orders import Order, PipeOrder
from fzero.pipeline.partition import Bounds, check_bounds, partition_by_cost
from fzero.pipeline.timeline import PipelineTimeline, chunk_costs, drawn, predict
from fzero.plans.machine_model import MachineModel
from fzero.plans.units import blocks_of
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.step_spec import StepSpec
from sharding import Mesh

if TYPE_CHECKING:
    from typing import Protocol

    from matplotlib.figure import Figure

    class Pipelined(Protocol):
        """The members of a train step that are read here."""

        spec: StepSpec
        runtime: StepRuntime
        mesh: Mesh


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """One step in a pipeline, as predicted. `print(planned)` shows its stages.

    Attributes:
        layers: the layers of the model.
        bounds: the bounds of the layers in chunks.
        timeline: the timeline of one data rank.
        reduces: by stage, the seconds in which it reduces gradients after its last
            backward.
        checkpoints: whether units are recomputed in the backward.
    """

    layers: PlannedLayers = field(repr=False)
    bounds: Bounds
    timeline: PipelineTimeline = field(repr=False)
    reduces: tuple[float, ...] = field(repr=False)
    checkpoints: bool = False

    @property
    def order(self) -> PipeOrder:
        """The order of the pipeline."""
        return self.timeline.order

    @property
    def seconds(self) -> float:
        """The duration of a step without its update."""
        ends = (spans[-1].stop if spans else 0.0 for spans in self.timeline.spans)
        return max(end + after for end, after in zip(ends, self.reduces, strict=True))

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they wait for each other."""
        return self.timeline.bubble

    @property
    def nbytes(self) -> int:
        """The peak bytes of the stage that needs most."""
        return max(self.timeline.nbytes)

    def numel(self, stage: int) -> int:
        """The parameters of a stage."""
        return sum(sum(self.layers.numels[a:b]) for a, b in self._ranges(stage))

    def _ranges(self, stage: int) -> list[tuple[int, int]]:
        return [
            (self.bounds[chunk], self.bounds[chunk + 1]) for chunk in self.order.chunks_of(stage)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON types."""
        timeline = self.timeline
        return {
            "stages": self.order.stages,
            "data": self.layers.data,
            "order": self.order.name,
            "micro_batches": self.order.micro_batches,
            "bounds": list(self.bounds),
            "layers": list(self.layers.names),
            "seconds": self.seconds,
            "bubble": self.bubble,
            "nbytes": self.nbytes,
            "activation_checkpointing": self.checkpoints,
            "by_stage": [
                {
                    "parameters": self.numel(stage),
                    "state": timeline.state[stage],
                    "stored": timeline.stored[stage],
                    "peak": timeline.nbytes[stage],
                    "in_flight": self.order.in_flight[stage],
                    "sent": timeline.sent[stage],
                    "busy": timeline.busy(stage),
                    "reduces": self.reduces[stage],
                }
                for stage in range(self.order.stages)
            ],
        }

    def draw(self) -> Figure:
        """The picture of the order on these costs: stages by time. Needs matplotlib
        (extra `pictures`).
        """
        return draw_timelines(
            [drawn(self.timeline, self.reduces)], needed_by="the picture of a pipeline"
        )

    def __rich__(self) -> Group:
        timeline, order = self.timeline, self.order
        scale, unit = scale_of(self.nbytes)
        ranks = order.stages * self.layers.data
        where = f"{order.stages} stages × {self.layers.data} data ranks = {ranks} ranks"
        title = f"{order.name}: {where}, {order.micro_batches} micro-batches"
        table = Table(title=title, title_justify="left", box=None)
        for name in ("stage", "layers"):
            table.add_column(name, no_wrap=True)
        sizes_of = (f"{name}, {unit}" for name in ("state", "stored", "peak", "sent"))
        words = ("parameters", "in flight", *sizes_of, "busy", "reduces, s")
        for name in words:
            table.add_column(name, justify="right", no_wrap=True)
        for stage in range(order.stages):
            layers = ", ".join(self._words(start, stop) for start, stop in self._ranges(stage))
            sizes = (timeline.state, timeline.stored, timeline.nbytes, timeline.sent)
            table.add_row(
                *(str(stage), layers, f"{self.numel(stage):,}", str(order.in_flight[stage])),
                *(shown(size[stage], scale) for size in sizes),
                f"{timeline.busy(stage) / timeline.seconds:.1%}",
                f"{self.reduces[stage]:.3g}",
            )
        return Group(table, "", f"{self.description}.")

    def _words(self, start: int, stop: int) -> str:
        if stop - start < 2:
            return self.layers.names[start] if stop > start else "none"
        return f"{self.layers.names[start]} to {self.layers.names[stop - 1]}"

    @property
    def description(self) -> str:
        """The result in a sentence."""
        scale, unit = scale_of(self.nbytes)
        largest = self.timeline.nbytes.index(self.nbytes)
        return (
            f"Bubble {self.bubble:.1%}, {self.seconds:.3g} s for a step without its update; the "
            f"most is on stage {largest}, {self.nbytes / scale:.3g} {unit}"
        )

    def __str__(self) -> str:
        return as_text(self)


def plan_pipeline(
    model: nn.Module,
    cfg: Any = None,
    *,
    stages: int,
    world_size: int,
    batch: Any,
    micro_batches: int | None = None,
    order: Order | str = "1f1b",
    bounds: Sequence[int] | None = None,
    device_nbytes: float = math.inf,
    machine: MachineModel | None = None,
    loss_fn: Any = None,
    device: Device = "cuda",
) -> PipelinePlan:
    """A step of a pipeline over `stages` × `world_size / stages` ranks, as predicted.

    Args:
        model: any module; on `meta` it holds no weights. Its units are the layers. Or a
            `PipelineModule`, with its layers.
        cfg: any argument of `Config.load`; None is bf16 with an fp32 master, and AdamW.
            Without a ZeRO stage it is 1.
        stages: p.
        world_size: number of ranks, p times those that share a stage.
        batch: one rank's samples of a micro-batch, possibly on `meta`; for a
            `PipelineModule` (inputs, labels).
        micro_batches: m; by default `gradient_accumulation_steps`, or 4 p if that is 1.
        order: see `plan_order`.
        bounds: the bounds of the units in chunks; None cuts them so that the slowest
            stage is fastest.
        device_nbytes: the memory of a rank, which None of the stages may exceed if
            fzero cuts.
        machine: the rates of one rank.
        loss_fn: see `make_train_step`.
        device: where the model is.

    Raises:
        ConfigError: stage 2 of ZeRO; stages that do not divide the ranks; more stages
            than layers.
        OrderError: the order is wrong.
        ValueError: nothing fits; the model does not run on that batch.
    """
    planner = PipelinePlanner(model, cfg, batch, machine=machine, loss_fn=loss_fn, device=device)
    return planner.planned(
        stages,
        world_size,
        micro_batches=micro_batches,
        order=order,
        bounds=bounds,
        device_nbytes=device_nbytes,
    )


class PipelinePlanner:
    """Plans pipelines of one model, which is traced once, or has traces in
    `activations`. Arguments as for `plan_pipeline`.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: Any,
        batch: Any,
        *,
        machine: MachineModel | None = None,
        loss_fn: Any = None,
        device: Device = "cuda",
        activations: Activations | None = None,
    ) -> None:
        found = pipeline_config(cfg)
        trace = None if activations is None else activations.of_config(found)
        self.traced = TracedLayers(
            model, found, batch, machine, loss_fn=loss_fn, device=device, trace=trace
        )

    def planned(
        self,
        stages: int,
        world_size: int,
        *,
        micro_batches: int | None = None,
        order: Order | str = "1f1b",
        bounds: Sequence[int] | None = None,
        device_nbytes: float = math.inf,
    ) -> PipelinePlan:
        """One pipeline; see `plan_pipeline`."""
        if world_size % stages:
            raise ConfigError(
                f"pipeline: stages must divide the number of ranks, {world_size}, got {stages}; "
                f"use another number of either"
            )
        traced = self.traced
        steps = traced.cfg.gradient_accumulation_steps or 1
        number = micro_batches or (steps if steps > 1 else 4 * stages)
        layers = traced.of(world_size // stages)
        if bounds is None:
            _check_enough(
                layers, stages
            )  # a stage has one chunk at least, and the order of many stages takes long to check
        planned = plan_order(order, stages, number)
        if bounds is None:
            _check_enough(layers, planned.num_chunks)
            held = [_held(planned, chunk) for chunk in range(planned.num_chunks)]
            limit = (
                device_nbytes
                if planned.num_chunks == stages
                else device_nbytes * stages / planned.num_chunks
            )
            found = partition_by_cost(
                layers.costs, planned.num_chunks, in_flight=held, nbytes=limit
            )
        else:
            found = check_bounds(bounds, len(layers.costs), planned.num_chunks)
        return _planned(traced, layers, planned, found)


def _check_enough(layers: PlannedLayers, num_chunks: int) -> None:
    if len(layers.costs) < num_chunks:
        raise ConfigError(
            f"pipeline: stages (times chunks of each) must be at most the number of layers, "
            f"{len(layers.costs)}, got {num_chunks}; use fewer stages"
        )


def _planned(
    traced: TracedLayers, layers: PlannedLayers, order: PipeOrder, bounds: Bounds
) -> PipelinePlan:
    """The course of an order on layers in these bounds."""
    machine = traced.machine
    blocks = [block for start, stop in pairwise(bounds) for block in traced.blocks(start, stop)]
    costs = chunk_costs(recomputed(layers.costs, blocks), bounds)
    timeline = predict(order, costs, bandwidth=machine.network, latency=machine.latency)
    sent = [sum(layers.sent[start:stop]) for start, stop in pairwise(bounds)]
    reduces = tuple(
        sum(sent[chunk] for chunk in order.chunks_of(stage)) / machine.network
        for stage in range(order.stages)
    )
    runs_again = (
        any(again for _, _, again in blocks)
        or traced.cfg.activation_checkpointing.every is not None
    )
    return PipelinePlan(layers, bounds, timeline, reduces, runs_again)


def explain_pipeline(step: Pipelined, batch: Any, *, machine: MachineModel | None) -> PipelinePlan:
    """See `TrainStep.explain`."""
    if batch is None:
        raise ValueError(
            "explain: needs a batch of (inputs, labels) for a pipeline, got none; pass one, "
            "possibly on meta"
        )
    spec, run = step.spec, step.runtime
    first = next(iter(run.batches.split(batch)))
    pipe: Any = spec.parallelism
    model, order, bounds = pipe.division(spec, step.mesh)
    device: Device = "cuda" if run.device.type == "cuda" else "cpu"
    traced = TracedLayers(
        model, of_stages(spec.cfg), first, machine, loss_fn=spec.loss_fn, device=device
    )
    return _planned(traced, traced.of(step.mesh.size // order.stages), order, bounds)


def _held(order: PipeOrder, chunk: int) -> int:
    """How many micro-batches a chunk stores: its part of those of its stage."""
    stage = order.stage_of[chunk]
    return -(-(order.in_flight[stage] + order.waiting[stage]) // len(order.chunks_of(stage)))


# --- which number of stages -----------------------------------------------------------------------


def best_pipelines(
    model: nn.Module,
    cfg: Any,
    batch: Any,
    *,
    world_size: int,
    device_nbytes: float,
    machine: MachineModel | None = None,
    loss_fn: Any = None,
    device: Device = "cuda",
    order: Order | str = "1f1b",
    activations: Activations | None = None,
) -> tuple[PipelinePlan, ...]:
    """The pipelines that fit, fastest first: all numbers of stages from 2 up that
    divide the ranks.

    Each number is tried as configured and, if that recomputes nothing and the model has
    blocks, with activation checkpointing. Each has the same samples in a step as the
    data-parallel job: p times its micro-batches, on 1/p of its data ranks.
    """
    keys = keys_of(cfg)
    tries = [keys]
    if quietly(keys).activation_checkpointing.every is None and blocks_of(model):
        tries.append(changed(keys, {"activation_checkpointing": {"every": 1}}))
    found = list[PipelinePlan]()
    for given in tries:
        planner = PipelinePlanner(
            model,
            given,
            batch,
            machine=machine,
            loss_fn=loss_fn,
            device=device,
            activations=activations,
        )
        found += _fitting(planner, world_size, device_nbytes, order)
    return tuple(sorted(found, key=lambda one: one.seconds))


def _fitting(
    planner: PipelinePlanner, world_size: int, device_nbytes: float, order: Order | str
) -> Iterator[PipelinePlan]:
    """The pipelines of one configuration that fit."""
    steps = planner.traced.cfg.gradient_accumulation_steps or 1
    for stages in (number for number in range(2, world_size + 1) if world_size % number == 0):
        try:
            one = planner.planned(
                stages,
                world_size,
                micro_batches=stages * steps,
                order=order,
                device_nbytes=device_nbytes,
            )
        except ConfigError:
            return  # more stages than layers
        except ValueError:
            continue  # does not fit
        if one.nbytes <= device_nbytes:
            yield one
