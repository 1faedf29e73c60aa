"""`lora`: frozen weights, each with a product of two thin trained matrices, W +
(α/r)·BA (Hu et al. 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fzero.compression.added import salt_of
from fzero.model.transforms import Changes, Number, Pulled, PulledGrad, Tensors, TransformedStep
from fzero.transforms import matching
from fzero.transforms.matching import Patterns, patterns_of
from fzero.transforms.packing import packed


@dataclass(frozen=True, slots=True)
class LowRank:
    """The view W + scale·BA (see `ParamView`); (BA)ᵀ where a weight's first dimension
    is its input.
    """

    trains: tuple[str, str]  # A and B
    scale: float
    is_transposed: bool
    offset: int = 0
    needs_input: bool = True  # so that `pulled` gets A and B

    @property
    def reads(self) -> tuple[str, str]:
        """See `ParamView`."""
        return self.trains

    def shared(self, x: Tensor, tensors: Tensors) -> Tensors:
        """See `ParamView`."""
        return {}

    def value(self, x: Tensor, tensors: Tensors, n: Number) -> Tensor:
        """See `ParamView`."""
        product = tensors[self.trains[1]] @ tensors[self.trains[0]]
        return x + (product.t() if self.is_transposed else product).reshape(x.shape) * self.scale

    def pulled(self, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number) -> Pulled:
        """See `ParamView`."""
        (a, b), g = (tensors[name] for name in self.trains), grad.whole * self.scale
        g = g.t() if self.is_transposed else g.reshape(b.shape[0], a.shape[1])
        return Pulled(grad, dict(zip(self.trains, (b.t() @ g, g @ a.t()), strict=True)))


@dataclass(frozen=True)
class Lora:
    """The transform of `lora`."""

    patterns: tuple[str, ...]
    rank: int
    alpha: float
    trains: tuple[str, ...]
    bits: Literal[8, 4] | None
    group: int

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It adds `lora_A` and `lora_B` to each module; only
        these and `trains` are trained.
        """
        base = (
            None
            if self.bits is None
            else packed(self.patterns, bits=self.bits, group=self.group)(spec)
        )
        views: dict[str, tuple[LowRank]] = {}
        for name, (module, *_) in matching.weights_of(spec.model, "lora", self.patterns).items():
            rows, columns = matching.shape_of(module)[0], math.prod(matching.shape_of(module)[1:])
            # A kernel's product begins with its inputs, as the weight does: a 1x1 convolution, then
            # a transposed one.
            if (
                is_transposed := matching.is_input_first(module)
                and len(matching.shape_of(module)) == 2
            ):
                rows, columns = columns, rows
            a, b = trained = (
                f"{name.removesuffix('weight')}lora_A",
                f"{name.removesuffix('weight')}lora_B",
            )
            for full, shape in ((a, (self.rank, columns)), (b, (rows, self.rank))):
                like = matching.weight_of(module).new_empty(
                    shape, dtype=matching.float_dtype(module)
                )
                value = like if like.is_meta else first(spec.seed, full, like)
                matching.add_param(module, full[-6:], value, field="lora")
            views[name] = (LowRank(trained, self.alpha / self.rank, is_transposed),)
        added = frozenset(name for (view,) in views.values() for name in view.reads)
        return Changes(
            name="lora",
            text=str(self),
            views={k: (*(base.views[k] if base else ()), *v) for k, v in views.items()},
            added=added | (base.added if base else frozenset()),
            sizes=base.sizes if base else {},
            trains=matching.params_of(spec.model, "lora: trains", self.trains),
            first_value=lambda name, like: first(spec.seed, name, like) if name in added else None,
        )


def first(seed: int, name: str, like: Tensor) -> Tensor:
    """The first value of A or B, by the seed and its name: B begins as zeros, so that
    nothing changes at first.
    """
    value = torch.zeros(like.shape)
    if name.endswith("lora_A"):
        nn.init.kaiming_uniform_(
            value, a=5**0.5, generator=torch.Generator().manual_seed(salt_of(seed, name))
        )
    return value.to("cpu" if like.is_meta else like.device, like.dtype)


def lora(
    pattern: Patterns,
    rank: int = 8,
    alpha: float = 16,
    *,
    trains: Patterns = (),
    bits: Literal[8, 4] | None = None,
    group: int = 64,
) -> Lora:
    """Trains W + (alpha/rank)·BA instead of W. A step trains A, B and `trains`; it
    freezes all other parameters.

    The model's own `requires_grad` neither counts nor changes, but that of A and B
    counts.

    Args:
        pattern: names of modules with a `weight`, with `*` for any part.
        trains: names of further parameters that are trained, with `*` for any part.
        bits: stores W in 8 or 4 bits (`packed`), with a scale for each `group`
            elements; None leaves it as it is.
    """
    if type(rank) is not int or rank < 1:
        raise ValueError(f"lora: rank must be a positive integer, got {rank!r}; pass 8, say")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"lora: alpha must be a positive number, got {alpha!r}; pass 16, say")
    return Lora(
        patterns_of("lora", pattern), rank, alpha, patterns_of("lora: trains", trains), bits, group
    )
