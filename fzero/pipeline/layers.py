"""Layers as descriptions, and the layers of one rank: built lazily, each under a seed
of its own.

A layer is a `LayerSpec`, a `TiedLayerSpec`, a module or a callable. `build_layer`
builds layer i under the seed `base_seed + i`: its initial weights are the same for
every number of stages. `StageLayers` is the module that a rank trains. Its parameters
have the global indices of their layers in their names, as in `nn.Sequential` and in
DeepSpeed: no name depends on the stages.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from fzero.common import random_states


class LayerSpec:
    """A layer that is built where it is needed: `typename(*args, **kwargs)`.

    Args:
        typename: a class of modules.
        *module_args, **module_kwargs: its arguments.

    Raises:
        RuntimeError: `typename` is no class of modules, as in DeepSpeed.

    >>> spec = LayerSpec(nn.Linear, 2, 3, bias=False)
    >>> spec, spec.build()
    (LayerSpec(Linear, 2, 3, bias=False), Linear(in_features=2, out_features=3, bias=False))
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise RuntimeError(
                f"{type(self).__name__}: typename must be a subclass of torch.nn.Module, got "
                f"{typename!r}; "
                "give a module or a function as it is, without a spec"
            )

    def build(self, log: bool = False) -> nn.Module:
        """The layer, built where and under the seed that are current; `log` is
        DeepSpeed's, and prints the spec.
        """
        if log:
            print(f"building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        shown = [
            *([repr(self.key)] if isinstance(self, TiedLayerSpec) else []),
            self.typename.__name__,
            *map(repr, self.module_args),
            *(f"{key}={value!r}" for key, value in self.module_kwargs.items()),
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the other layers of its key, wherever they are.

    Args:
        key: the key of the tied layers; the shared module is `tied_modules.<key>`.
        typename: a class of modules.
        *module_args, **module_kwargs: its arguments.
        forward_fn: `forward_fn(module, input)` instead of `module(input)`, such as an
            embedding's use as a head.
        tied_weight_attr: the name or names of the shared parameters in the module; they
            may be dotted.

    >>> TiedLayerSpec("embed", nn.Embedding, 8, 2)
    TiedLayerSpec('embed', Embedding, 8, 2)
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


Layer: TypeAlias = LayerSpec | nn.Module | Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Tied:
    """The layers of one key.

    Args:
        key: the key of their specs.
        indices: the positions of the layers, rising.
        weights: the names of the shared parameters in the module.
    """

    key: str
    indices: tuple[int, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerSeeds:
    """The seed of each layer: `base_seed` plus its index.

    Args:
        base_seed: the seed of layer 0.
        seed_fn: is called with the seed; by default the generators of torch, `random`
            and NumPy are seeded.
    """

    base_seed: int = 1234
    seed_fn: Callable[[int], Any] | None = None

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Draws inside are those of layer `index`; draws after it go on as if there had
        been none inside.
        """
        numpy = sys.modules.get("numpy")
        pythons, numpys = random.getstate(), numpy.random.get_state() if numpy else None
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            seed = self.base_seed + index
            if self.seed_fn is not None:
                self.seed_fn(seed)
            else:
                random_states.seed(seed, torch.device("cuda" if devices else "cpu"))
                random.seed(seed)
                if numpy:
                    numpy.random.seed(seed % 2**32)
            try:
                yield
            finally:
                random.setstate(pythons)
                if numpy:
                    numpy.random.set_state(numpys)


def build_layer(
    layer: Layer, index: int, seeds: LayerSeeds, device: torch.device | str | None = None
) -> nn.Module | Callable[[Any], Any]:
    """The module of a spec, built on `device` under the seed of `index`; a module or a
    callable is returned as it is.
    """
    if not isinstance(layer, LayerSpec):
        return layer
    with seeds.of(index):
        if device is None:
            return layer.build()
        with torch.device(device):
            return layer.build()


class StageLayers(nn.Module):
    """The layers that one rank holds: of one stage, or of several chunks of an
    interleaved order.

    Args:
        layers: all layers of the model.
        ranges: (start, stop) of each chunk that the rank holds; a chunk may be empty.
        tied: the keys of tied layers. The first layer of a key seeds the shared module
            on each stage that holds it.
        seeds: the seeds of the layers.
        device: where the layers are built, "meta" too; the current one if it is None.
        built: layers that exist already, by index, and tied modules by key.

    >>> stage = StageLayers(
    ...     [LayerSpec(nn.Linear, 2, 2), torch.relu, LayerSpec(nn.Linear, 2, 1)], [(1, 3)], {}
    ... )
    >>> [name for name, _ in stage.named_parameters()], stage(torch.ones(1, 2)).shape
    (['2.weight', '2.bias'], torch.Size([1, 1]))
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        ranges: Sequence[tuple[int, int]],
        tied: Mapping[str, Tied],
        seeds: LayerSeeds = LayerSeeds(),
        *,
        device: torch.device | str | None = None,
        built: Mapping[int | str, nn.Module] = {},
    ) -> None:
        super().__init__()
        self.ranges = tuple(ranges)
        self._tied = dict(tied)
        self._calls = dict[int, Callable[[Any], Any]]()
        self.tied_modules = nn.ModuleDict()
        for index in (index for start, stop in self.ranges for index in range(start, stop)):
            layer = layers[index]
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    first = tied[layer.key].indices[0]
                    made = (
                        built[layer.key]
                        if layer.key in built
                        else build_layer(layers[first], first, seeds, device)
                    )
                    assert isinstance(made, nn.Module)
                    self.tied_modules[layer.key] = made
                module = self.tied_modules[layer.key]
                self._calls[index] = (
                    module if layer.forward_fn is None else partial(layer.forward_fn, module)
                )
            else:
                made = built[index] if index in built else build_layer(layer, index, seeds, device)
                if isinstance(made, nn.Module):
                    self.add_module(str(index), made)
                self._calls[index] = made

    def calls(self, start: int, stop: int) -> tuple[tuple[int, Callable[[Any], Any]], ...]:
        """The layers from `start` to `stop` - 1, with their global indices, as
        functions of one argument.
        """
        return tuple([(index, self._calls[index]) for index in range(start, stop)])

    def shared_names(self, key: str) -> tuple[str, ...]:
        """The full names of the parameters that the layers of a key share; () if this
        rank holds none of these layers.
        """
        if key not in self.tied_modules:
            return ()
        return tuple(f"tied_modules.{key}.{name}" for name in self._tied[key].weights)

    def forward(self, inputs: Any) -> Any:
        """Runs the layers of all its ranges in turn: the whole model, if the rank holds
        all layers.
        """
        for start, stop in self.ranges:
            for _, call in self.calls(start, stop):
                inputs = call(inputs)
        return inputs
