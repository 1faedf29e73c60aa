"""`attend`: attention over a sequence whose tokens are divided among ranks.

1. An all-to-all sends to each rank its share of the heads: (tokens / S, all heads)
   becomes (all tokens, heads / S).
2. Each rank attends with its heads, over all tokens.
3. The reverse all-to-all returns to each rank its tokens, with all heads.

The derivative of an all-to-all is an all-to-all, so the backward sends as much again
(arXiv 2309.14509, §3).

Shape letters: S ranks along the axis, B samples, H heads, N = H / S, T tokens of a rank,
L = S·T tokens, D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fzero.comms.primitives import Axis, all_gather, all_to_all
from fzero.comms.records import Label, Phase

SWAP = Label("heads", phase="forward")
_attend = F.scaled_dot_product_attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    axis: Axis | Numbered,
    length: int | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` over the tokens of all ranks of `axis`.

    *Collective:* every rank of `axis`. It sends (S-1)/S of the elements of query, key
    and value in one all-to-all and (S-1)/S of the result in another, and as much again
    in the backward. Key and value heads are repeated first where S does not divide them.

    Args:
        query: (B, H, T, D).
        key, value: (B, K, T, D); with `enable_gqa` K divides H.
        attn_mask: of the whole sequence, broadcastable to (B, H, L, L); or one that
            depends on the keys alone, (…, 1, T), of this rank's keys, also with
            `is_causal`.
        length: the tokens of the sequence without padding; the last L - length keys are
            left out.
        axis: the ranks, which hold the tokens in rank order.

    Returns:
        (B, H, T, D): the result for this rank's tokens.

    Raises:
        ValueError: S does not divide the heads, queries and keys differ in number, or
            the mask has another size.
    """
    if axis.size == 1:
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.dim() != 4:
        raise ValueError(
            f"ulysses: attention must have queries (samples, heads, tokens, width), got shape "
            f"{tuple(query.shape)}; give them these dimensions"
        )
    _check(query, key, axis.size)
    num_tokens = query.shape[-2] * axis.size
    length = num_tokens if length is None else length
    mask = None
    if attn_mask is not None:
        mask = _whole_mask(attn_mask, query, num_tokens, length, axis)
    key, value = (_repeated(x, query.shape[1], axis.size) for x in (key, value))
    query, key, value = to_heads((query, key, value), axis)
    if length < num_tokens:  # also where causal: padding stands at the end
        key, value = key[:, :, :length], value[:, :, :length]
    how: dict[str, Any] = {"is_causal": is_causal and mask is None}
    if mask is not None:
        if is_causal:  # of a mask of keys alone; the function takes one of both
            before = mask.new_ones(num_tokens, key.shape[-2], dtype=torch.bool).tril()
            is_bool = mask.dtype == torch.bool
            mask = mask & before if is_bool else mask.masked_fill(~before, -math.inf)
        how["attn_mask"] = mask
    if dropout_p:
        how["dropout_p"] = dropout_p
    if scale is not None:
        how["scale"] = scale
    if query.shape[1] != key.shape[1]:
        how["enable_gqa"] = True
    return to_tokens(_attend(query, key, value, **how), axis)


def to_heads(xs: tuple[Tensor, ...], axis: Axis | Numbered) -> tuple[Tensor, ...]:
    """Tokens for heads: each (B, H, T, D) becomes (B, N, L, D), all in one all-to-all if
    they have one dtype.
    """
    if len({x.dtype for x in xs}) > 1:
        return tuple(to_heads((x,), axis)[0] for x in xs)
    size = axis.size
    parts = [rearrange(x, "b (s n) t d -> s b n t d", s=size) for x in xs]
    joined = torch.cat([part.reshape(size, -1) for part in parts], 1)
    arrived = _swapped(joined.view(-1), axis).view(size, -1)
    rows = torch.split(arrived, [part.numel() // size for part in parts], 1)
    return tuple(
        rearrange(row.reshape(part.shape), "s b n t d -> b n (s t) d")
        for row, part in zip(rows, parts, strict=True)
    )


def to_tokens(x: Tensor, axis: Axis | Numbered) -> Tensor:
    """Heads for tokens: (B, N, L, D) becomes (B, H, T, D)."""
    part = rearrange(x, "b n (s t) d -> s b n t d", s=axis.size)
    arrived = _swapped(part.reshape(-1), axis).view(part.shape)
    own: Tensor = rearrange(arrived, "s b n t d -> b (s n) t d")
    return own


def _check(query: Tensor, key: Tensor, size: int) -> None:
    num_heads, num_keys = query.shape[1], key.shape[1]
    if num_heads % size:
        fits = ", ".join(str(n) for n in range(2, num_heads + 1) if num_heads % n == 0) or "none"
        raise ValueError(
            f"ulysses: the {size} ranks of the axis must divide the heads of attention, got "
            f"{num_heads} heads; take a number of ranks that does ({fits}). (A ring exchange, "
            f"which needs no such divisor, is not offered: it sends keys and values S - 1 times, "
            f"and needs a kernel that returns the sums of its exponentials)"
        )
    if num_heads % num_keys:
        raise ValueError(
            f"ulysses: the {num_keys} heads of keys and values must divide the {num_heads} heads "
            f"of queries, got {num_heads} % {num_keys} = {num_heads % num_keys}; change the heads"
        )
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"ulysses: attention must have as many keys as queries on a rank, because both are "
            f"tokens of the divided sequence, got {key.shape[-2]} keys and {query.shape[-2]} "
            f"queries; leave attention to anything else (cross attention, a cache) to a model "
            f"whose sequences are not divided"
        )


def _repeated(x: Tensor, num_heads: int, size: int) -> Tensor:
    """The heads of keys or values, as many times as several ranks need them: (B, K, T,
    D) → (B, a multiple of S, T, D).
    """
    num_keys = x.shape[1]
    if num_keys % size == 0:
        return x
    # one head for each rank if no rank needs two, else one for each query
    num = size if size % num_keys == 0 else num_heads
    return x.repeat_interleave(num // num_keys, dim=1)


def _whole_mask(
    mask: Tensor, query: Tensor, num_tokens: int, length: int, axis: Axis | Numbered
) -> Tensor:
    """The mask of this rank's heads over the whole sequence."""
    num_heads, num_own = query.shape[1], query.shape[-2]
    num_rows = mask.shape[-2] if mask.dim() > 1 else 1
    if mask.shape[-1] == num_own and num_rows == 1:
        mask = of_all_keys(mask, axis)
    elif mask.shape[-1] not in (num_tokens, length) or num_rows not in (1, num_tokens, length):
        raise ValueError(
            f"ulysses: attn_mask must be of the whole sequence of {length} tokens, or depend on "
            f"the keys alone, got shape {tuple(mask.shape)} where a rank has {num_own} tokens; "
            f"pass is_causal=True, or a mask (…, {length}, {length}) that does not depend on the "
            f"size of the input"
        )
    mask = mask[..., :length]
    if num_rows == length < num_tokens:  # rows of padding, whose results nobody reads
        mask = F.pad(mask, (0, 0, 0, num_tokens - length), value=mask.dtype == torch.bool)
    if mask.dim() > 2 and mask.shape[-3] == num_heads > 1:
        mask = rearrange(mask, "... (s n) q k -> s ... n q k", s=axis.size)[axis.rank]
    return mask


def of_all_keys(mask: Tensor, axis: Axis | Numbered) -> Tensor:
    """A mask of this rank's keys, for those of all ranks."""
    if mask.dtype == torch.bool:
        return of_all_keys(mask.to(torch.uint8), axis).to(torch.bool)
    if isinstance(axis, Numbered):
        rows = mask.expand(axis.size, *mask.shape).reshape(-1)
        return torch.cat([*_swapped(rows, axis).view(axis.size, *mask.shape)], -1)
    return all_gather(mask, axis, label=SWAP)


# --- in a block that is compiled alone -------------------------------------------------------------


class Numbered(NamedTuple):
    """An axis in the graph of a compiled block: numbers, on which the graph is guarded."""

    size: int
    rank: int
    number: int


_AXES: list[Any] = []
"""The axes that graphs name by their index."""


def number_of(axis: Axis) -> int:
    """The index by which a graph names an axis."""
    if axis not in _AXES:
        _AXES.append(axis)
    return _AXES.index(axis)


@torch.library.custom_op("fzero::swap", mutates_args=())
def _swap(x: Tensor, number: int, label: str) -> Tensor:
    """The all-to-all of `_AXES[number]` as one operator, which runs as in an eager step:
    it is observed, and reports hangs.
    """
    phase: Phase = "backward" if label == "backward" else "forward"
    return all_to_all(x.contiguous(), _AXES[number], label=replace(SWAP, phase=phase)).clone()


@_swap.register_fake
def _(x: Tensor, number: int, label: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    ctx.number = inputs[1]


def _swap_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _swap(grad, ctx.number, "backward"), None, None


_swap.register_autograd(_swap_back, setup_context=_keep)


def _swapped(x: Tensor, axis: Axis | Numbered) -> Tensor:
    """Part r of `x` goes to rank r."""
    if isinstance(axis, Numbered):
        return _swap(x, axis.number, "forward")
    return all_to_all(x, axis, label=SWAP)


def num_sent(shape: tuple[int, ...], num_keys: int, size: int) -> int:
    """The elements that a rank sends in the forward of one attention; the backward sends
    as many.

    Args:
        shape: (B, H, T, D) of a rank's queries.
        num_keys: the heads of keys, and of values.

    >>> num_sent((1, 8, 16, 4), num_keys=8, size=2)
    1024
    """
    num_samples, num_heads, num_tokens, width = shape
    if num_keys % size:
        num_keys = size if size % num_keys == 0 else num_heads
    heads = 2 * num_heads + 2 * num_keys
    return math.prod((num_samples, heads, num_tokens, width)) * (size - 1) // size
