"""The costs of a model's layers for one micro-batch, from a trace: seconds, state,
stored and sent bytes.

A trace (`fzero.estimation.activation_trace`) has events of parameters. `layer_costs`
cuts it where the forward goes from a layer to the next: by default from one unit of the
plan to the next one. `estimate_layers` does so for the layers of a `PipelineModule`;
its result is a `partition_method`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from fzero.config.config import Config, ConfigError
from fzero.config.files import changed
from fzero.estimation.activation_trace import ActivationTrace, trace_activations
from fzero.estimation.compare import keys_of, quietly
from fzero.estimation.ledger import Device
from fzero.pipeline.layers import StageLayers, TiedLayerSpec
from fzero.pipeline.module import PipelineModule
from fzero.pipeline.partition import LayerCost
from fzero.plans.machine_model import MachineModel
from fzero.plans.plan import Plan
from fzero.plans.plan_spec import plan


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """The layers of a model on one rank, in the order of the forward, with their costs
    for one micro-batch.

    Attributes:
        names: the unit of each layer.
        costs: the costs of each layer; its state is that of a rank among `data` ranks.
        numels: parameters of each layer.
        sent: bytes that a rank sends after the last backward for the parameters of each
            layer.
        data: the number of ranks that share a stage.
    """

    names: tuple[str, ...]
    costs: tuple[LayerCost, ...]
    numels: tuple[int, ...]
    sent: tuple[float, ...]
    data: int


@dataclass(slots=True)
class _Layer:
    """A unit, each time that the forward comes to it."""

    unit: str
    params: set[str] = field(default_factory=set)
    forward: float = 0.0
    backward: float = 0.0
    stored: int = 0
    working: int = 0


def layer_costs(
    planned: Plan,
    trace: ActivationTrace,
    machine: MachineModel,
    layer_of: Callable[[str], str] | None = None,
) -> PlannedLayers:
    """The layers of a traced model, with their costs.

    Args:
        planned: the number of the ranks that share a stage.
        trace: the trace of one micro-batch.
        machine: the rates.
        layer_of: the layer of a parameter; by default its unit.
    """
    layers = _visits(trace, machine, layer_of or (lambda name: planned.param_units[name][0].name))
    state, numels, sent = _of_params(planned)
    costs = [
        LayerCost(
            layer.forward,
            layer.backward,
            round(sum(state[name] for name in layer.params)),
            layer.stored,
            _output(layers, index, trace.sizes),
            working_nbytes=layer.working,
        )
        for index, layer in enumerate(layers)
    ]
    return PlannedLayers(
        tuple(layer.unit for layer in layers),
        tuple(costs),
        tuple(sum(numels[name] for name in layer.params) for layer in layers),
        tuple(sum(sent[name] for name in layer.params) for layer in layers),
        planned.world_size,
    )


def _visits(
    trace: ActivationTrace, machine: MachineModel, layer_of: Callable[[str], str]
) -> list[_Layer]:
    """Time and memory of the layers, from the events of their parameters."""
    layers, place, before, in_forward = list[_Layer](), 0, 0, True
    seconds_before = 0.0  # time before the first layer
    for event, seconds in zip(trace.events, trace.seconds(machine), strict=True):
        in_forward = in_forward and event.kind != "boundary"
        if in_forward:
            if event.kind == "fetch":
                if not layers or layers[-1].unit != layer_of(event.name):
                    layers.append(_Layer(layer_of(event.name)))
                layers[-1].params.add(event.name)
            if not layers:
                seconds_before += seconds
                continue
            layers[-1].forward += seconds + seconds_before
            layers[-1].stored += event.now - before
            before, seconds_before, place = event.now, 0.0, len(layers) - 1
            held = before
        else:
            with_it = [index for index, layer in enumerate(layers) if event.name in layer.params]
            place = max(
                (index for index in with_it if index <= place), default=max(with_it, default=place)
            )
            layers[place].backward += seconds
            held = sum(layer.stored for layer in layers[: place + 1])
        layers[place].working = max(layers[place].working, event.most - held)
    for layer in layers:
        layer.stored = max(layer.stored, 0)
    return layers


def _of_params(planned: Plan) -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
    """By parameter: bytes of state on the device, elements, and bytes that a rank sends
    in a step.
    """
    state, numels, sent = dict[str, float](), dict[str, int](), dict[str, float]()
    total = sum(buffer.layout.numel for buffer in planned.flat_buffers if buffer.trainable)
    sent_nbytes = sum(planned.sent_nbytes_per_step.values())
    for buffer in planned.flat_buffers:
        specs = [leaf.spec for leaf in planned.leaves(buffer)]
        nbytes = sum(
            spec.local_nbytes(planned.mesh) for spec in specs if not spec.placement.is_away
        )
        for name in buffer.layout.names:
            numel = math.prod(buffer.layout.shape(name))
            numels[name] = numel
            state[name] = nbytes * numel / buffer.layout.numel if buffer.layout.numel else 0.0
            sent[name] = sent_nbytes * numel / total if buffer.trainable and total else 0.0
    return state, numels, sent


def _output(layers: Sequence[_Layer], index: int, sizes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes that go from a layer to the next: what its module returns, or what the
    module of the next one takes.
    """
    if layers[index].unit in sizes:
        return sizes[layers[index].unit][1]
    following = layers[index + 1].unit if index + 1 < len(layers) else ""
    return sizes[following][0] if following in sizes else 0


class TracedLayers:
    """A model that is traced once for one micro-batch; `of` has its layers on any
    number of ranks that share a stage.

    Args:
        model: a module, whose units are the layers; or a `PipelineModule`, which needs
            no weights.
        cfg: the configuration of the step.
        batch: one rank's samples of a micro-batch, possibly on `meta`; of a
            `PipelineModule` (inputs, labels).
        machine: the rates.
        loss_fn: see `make_train_step`; of a `PipelineModule`
            `loss_fn(outputs, labels)`. None takes its own.
        device: where the layers are.
        trace: the trace of the same model, configuration and batch, where there is one.

    Raises:
        ValueError: the `PipelineModule` has no loss function, or the model does not run
            on the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: Config,
        batch: Any,
        machine: MachineModel | None = None,
        *,
        loss_fn: Any = None,
        device: Device = "cuda",
        trace: ActivationTrace | None = None,
    ) -> None:
        self.module = model if isinstance(model, PipelineModule) else None
        if self.module is not None:
            model, loss_fn = (
                self.module.build(0, self.module.num_layer_specs, device="meta"),
                loss_fn or self.module.loss_fn,
            )
            if loss_fn is None:
                raise ValueError(
                    "loss_fn: a planned pipeline must have one, got None; pass loss_fn to "
                    "PipelineModule"
                )
            loss_fn = partial(_loss_of_pair, loss_fn)
        self.model, self.cfg, self.machine = model, cfg, machine or MachineModel()
        self.trace = trace or trace_activations(model, cfg, batch, loss_fn=loss_fn, device=device)

    def of(self, data: int) -> PlannedLayers:
        """The layers on one of `data` ranks that share a stage. A callable without
        parameters counts in the layer before it.
        """
        sizes = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
        # The numbers of samples are those of all ranks together. Gradients are kept from one
        # micro-batch to the next, as with gradient accumulation.
        cfg = self.cfg.model_copy(update=dict.fromkeys(sizes) | {"gradient_accumulation_steps": 2})
        planned = plan(self.model, cfg, world_size=data)
        found = layer_costs(planned, self.trace, self.machine, _layer_of if self.module else None)
        return found if self.module is None else _of_module(self.module, found)

    def blocks(self, start: int, stop: int) -> Sequence[tuple[int, int, bool]]:
        """The blocks of a chunk of a `PipelineModule`, as (start, stop, whether the
        backward runs it again).
        """
        if self.module is None:
            return ()
        assert isinstance(self.model, StageLayers)
        return self.module.checkpoint_ranges(
            start, stop, [call for _, call in self.model.calls(start, stop)]
        )


def _loss_of_pair(
    loss_fn: Callable[[Any, Any], Any], model: Callable[[Any], Any], batch: tuple[Any, Any]
) -> Any:
    return loss_fn(model(batch[0]), batch[1])


def recomputed(
    costs: Sequence[LayerCost], blocks: Sequence[tuple[int, int, bool]]
) -> list[LayerCost]:
    """The costs of all layers, of which some blocks keep only their input for the
    backward, and run again in it.

    >>> costs = [LayerCost(1, 2, stored_nbytes=5, output_nbytes=1)] * 3
    >>> [
    ...     (cost.backward, cost.stored_nbytes, cost.working_nbytes)
    ...     for cost in recomputed(costs, [(1, 3, True)])
    ... ]
    [(2, 5, 0), (3, 1, 10), (3, 0, 0)]
    """
    found = list(costs)
    for start, stop in ((start, stop) for start, stop, runs_again in blocks if runs_again):
        stored = sum(cost.stored_nbytes for cost in costs[start:stop])
        for index in range(start, stop):
            cost = costs[index]
            changes: dict[str, Any] = {"backward": cost.backward + cost.forward, "stored_nbytes": 0}
            if cost.backward:
                changes["weight_share"] = cost.weight_share * cost.backward / changes["backward"]
            if index == start:
                # the first layer's input is the batch
                held = costs[start - 1].output_nbytes if start else 0
                changes |= {"stored_nbytes": held, "working_nbytes": stored + cost.working_nbytes}
            found[index] = replace(cost, **changes)
    return found


def pipeline_config(cfg: Any) -> Config:
    """The configuration of a planned pipeline, in ZeRO stage 1 unless `cfg` names another.

    Raises:
        ConfigError: the stage is 2.
    """
    keys = keys_of(cfg)
    if "stage" not in (keys.get("zero_optimization") or {}):
        keys = changed(keys, {"zero_optimization": {"stage": 1}})
    found = quietly(keys)
    if found.zero_optimization.row.number == 2:
        raise ConfigError(
            "zero_optimization.stage: must be 0, 1 or 3 with a pipeline, got 2, which would reduce "
            "in every micro-batch; set stage to 1"
        )
    return of_stages(found)


def of_stages(cfg: Config) -> Config:
    """The configuration by which a stage's costs are counted: in ZeRO stage 3
    parameters are gathered for the step, as in 1.
    """
    zero = cfg.zero_optimization
    return cfg.model_copy(
        update={"zero_optimization": zero.model_copy(update={"stage": min(zero.row.number, 1)})}
    )


def estimate_layers(
    model: PipelineModule,
    cfg: Any = None,
    *,
    batch: tuple[Any, Any],
    data: int = 1,
    machine: MachineModel | None = None,
    device: Device = "cuda",
) -> tuple[LayerCost, ...]:
    """The cost of each layer of a `PipelineModule`, by a trace on fake tensors; a
    `partition_method` of the module.

    A callable without parameters costs nothing here: its work counts in the layer
    before it.

    Args:
        model: with a loss function.
        cfg: any argument of `Config.load`; None is bf16 with an fp32 master, and AdamW.
            Without a ZeRO stage it is 1.
        batch: inputs and labels of a micro-batch, possibly on `meta`.
        data: the number of ranks that share a stage.
        machine: the rates.
        device: where the layers are.

    Raises:
        ConfigError: stage 2 of ZeRO.
        ValueError: the module has no loss function, or does not run on the batch.
    """
    return TracedLayers(model, pipeline_config(cfg), batch, machine, device=device).of(data).costs


def _layer_of(name: str) -> str:
    """The layer of a parameter: `3` of `3.inner.weight`, `tied_modules.embed` of
    `tied_modules.embed.weight`.
    """
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "tied_modules" else parts[0]


def _of_module(model: PipelineModule, found: PlannedLayers) -> PlannedLayers:
    """All layers of a module; those without parameters cost nothing."""
    names = [
        f"tied_modules.{layer.key}" if isinstance(layer, TiedLayerSpec) else str(index)
        for index, layer in enumerate(model.specs)
    ]
    places, after = list[int](), 0
    for name in found.names:
        places.append(names.index(name, after))
        after = places[-1] + 1
    costs, numels, sent, nbytes = list[LayerCost](), [0] * len(names), [0.0] * len(names), 0
    for index in range(len(names)):
        if index in places:
            place = places.index(index)
            costs.append(found.costs[place])
            numels[index], sent[index], nbytes = (
                found.numels[place],
                found.sent[place],
                costs[-1].output_nbytes,
            )
        else:
            costs.append(LayerCost(0.0, 0.0, output_nbytes=nbytes))
    return PlannedLayers(tuple(names), tuple(costs), tuple(numels), tuple(sent), found.data)
