"""`PipelineModule`: a model as a list of layers, cut into stages, of which a rank
builds its own.

It is a description. Without a process group it builds no layer. In a job it knows its
stage, and builds the layers of that stage at once, as DeepSpeed's does: then it is also
a module with these layers' parameters. `make_train_step` and `deepspeed.initialize`
take either.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from fzero.comms.process_group import is_joined, job
from fzero.pipeline.layers import (
    Layer,
    LayerSeeds,
    LayerSpec,
    StageLayers,
    Tied,
    TiedLayerSpec,
    build_layer,
)
from fzero.pipeline.partition import (
    Bounds,
    LayerCost,
    balanced,
    check_bounds,
    owner,
    partition_by_cost,
    uniform,
)
from sharding import Mesh


class Topology(Protocol):
    """Named axes of all ranks, in row-major order, one of which is `pipe`; DeepSpeed's
    `ProcessTopology` is one.
    """

    @property
    def axes(self) -> Sequence[str]: ...
    @property
    def dims(self) -> Sequence[int]: ...


class _Axes(NamedTuple):
    """The axes of a pipeline that was given its number of stages."""

    axes: tuple[str, ...]
    dims: tuple[int, ...]


class PipelineError(Exception):
    """A call that a pipeline does not have, such as a lone forward."""


class PipelineModule(nn.Module):
    """A model as a list of layers, each of which gets the output of the one before;
    several values travel as one tuple.

    Args:
        layers: `LayerSpec`, `TiedLayerSpec`, modules or callables; also an
            `nn.Sequential`.
        num_stages: p; it divides the ranks of the job.
        topology: instead of `num_stages`, the axes of all ranks.
        loss_fn: `loss_fn(outputs, labels)` is the loss of a micro-batch, on the last
            stage.
        seed_layers: DeepSpeed's. fzero always builds layer i under the seed
            `base_seed + i`, so it has no effect.
        seed_fn: is called with a layer's seed before it is built.
        base_seed: the seed of layer 0.
        partition_method: "parameters" (those that train; "parameters:all" counts frozen
            ones too), "uniform", "type:REGEX" (of class names), the bounds by hand
            (`[0, 5, 10]`), or one `LayerCost` for each layer.
        activation_checkpoint_interval: so many layers are recomputed together in the
            backward; 0 stores all activations.
        activation_checkpoint_func: DeepSpeed's. fzero recomputes in its own way, with
            the same draws.
        checkpointable_layers: the names of the classes that are recomputed; None is all
            with parameters.
        dynamic_shape: whether shapes change between micro-batches of a step. fzero's
            stages agree on shapes when they change.

    Raises:
        RuntimeError: neither `num_stages` nor `topology`; stages that do not divide the
            ranks; a pattern without a match.
        NotImplementedError: an unknown method, or a pipeline in a pipeline.
        ValueError: more stages than layers, bounds that are none, layers of one key
            that are not of one class.

    >>> model = PipelineModule(
    ...     [LayerSpec(nn.Linear, 4, 4) for _ in range(5)], num_stages=2, partition_method="uniform"
    ... )
    >>> model.parts, [name for name, _ in model.build(3, 5).named_parameters()]
    ([0, 3, 5], ['3.weight', '3.bias', '4.weight', '4.bias'])
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: Topology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int | LayerCost] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        self.axes_of_ranks: Topology = _topology(num_stages, topology)
        lengths = dict(zip(self.axes_of_ranks.axes, self.axes_of_ranks.dims, strict=True))
        self.num_stages, self.num_data_ranks = lengths["pipe"], lengths.get("data", 1)
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func, self.checkpointable_layers = (
            activation_checkpoint_func,
            checkpointable_layers,
        )
        # In a tuple, so that modules among them are no submodules of this one.
        self._layer_specs: tuple[Layer, ...] = _checked(layers)
        self._num_layers = len(self._layer_specs)
        self.num_layers: int = self.__dict__.get(
            "num_layers", self._num_layers
        )  # a model's own number, such as of its blocks
        self.tied: Mapping[str, Tied] = _tied(self._layer_specs)
        self._partition_method = partition_method
        self.stage_id: int | None = None
        if is_joined() and math.prod(lengths.values()) == job().size:
            mesh = Mesh.of(**lengths)
            self.stage_id = mesh.coordinate(job().rank)["pipe"]
        self.parts: list[int] = []
        self._local_start, self._local_stop = 0, len(self._layer_specs)
        self._partition_layers(method=partition_method)
        self._check_shared(self.parts)
        self._own: StageLayers | None = None
        if self.stage_id is not None:
            self._build()

    @classmethod
    def of(
        cls,
        model: Self | nn.Sequential,
        *,
        num_stages: int = 1,
        loss_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """The description of a plain `nn.Sequential`, whose modules are the layers; a
        `PipelineModule` is returned as it is.
        """
        if isinstance(model, cls):
            if loss_fn is not None:
                model.loss_fn = loss_fn
            return model
        if not isinstance(model, nn.Sequential):
            raise ValueError(
                f"pipeline: the model must be a PipelineModule or an nn.Sequential, got "
                f"{type(model).__name__}; "
                "write it as a list of layers, each of which gets the output of the one before"
            )
        return cls(model, num_stages, loss_fn=loss_fn, **kwargs)

    # --- the partition ----------------------------------------------------------------------------

    @property
    def num_layer_specs(self) -> int:
        """The number of layers, callables included; a subclass may set `num_layers` to
        a number of its own.
        """
        return len(self._layer_specs)

    def partition(
        self, num_parts: int, method: str | Sequence[int | LayerCost] | None = None
    ) -> Bounds:
        """The bounds of the layers in `num_parts` chunks; those of `parts` for as many
        parts as there are stages.

        Raises:
            ValueError: as the class.
        """
        if method is None and num_parts == self.num_stages:
            return check_bounds(self.parts, self.num_layer_specs, num_parts)
        bounds = self._bounds(self._partition_method if method is None else method, num_parts)
        self._check_shared(bounds)
        return bounds

    def _bounds(self, method: str | Sequence[int | LayerCost], num_parts: int) -> Bounds:
        if self.num_layer_specs < num_parts:
            raise ValueError(
                f"partition: stages (times chunks of each) must be at most the number of layers, "
                f"{self.num_layer_specs}, got {num_parts}; use fewer stages, or cut layers into "
                f"smaller ones"
            )
        if not isinstance(method, str):
            given = list(method)
            costs = [cost for cost in given if isinstance(cost, LayerCost)]
            if costs and len(costs) == len(given) == self.num_layer_specs:
                return partition_by_cost(costs, num_parts)
            if costs:
                raise ValueError(
                    f"partition: costs must be one for each of {self.num_layer_specs} layers, got "
                    f"{len(given)}"
                )
            bounds = [bound for bound in given if not isinstance(bound, LayerCost)]
            return check_bounds(bounds, self.num_layer_specs, num_parts)
        kind, _, pattern = method.partition(":")
        match kind.lower(), pattern.lower():
            case "uniform", "":
                return uniform(self.num_layer_specs, num_parts)
            case "parameters", "":
                return balanced(self._count_layer_params(), num_parts)
            case "parameters", "all":
                return balanced(_numels(self._layer_specs, self._seeds, is_all=True), num_parts)
            case "type", _:
                found = set(self._find_layer_type(pattern))
                return balanced(
                    [int(index in found) for index in range(self.num_layer_specs)], num_parts
                )
        raise NotImplementedError(
            f"partition_method: must be 'uniform', 'parameters', 'parameters:all', 'type:REGEX', "
            f"bounds or costs, got {method!r}; give one of these"
        )

    def _partition_layers(self, method: str | Sequence[int | LayerCost] = "uniform") -> None:
        """Sets `parts`, and the bounds of this rank's stage. Subclasses override it
        with bounds of their own.
        """
        self.parts = list(self._bounds(method, self.num_stages))
        if self.stage_id is not None:
            self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        """The layers that this rank builds; all from the first or to the last, if None."""
        self._local_start = 0 if start is None else start
        self._local_stop = self.num_layer_specs if stop is None else stop

    def _count_layer_params(self) -> list[int]:
        """The elements that train in each layer. Subclasses override it to count
        others.
        """
        return _numels(self._layer_specs, self._seeds)

    def _find_layer_type(self, layername: str) -> list[int]:
        """The indices of the layers whose class's name matches a regular expression,
        whatever the case.
        """
        found = [
            i
            for i, layer in enumerate(self._layer_specs)
            if re.search(layername, _name(layer), re.IGNORECASE)
        ]
        if not found:
            names = ", ".join(dict.fromkeys(filter(None, map(_name, self._layer_specs))))
            raise RuntimeError(
                f"partition_method: 'type:{layername}' must match the class of a layer, got none; "
                f"the classes are {names}"
            )
        return found

    def _check_shared(self, bounds: Sequence[int]) -> None:
        """Raises if two stages would hold a parameter that the layers share without a
        `TiedLayerSpec`.
        """
        holders = dict[nn.Parameter, int]()
        for index, layer in enumerate(self._layer_specs):
            for name, parameter in layer.named_parameters() if isinstance(layer, nn.Module) else ():
                first = holders.setdefault(parameter, index)
                if owner(bounds, first) != owner(bounds, index):
                    raise ValueError(
                        f"pipeline: layers {first} and {index} share the parameter "
                        f"'{index}.{name}', and would be on different "
                        "stages; describe both with TiedLayerSpec, or put them on one stage"
                    )

    def partitions(self) -> list[int]:
        """The bounds, as `parts`."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a layer."""
        return owner(self.parts, layer_idx)

    # --- building ---------------------------------------------------------------------------------

    @property
    def specs(self) -> tuple[Layer, ...]:
        """The layers as they were given."""
        return self._layer_specs

    @property
    def _seeds(self) -> LayerSeeds:
        return LayerSeeds(self.base_seed, self.seed_fn)

    def build(
        self, start: int, stop: int, *, device: torch.device | str | None = None
    ) -> StageLayers:
        """The layers from `start` to `stop` - 1, built; see `build_ranges`."""
        return self.build_ranges([(start, stop)], device=device)

    def build_ranges(
        self, ranges: Sequence[tuple[int, int]], *, device: torch.device | str | None = None
    ) -> StageLayers:
        """The layers of some ranges, built, each under its seed; those that this rank
        has built already are the same objects.

        Args:
            ranges: (start, stop) of each chunk that a rank holds.
            device: where they are built; "meta" makes no values.
        """
        built = dict[int | str, nn.Module]()
        if self._own is not None:
            built = {
                int(name): module for name, module in self._own.named_children() if name.isdigit()
            }
            built |= dict(self._own.tied_modules.items())
        return StageLayers(
            self._layer_specs, ranges, self.tied, self._seeds, device=device, built=built
        )

    def _build(self) -> None:
        """Builds the layers of this rank's stage, and makes them its own submodules."""
        self._own = None
        stage = self.build(self._local_start, self._local_stop)
        for name, module in stage.named_children():
            self.add_module(name, module)
        # In a tuple of one, since it has the same submodules as this one.
        object.__setattr__(self, "_own", stage)
        self.forward_funcs = [call for _, call in stage.calls(self._local_start, self._local_stop)]

    def build_own(self) -> None:
        """Builds the layers of this rank, unless that is done: all of them outside a
        job.
        """
        if self._own is None:
            self._build()

    def _stage(self) -> StageLayers:
        if self._own is None:
            raise PipelineError(
                "PipelineModule: has no layers of its own outside a job, where it is a "
                "description; build(start, stop) builds some of them"
            )
        return self._own

    def forward(self, forward_input: Any) -> Any:
        """Runs the layers of this rank's stage on the output of the stage before.

        Raises:
            PipelineError: there is no job, so this is a description only.
        """
        return self._stage()(forward_input)

    def checkpoint_ranges(
        self, start: int, stop: int, calls: Sequence[Callable[..., Any]]
    ) -> tuple[tuple[int, int, bool], ...]:
        """The layers from `start` to `stop` - 1 in blocks: (start, stop, whether the
        block is recomputed in the backward).

        Args:
            calls: these layers, as `StageLayers.calls` has them.
        """
        interval = self.activation_checkpoint_interval
        if interval <= 0:
            return ((start, stop, False),) if start < stop else ()
        cuts = [*range(start, stop, interval), stop]
        return tuple(
            (one, two, self._is_checkpointable(calls[one - start : two - start]))
            for one, two in itertools.pairwise(cuts)
        )

    def _is_checkpointable(self, funcs: Sequence[Callable[..., Any]]) -> bool:
        """Whether a block of layers is recomputed: all have a class that was listed;
        without a list, any has parameters.
        """
        modules = [
            func.args[0] if isinstance(func, partial) and func.args else func for func in funcs
        ]
        if self.checkpointable_layers is not None:
            return all(type(module).__name__ in self.checkpointable_layers for module in modules)
        return any(
            next(module.parameters(), None) is not None
            for module in modules
            if isinstance(module, nn.Module)
        )

    def set_checkpoint_interval(self, interval: int) -> None:
        """Changes how many layers are recomputed together, from the next step on; 0
        recomputes none.
        """
        if interval < 0:
            raise ValueError(
                f"set_checkpoint_interval: interval must be at least 0, got {interval}; 0 stores "
                f"all activations"
            )
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Further losses by name, for a log; none here. Subclasses override it."""
        return None


def _topology(num_stages: int | None, topology: Topology | None) -> Topology:
    if topology is not None:
        if "pipe" not in topology.axes:
            raise RuntimeError(
                f"PipelineModule: topology must have an axis 'pipe', got {list(topology.axes)}; "
                f"add one"
            )
        return topology
    if num_stages is None:
        raise RuntimeError(
            "PipelineModule: must have num_stages or topology, got neither; pass num_stages"
        )
    if not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(
            f"PipelineModule: num_stages must be an integer of at least 1, got {num_stages!r}; "
            f"pass an int"
        )
    size = job().size if is_joined() else num_stages
    if size % num_stages:
        raise RuntimeError(
            f"PipelineModule: num_stages must divide the number of ranks, {size}, got "
            f"{num_stages}; start {size - size % num_stages or num_stages} ranks, or use another "
            f"number of stages"
        )
    return _Axes(("pipe", "data"), (num_stages, size // num_stages))


def _checked(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    found = tuple(layers)
    if not found:
        raise ValueError(
            "PipelineModule: layers must have at least one layer, got none; pass the layers of the "
            "model"
        )
    for index, layer in enumerate(found):
        if isinstance(layer, PipelineModule):
            raise NotImplementedError(
                f"PipelineModule: layer {index} must be no PipelineModule; put its layers into the "
                f"list in its place"
            )
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise ValueError(
                f"PipelineModule: layer {index} must be a LayerSpec, a module or a callable, got "
                f"{type(layer).__name__}; "
                "describe it with LayerSpec(Class, arguments)"
            )
    return found


def _tied(layers: Sequence[Layer]) -> dict[str, Tied]:
    found = dict[str, Tied]()
    for index, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            before = found.get(layer.key)
            indices = (*before.indices, index) if before else (index,)
            first = layers[indices[0]]
            assert isinstance(first, TiedLayerSpec)
            if first.typename is not layer.typename:
                raise ValueError(
                    f"TiedLayerSpec: layers of the key {layer.key!r} must be of one class, since a "
                    f"stage may hold several, got {first.typename.__name__} and "
                    f"{layer.typename.__name__}; use forward_fn for another use of the weight"
                )
            found[layer.key] = Tied(layer.key, indices, tuple(first.tied_weight_attr))
    return found


def _name(layer: Layer) -> str:
    """The name that "type:REGEX" looks at: that of the class, or of a function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


def _numels(layers: Sequence[Layer], seeds: LayerSeeds, *, is_all: bool = False) -> list[int]:
    """The elements of each layer that train, or all of them; specs are built on `meta`,
    one after the other, to count them.
    """
    counts = []
    for index, layer in enumerate(layers):
        module = layer
        if isinstance(layer, LayerSpec):
            try:
                module = build_layer(layer, index, seeds, "meta")
            except (NotImplementedError, RuntimeError):
                # some layers read the values that they are built with
                module = build_layer(layer, index, seeds)
        parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
        counts.append(sum(p.numel() for p in parameters if is_all or p.requires_grad))
    return counts
