"""The costs of a model's layers for one micro-batch, from a trace: seconds, state, stored and sent bytes.

A trace (`fzero.estimation.activation_trace`) has events of parameters. `layer_costs` cuts it where the forward goes from a layer
to the next: by default from one unit of the plan to the next one. `estimate_layers` does so for the layers of a `PipelineModule`;
its result is a `partition_method`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fzero.config.files import changed
from fzero.estimation.activation_trace import Traced, trace_activations
from fzero.estimation.compare import keys_of, quietly
from fzero.estimation.ledger import Device
from fzero.pipeline.layers import TiedLayerSpec
from fzero.pipeline.module import PipelineModule
from fzero.pipeline.partition import LayerCost
from fzero.plans.machine_model import MachineModel
from fzero.plans.plan import Plan, plan


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """The layers of a model on one rank, in the order of the forward, with their costs for one micro-batch.

    Attributes:
        names: the unit of each layer.
        costs: of each layer; its state is that of a rank among `data` ranks.
        numels: parameters of each layer.
        sent: bytes that a rank sends after the last backward for the parameters of each layer.
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
    trace: Traced,
    machine: MachineModel,
    layer_of: Callable[[str], str] | None = None,
) -> PlannedLayers:
    """The layers of a traced model, with their costs.

    Args:
        planned: of the ranks that share a stage.
        trace: of one micro-batch.
        machine: the rates.
        layer_of: the layer of a parameter; by default its unit.
    """
    layers = _visits(trace, machine, layer_of or (lambda name: planned.homes[name][0].name))
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


def _visits(trace: Traced, machine: MachineModel, layer_of: Callable[[str], str]) -> list[_Layer]:
    """Time and memory of the layers, from the events of their parameters."""
    layers, place, before, in_forward = list[_Layer](), 0, 0, True
    seconds_before = 0.0  # of what runs before the first layer
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
            place = max((index for index in with_it if index <= place), default=max(with_it, default=place))
            layers[place].backward += seconds
            held = sum(layer.stored for layer in layers[: place + 1])
        layers[place].working = max(layers[place].working, event.most - held)
    for layer in layers:
        layer.stored = max(layer.stored, 0)
    return layers


def _of_params(planned: Plan) -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
    """By parameter: bytes of state on the device, elements, and bytes that a rank sends in a step."""
    state, numels, sent = dict[str, float](), dict[str, int](), dict[str, float]()
    total = sum(buffer.layout.numel for buffer in planned.flat_buffers if buffer.trainable)
    sent_nbytes = sum(planned.sent_nbytes_per_step.values())
    for buffer in planned.flat_buffers:
        specs = [leaf.spec for leaf in planned.leaves(buffer)]
        nbytes = sum(spec.local_nbytes(planned.mesh) for spec in specs if spec.placement.kind == "device")
        for name in buffer.layout.names:
            numel = math.prod(buffer.layout.shape(name))
            numels[name] = numel
            state[name] = nbytes * numel / buffer.layout.numel if buffer.layout.numel else 0.0
            sent[name] = sent_nbytes * numel / total if buffer.trainable and total else 0.0
    return state, numels, sent


def _output(layers: Sequence[_Layer], index: int, sizes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes that go from a layer to the next: what its module returns, or what the module of the next one takes."""
    if layers[index].unit in sizes:
        return sizes[layers[index].unit][1]
    following = layers[index + 1].unit if index + 1 < len(layers) else ""
    return sizes[following][0] if following in sizes else 0


def estimate_layers(
    model: PipelineModule,
    cfg: Any = None,
    *,
    batch: tuple[Any, Any],
    data: int = 1,
    machine: MachineModel | None = None,
    device: Device = "cuda",
) -> tuple[LayerCost, ...]:
    """The cost of each layer of a `PipelineModule`, by a trace on fake tensors; a `partition_method` of the module.

    A callable without parameters costs nothing here: its work counts in the layer before it.

    Args:
        model: with a loss function.
        cfg: any argument of `Config.load`; None is bf16 with an fp32 master, and AdamW.
        batch: inputs and labels of a micro-batch, possibly on `meta`.
        data: the number of ranks that share a stage.
        machine: the rates.
        device: where the layers are.

    Raises:
        ValueError: the module has no loss function, or does not run on the batch.
    """
    loss_fn = model.loss_fn
    if loss_fn is None:
        raise ValueError("estimate_layers: the module must have a loss_fn, got None; pass loss_fn to PipelineModule")
    keys = changed(keys_of(cfg), {"zero_optimization": {"stage": 1}})
    whole = model.build(0, model.num_layers, device="meta")
    trace = trace_activations(
        whole, quietly(keys), batch, loss_fn=lambda run, both: loss_fn(run(both[0]), both[1]), device=device
    )
    planned = plan(whole, quietly(keys), world_size=data)
    found = layer_costs(planned, trace, machine or MachineModel(), layer_of=_layer_of)
    return _by_index(model, found)


def _layer_of(name: str) -> str:
    """The layer of a parameter: `3` of `3.inner.weight`, `tied_modules.embed` of `tied_modules.embed.weight`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "tied_modules" else parts[0]


def _by_index(model: PipelineModule, found: PlannedLayers) -> tuple[LayerCost, ...]:
    """The costs of all layers, of which those without parameters have none."""
    names = [
        f"tied_modules.{layer.key}" if isinstance(layer, TiedLayerSpec) else str(index)
        for index, layer in enumerate(model.specs)
    ]
    costs, index, nbytes = list[LayerCost](), 0, 0
    for name, cost in zip(found.names, found.costs, strict=True):
        place = names.index(name, index)
        costs += [LayerCost(0.0, 0.0, output_nbytes=nbytes) for _ in range(index, place)]
        costs.append(cost)
        index, nbytes = place + 1, cost.output_nbytes
    return (*costs, *(LayerCost(0.0, 0.0, output_nbytes=nbytes) for _ in range(index, len(names))))
