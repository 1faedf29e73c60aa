"""Quantizers, masks and schedules as functions of tensors; n is the number of updates
so far, an int or a 0-d int64 tensor.

With an int, a step that is off costs nothing. With a tensor, both sides are computed,
and a graph needs no new capture when n passes an offset: the numbers are the same.

Shape letters: N elements, G groups, K elements of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fzero.optim.rounding import hashed

Number = int | Tensor

__all__ = [
    "Number",
    "affine",
    "as_numbers",
    "binary",
    "bits_at",
    "choose",
    "quantize",
    "share_at",
    "straight_through",
    "ternary",
    "top_share",
    "uniform_noise",
]  # fmt: skip


def choose(is_on: bool | Tensor, on: Callable[[], Tensor], off: Tensor) -> Tensor:
    """`on()` where `is_on`, else `off`; an `is_on` of Python decides without computing
    the other.
    """
    if isinstance(is_on, Tensor):
        return torch.where(is_on, on(), off)
    return on() if is_on else off


def straight_through(value: Tensor, source: Tensor) -> Tensor:
    """`value`, whose gradient goes to `source` unchanged."""
    if not torch.is_grad_enabled():
        return value
    seen = source.clone()  # its derivative is the identity, whatever is written to it below
    with torch.no_grad():
        return seen.copy_(value)


# --- schedules ------------------------------------------------------------------------------------


def bits_at(num_after: Number, start: int, target: int, period: int) -> Number:
    """The bits after `num_after` updates since the offset: one is lost at the period,
    then at each doubled one.

    >>> [bits_at(q, 8, 4, 2) for q in (1, 2, 3, 4, 7, 8, 15, 16, 99)]
    [8, 7, 7, 6, 6, 5, 5, 4, 4]
    """
    bits: Number = start
    for lost in range(start - target):
        reached = num_after >= period * 2**lost
        bits = bits - (reached.to(torch.int64) if isinstance(reached, Tensor) else int(reached))
    return bits


def share_at(
    num_after: Number, start: int, target: int, period: int, ratio: float
) -> float | Tensor:
    """The share of the unquantized weight: it falls from 1 by `ratio` in each update,
    and is 1 again at each loss of a bit.

    >>> [share_at(q, 8, 7, 2, 0.25) for q in (0, 1, 2, 3, 5, 9)]
    [1.0, 0.75, 1.0, 0.75, 0.25, 0.0]
    """
    since: Number = num_after
    for lost in range(start - target):
        begin = period * 2**lost
        if isinstance(num_after, Tensor):
            since = torch.where(num_after >= begin, num_after - begin, since)
        elif num_after >= begin:
            since = num_after - begin
    if isinstance(since, Tensor):
        return (1.0 - since.to(torch.float64) * ratio).clamp(min=0.0)
    return max(1.0 - since * ratio, 0.0)


# --- quantizers -----------------------------------------------------------------------------------


def quantize(
    x: Tensor,
    bits: Number,
    num_groups: int,
    *,
    symmetric: bool,
    bounds: tuple[int, int] | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """The nearest of at most 2^bits values, chosen for each of `num_groups` equal
    pieces of `x`; of the same dtype and shape.

    From 3 bits on the values are evenly spaced; 2 bits have -a, 0, a, and 1 bit has -a,
    a. They are computed in fp32 or wider. A piece whose elements are all the same keeps
    them.

    Args:
        bounds: the least and the most bits, where `bits` is a tensor.
        noise: is added before rounding (N).
    """
    if not x.numel():
        return x
    wide_GK = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(num_groups, -1)
    least, most = (
        bounds if bounds is not None and isinstance(bits, Tensor) else (int(bits), int(bits))
    )
    noise_GK = None if noise is None else noise.reshape(num_groups, -1)
    values: Tensor | None = None
    for few, formula in ((1, binary), (2, ternary)):
        if least <= few <= most:
            found = formula(wide_GK)
            values = (
                found
                if values is None
                else torch.where(torch.as_tensor(bits >= few, device=x.device), found, values)
            )
    if most >= 3:
        low, high = wide_GK.amin(-1, keepdim=True), wide_GK.amax(-1, keepdim=True)
        top, bottom = (torch.maximum(-low, high), None) if symmetric else (high, low)
        at_least_3 = bits.clamp(min=3) if isinstance(bits, Tensor) else bits
        found = affine(wide_GK, at_least_3, top, bottom, noise_GK)
        values = (
            found
            if values is None
            else torch.where(torch.as_tensor(bits >= 3, device=x.device), found, values)
        )
    assert values is not None
    return values.reshape(x.shape).to(x.dtype)


def affine(
    x_GK: Tensor, bits: Number, top: Tensor, bottom: Tensor | None, noise: Tensor | None = None
) -> Tensor:
    """Evenly spaced values between -top and top, or with `bottom` between that and top;
    where these are equal, `x_GK` itself.
    """
    levels: float | Tensor
    if isinstance(bits, Tensor):
        levels = torch.bitwise_left_shift(torch.ones_like(bits), bits).to(x_GK.device, x_GK.dtype)
    else:
        levels = float(2**bits)
    # a power of two: the product is exact
    scale = top * (2 / levels) if bottom is None else (top - bottom) / levels
    is_flat = scale == 0
    scale.add_(is_flat)  # 1 where it was 0
    if bottom is None:
        values, first, last = x_GK / scale, -levels / 2, levels / 2 - 1
    else:
        bottom = torch.where(is_flat, bottom, (bottom / scale).round() * scale)
        values, first, last = (x_GK - bottom).div_(scale), 0.0 * levels, levels - 1
    if noise is not None:
        values.add_(noise)
    # In place: memory for each intermediate value would cost more than the arithmetic.
    values.round_().clamp_(first, last).mul_(scale)  # type: ignore[arg-type]
    return values if bottom is None else values.add_(bottom)


def ternary(x_GK: Tensor) -> Tensor:
    """-a, 0 or a: elements above 0.7 times the mean size are kept, and a is the mean
    size of these.
    """
    size = x_GK.abs()
    # 1 or 0 in place: kernels that write bools and read them again are ten times slower.
    kept = size.clone().gt_(0.7 * size.mean(-1, keepdim=True))
    mean = size.mul_(kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
    return kept.mul_(x_GK.sign()).mul_(mean)


def binary(x_GK: Tensor) -> Tensor:
    """-a or a, where a is the mean size; 0 becomes a."""
    size = x_GK.abs()
    mean = size.mean(-1, keepdim=True)
    return size.eq_(x_GK).sub_(0.5).mul_(2 * mean)  # ½ where x ≥ 0, else -½


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of bools as 0 and 1; kernels convert bytes many times faster than bools."""
    return mask.view(torch.uint8).to(dtype)


def uniform_noise(x: Tensor, salt: int, n: Number) -> Tensor:
    """Numbers from [-½, ½) by the element's place, a salt and n: the same on every
    rank, in every stage and in each gather.
    """
    key = hashed(n + torch.tensor(salt, dtype=torch.int64, device=x.device))
    places = torch.arange(x.numel(), device=x.device)
    bits = hashed((hashed(places) + key) & 0xFFFFFFFF) >> 8  # 24 bits, which fp32 holds
    return (bits.to(torch.float32) * 2.0**-24 - 0.5).reshape(x.shape)


# --- masks ----------------------------------------------------------------------------------------

SORTED_AT_MOST = 1024
"""Up to so many scores a sort is faster than a selection (on a CPU), which takes more
operators.
"""


def top_share(scores: Tensor, ratio: float) -> Tensor:
    """Whether each element is among the ⌈ratio · count⌉ largest (bool); of equal ones
    those that come first are kept.

    >>> top_share(torch.tensor([3.0, 1.0, 3.0, 3.0]), 0.5)
    tensor([ True, False,  True, False])
    """
    flat_N = scores.detach().reshape(-1)
    count = flat_N.numel()
    num_kept = math.ceil(ratio * count)
    if num_kept == count:
        return torch.ones_like(scores, dtype=torch.bool)
    if count <= SORTED_AT_MOST:
        first = flat_N.sort(descending=True, stable=True).indices[:num_kept]
        return (
            torch.zeros_like(flat_N, dtype=torch.bool).scatter(0, first, True).reshape(scores.shape)
        )
    least = torch.kthvalue(flat_N, count - num_kept + 1).values
    above, equal = flat_N > least, flat_N == least
    room = num_kept - above.sum()
    kept_N = above | (equal & (equal.cumsum(0) <= room))
    return kept_N.reshape(scores.shape)


def sizes_of(weight: Tensor, dims: Sequence[int]) -> Tensor:
    """The L1 norm of each part of a weight, summed over `dims`; without dims, of each
    element.
    """
    size = weight.detach().abs()
    return size.sum(dim=list(dims), keepdim=True) if dims else size
