"""The techniques that a plan applies to a parameter or to a module's input: frozen
values with pure functions.

Those of parameters are views (`fzero.model.transforms.ParamView`). `tensors` has masks
and scores by their full names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fzero.compression.formulas import (
    Number,
    affine,
    as_numbers,
    bits_at,
    choose,
    quantize,
    share_at,
    sizes_of,
    straight_through,
    top_share,
    uniform_noise,
)
from fzero.model.transforms import Pulled, PulledGrad, Tensors

PruningKind = Literal["sparse", "row", "head", "channel"]

MOMENTUM = 0.95
"""The weight of the former range in a static range of activations."""


@dataclass(frozen=True, slots=True)
class Quantize:
    """A weight with few bits, from the update `offset` on.

    Attributes:
        start_bits, target_bits, period: see `formulas.bits_at`; equal bits do not fall.
        num_groups: equal pieces with a scale of their own.
        change_ratio: mixes the weight with its quantized value (`formulas.share_at`);
            None does not.
        salt: the salt of the noise of stochastic rounding; None rounds to the nearest.
    """

    target_bits: int
    start_bits: int
    period: int = 1
    offset: int = 0
    num_groups: int = 1
    symmetric: bool = True
    change_ratio: float | None = None
    salt: int | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """See `ParamView`."""
        return ()

    @property
    def trains(self) -> tuple[str, ...]:
        """See `ParamView`."""
        return ()

    @property
    def needs_input(self) -> bool:
        """See `ParamView`."""
        return False

    def bits(self, n: Number) -> Number:
        """The bits of a forward with n updates behind it, n ≥ offset."""
        return bits_at(n - self.offset, self.start_bits, self.target_bits, self.period)

    def quantized(self, x: Tensor, n: Number) -> Tensor:
        """The quantized weight, whatever the offset."""
        q = n - self.offset
        if isinstance(q, Tensor):
            q = q.clamp(min=0)
        bits: Number = (
            self.target_bits if self.start_bits == self.target_bits else self.bits(self.offset + q)
        )
        values = quantize(
            x,
            bits,
            self.num_groups,
            symmetric=self.symmetric,
            bounds=(self.target_bits, self.start_bits),
            noise=None if self.salt is None else uniform_noise(x, self.salt, n),
        )
        if self.change_ratio is None:
            return values
        share = share_at(q, self.start_bits, self.target_bits, self.period, self.change_ratio)
        rest = 1 - share
        if isinstance(share, Tensor) and isinstance(rest, Tensor):
            share, rest = share.to(x.device, x.dtype), rest.to(x.device, x.dtype)
        return x * share + values * rest

    def shared(self, x: Tensor, tensors: Tensors) -> Tensors:
        """See `ParamView`."""
        return {}

    def value(self, x: Tensor, tensors: Tensors, n: Number) -> Tensor:
        """See `ParamView`."""
        detached = x.detach()
        return straight_through(
            choose(n >= self.offset, lambda: self.quantized(detached, n), detached), x
        )

    def pulled(self, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number) -> Pulled:
        """See `ParamView`: the gradient passes through."""
        return Pulled(grad)

    def __str__(self) -> str:
        bits = (
            f"{self.target_bits}"
            if self.start_bits == self.target_bits
            else f"{self.start_bits}→{self.target_bits}"
        )
        falls = "" if self.start_bits == self.target_bits else f" (period {self.period}, doubling)"
        kind = "symmetric" if self.symmetric else "asymmetric"
        extras = ", stochastic" * (self.salt is not None) + ", mixed" * (
            self.change_ratio is not None
        )
        return (
            f"{bits} bits{falls}, {kind}, {self.num_groups} groups{extras}, from update "
            f"{self.offset}"
        )


@dataclass(frozen=True, slots=True)
class Mask:
    """A weight or bias times a mask of 0 and 1, from the update `offset` on.

    Attributes:
        kind: the parts that are kept or not.
        ratio: the share that is kept.
        source: the full name of the mask (a module buffer), or of the scores (a
            parameter) whose largest make it.
        trained: whether `source` are scores.
        of_bias: whether it is applied to the bias.
    """

    kind: PruningKind
    ratio: float
    source: str
    trained: bool
    offset: int = 0
    of_bias: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """See `ParamView`."""
        return (self.source,)

    @property
    def trains(self) -> tuple[str, ...]:
        """See `ParamView`: the scores, if there are some."""
        return (self.source,) if self.trained else ()

    @property
    def needs_input(self) -> bool:
        """See `ParamView`."""
        return self.trained

    def mask(self, tensors: Tensors) -> Tensor:
        """The mask in the shape of its source (bool)."""
        source = tensors[self.source]
        return top_share(source, self.ratio) if self.trained else source

    @property
    def _made(self) -> str:
        """The name under which `tensors` may have what `_make` returns."""
        return f"{self.source}, mask"

    def shared(self, x: Tensor, tensors: Tensors) -> Tensors:
        """See `ParamView`: the mask against x."""
        return {self._made: self._make(x, tensors)}

    def _make(self, x: Tensor, tensors: Tensors) -> Tensor:
        """The mask against the weight: bools, one for each element, or numbers of the
        dtype of `x`, weight or bias.
        """
        mask = self.mask(tensors)
        if self.kind == "sparse":
            return mask
        return (self.over(x, mask) if self.kind == "head" else mask).to(x.dtype)

    def factor(self, x: Tensor, tensors: Tensors) -> Tensor:
        """The mask against `x`: the one in `tensors`, or a new one."""
        made = tensors.get(self._made)
        if made is None:
            made = self._make(x, tensors)
        return made.reshape(-1) if self.of_bias else made

    def over(self, x: Tensor, mask: Tensor) -> Tensor:
        """A mask (or scores) in a shape that broadcasts against `x`."""
        if self.of_bias:
            return mask.reshape(-1)
        if self.kind == "head":  # each head is a range of columns
            heads = mask.reshape(-1, 1)
            return heads.expand(heads.shape[0], x.shape[1] // heads.shape[0]).reshape(1, -1)
        return mask

    def value(self, x: Tensor, tensors: Tensors, n: Number) -> Tensor:
        """See `ParamView`."""
        is_on = n >= self.offset
        if is_on is False:
            return x
        if is_on is True and not torch.is_grad_enabled():
            return masked(x, self.factor(x, tensors))
        mask = self.mask(tensors)
        if isinstance(is_on, Tensor):
            mask = mask | ~is_on
        if not (self.trained and torch.is_grad_enabled()):
            return masked(x, self.over(x, mask))
        scores = tensors[self.source].to(x.dtype)
        scores = scores if is_on is True else torch.where(is_on, scores, 0.0)
        return x * self.over(x, straight_through(mask.to(x.dtype), scores))

    def pulled(self, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number) -> Pulled:
        """See `ParamView`: what is masked gets no gradient; a score gets that of its
        mask.
        """
        of_seen = grad.grad if grad.mask is None else masked(grad.grad, grad.mask)
        found = PulledGrad(of_seen, self.factor(of_seen, tensors))
        if not self.trained:
            return Pulled(found)
        assert x is not None
        scores = tensors[self.source]
        return Pulled(found, {self.source: self._summed(of_seen * x, scores).to(scores.dtype)})

    def _summed(self, x: Tensor, scores: Tensor) -> Tensor:
        """The sums of `x` over the elements of each part, in the shape of the scores."""
        if self.kind == "sparse" or self.of_bias:
            return x.reshape(scores.shape)
        if self.kind == "head":
            return x.sum(0).reshape(scores.numel(), -1).sum(-1).reshape(scores.shape)
        return x.sum(dim=tuple(range(1, x.dim())), keepdim=True)

    def first(self, weight: Tensor) -> Tensor:
        """The mask of `l1` from a weight: that of the largest parts."""
        dims = {
            "sparse": (),
            "row": tuple(range(1, weight.dim())),
            "channel": tuple(range(1, weight.dim())),
        }
        return top_share(sizes_of(weight, dims[self.kind]), self.ratio)

    def __str__(self) -> str:
        how = "scores" if self.trained else "l1"
        return f"{self.kind} mask, keeps {self.ratio:g} by {how}, from update {self.offset}"


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` times a mask of bools or numbers, which broadcasts."""
    if mask.dtype == torch.bool and mask.shape == x.shape and not torch.is_grad_enabled():
        return as_numbers(mask, x.dtype).mul_(x)
    return x * mask.to(x.dtype)


Technique = Quantize | Mask


@dataclass(frozen=True, slots=True)
class QuantizeInput:
    """The input of a module with few bits, from the update `offset` on.

    Attributes:
        range_of: the module's buffer with a static range (min, max); None takes the
            range of each token, or image.
    """

    bits: int
    symmetric: bool
    offset: int = 0
    per_image: bool = False
    range_of: str | None = None

    def seen(self, x: Tensor, bounds: Tensor | None, n: Number) -> Tensor:
        """The quantized input. `bounds`: the static range (min, max)."""
        return straight_through(
            choose(n >= self.offset, lambda: self._value(x.detach(), bounds), x.detach()), x
        )

    def _value(self, x: Tensor, bounds: Tensor | None) -> Tensor:
        if bounds is None:
            num_groups = x.shape[0] if self.per_image else x.numel() // x.shape[-1]
            return quantize(x, self.bits, num_groups, symmetric=self.symmetric)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        low, high = bounds.to(wide.dtype)
        if self.symmetric:
            return affine(wide, self.bits, torch.maximum(low.abs(), high), None).to(x.dtype)
        return affine(wide, self.bits, high, low).to(x.dtype)

    def moved(self, bounds: Tensor, x: Tensor) -> Tensor:
        """A static range after an input: a running mean of the least and the largest,
        which begins with the first input's.
        """
        now = torch.stack([x.detach().amin(), x.detach().amax()]).to(bounds.dtype)
        before = torch.where(bounds[0] == bounds[1], now, bounds)
        return before * MOMENTUM + now * (1 - MOMENTUM)

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        ranges = "each token" if self.range_of is None and not self.per_image else "each image"
        ranges = self.range_of or ranges
        return f"{self.bits} bits, {kind}, range of {ranges}, from update {self.offset}"
