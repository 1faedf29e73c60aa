"""What does a gather or a reduce-scatter send? Collectives as values that compose.

A wire is a pair of pure functions over the ranks of an axis, with a state of their own that goes in and comes out:

    exact()                       the numbers as they are
    coded(codec)                  what a codec makes of them: fewer bytes, and an error within its bound
    error_feedback(coded(codec))  the same, and what one round lost is added to what the next one sends

With `coded(quantize(8))` for gathers and `coded(quantize(4))` for reductions that is ZeRO++ (Wang et al. 2023, qwZ and qgZ);
with error feedback on the reductions LoCo (Xie et al. 2024). Every rank decodes its own part like the others', so
that all of them hold the same numbers. Sums are made in rank order, in fp32 or wider.

Shape letters: P padded elements = W·S, S elements of a shard, W ranks; on a `Sim` axis a leading dimension of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fzero import collectives
from fzero.codecs import Codec
from fzero.collectives import Axis

State = Any


class Wire(NamedTuple):
    """How shards are gathered and summands reduced.

    Attributes:
        name: what a table shows.
        init: the state for what one rank sends in a round: a tensor like that; None where there is none.
        gather: this rank's shard (S), the axis and the state → the shards of all ranks in rank order (P), and the new state.
        reduce_scatter: this rank's summand (P), … → this rank's shard of the sum (S), and the new state.
        lossy: the numbers that arrive where these are sent, (…, N) → (…, N).
    """

    name: str
    init: Callable[[Tensor], State]
    gather: Callable[[Tensor, Axis, State], tuple[Tensor, State]]
    reduce_scatter: Callable[[Tensor, Axis, State], tuple[Tensor, State]]
    lossy: Callable[[Tensor], Tensor]


def exact() -> Wire:
    """The numbers as they are. *Collective:* each function sends `(W-1)/W · P` elements."""

    def gather(shard: Tensor, axis: Axis, state: State) -> tuple[Tensor, State]:
        return collectives.all_gather(shard, axis), state

    def reduce_scatter(full: Tensor, axis: Axis, state: State) -> tuple[Tensor, State]:
        return _sum(collectives.all_to_all(_rows(full, axis), axis)).to(full.dtype), state

    return Wire("exact", lambda like: None, gather, reduce_scatter, lambda x: x)


def coded(codec: Codec) -> Wire:
    """What `codec` makes of the numbers. *Collective:* each function sends `(W-1) · codec.nbytes(S)` bytes."""

    def lossy(x: Tensor) -> Tensor:
        return codec.decode(codec.encode(x), x.shape[-1], x.dtype)

    def gather(shard: Tensor, axis: Axis, state: State) -> tuple[Tensor, State]:
        wire = collectives.all_gather(codec.encode(shard), axis)
        rows = rearrange(wire, "... (rank nbytes) -> ... rank nbytes", rank=axis.size)
        return codec.decode(rows, shard.shape[-1], shard.dtype).flatten(-2), state

    def reduce_scatter(full: Tensor, axis: Axis, state: State) -> tuple[Tensor, State]:
        arrived = collectives.all_to_all(codec.encode(_rows(full, axis)), axis)
        wide = torch.promote_types(full.dtype, torch.float32)
        return _sum(codec.decode(arrived, full.shape[-1] // axis.size, wide)).to(full.dtype), state

    return Wire(codec.name, lambda like: None, gather, reduce_scatter, lossy)


def error_feedback(wire: Wire, *, decay: float = 0.0) -> Wire:
    """What one round lost is added to what this rank sends in the next (Seide et al. 2014; LoCo with `decay` 0.8).

    The state is the error so far, as long as what is sent. An error that is not finite is forgotten.

    Args:
        wire: without a state of its own.
        decay: the share of the old error that stays beside the new one: error ← decay · error + (1 - decay) · lost.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"error_feedback: decay must be in [0, 1), got {decay}; 0 keeps the last round's error only")

    def corrected(x: Tensor, error: Tensor, parts: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        sent = x + error.to(x.dtype)
        lost = (sent - wire.lossy(parts(sent)).reshape(sent.shape)).to(error.dtype)
        error = decay * error + (1 - decay) * lost
        return sent, torch.where(error.isfinite(), error, 0.0)

    def gather(shard: Tensor, axis: Axis, error: State) -> tuple[Tensor, State]:
        sent, error = corrected(shard, error, lambda x: x)
        return wire.gather(sent, axis, None)[0], error

    def reduce_scatter(full: Tensor, axis: Axis, error: State) -> tuple[Tensor, State]:
        sent, error = corrected(full, error, lambda x: _rows(x, axis))
        return wire.reduce_scatter(sent, axis, None)[0], error

    def init(like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))

    return Wire(f"error_feedback({wire.name})", init, gather, reduce_scatter, wire.lossy)


def _rows(full: Tensor, axis: Axis) -> Tensor:
    """What goes to each rank: (…, P) → (…, W, S)."""
    rows: Tensor = rearrange(full, "... (rank shard) -> ... rank shard", rank=axis.size)
    return rows


def _sum(rows: Tensor) -> Tensor:
    """The sum over (…, W, S) in rank order."""
    total = rows[..., 0, :]
    for rank in range(1, rows.shape[-2]):
        total = total + rows[..., rank, :]
    return total
