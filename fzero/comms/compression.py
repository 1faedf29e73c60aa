"""Comm hooks that send fewer bytes: `compressed`, `error_feedback` and `reset_every`.

`compressed(quantize(8))` for gathers and `compressed(quantize(4))` for reductions are
ZeRO++ (Wang et al. 2023, qwZ and qgZ); with error feedback on the reductions they are
LoCo (Xie et al. 2024). Every rank encodes and decodes its own shard, too, so that all
ranks hold the same numbers. Sums are made in rank order, in fp32 or wider.

Shape letters: P padded elements = W·S, S elements of a shard, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
import torch.fx.traceback
from einops import rearrange
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.codecs import Codec
from fzero.comms.collectives import Axis
from fzero.comms.comm_hooks import CommHook, Sending, State
from fzero.comms.pending import Pending
from fzero.comms.traced import in_order


def compressed(codec: Codec) -> CommHook:
    """Sends numbers encoded by `codec`. *Collective:* each function sends
    `(W-1) · codec.nbytes(S)` bytes.
    """
    if not isinstance(codec, Codec):
        raise ValueError(f"compressed: codec must be a Codec, got {codec!r}; pass quantize(8), say")

    def lossy(x: Tensor) -> Tensor:
        return codec.decode(codec.encode(x), x.shape[-1], x.dtype)

    def start_gather(
        shard: Tensor, axis: Axis, state: State, *, full_P: Tensor | None = None, **how: Any
    ) -> Sending:
        numel, codes = shard.numel(), codec.encode(shard)
        start = partial(collectives.start_all_gather, codes, None, **how)
        pending = _start_coded(start, axis, numel, codec.nbytes(numel))

        def decode(codes: Tensor) -> Tensor:
            decoded = codec.decode(_rows(codes, axis), numel, shard.dtype).flatten()
            return decoded if full_P is None else full_P.copy_(decoded)

        return Sending(pending.then(decode, full_P), lambda: state)

    def start_reduce_scatter(
        full: Tensor,
        axis: Axis,
        state: State,
        *,
        out_S: Tensor | None = None,
        after: Pending | None = None,
        **how: Any,
    ) -> Sending:
        numel = full.numel() // axis.size
        nbytes = codec.nbytes(numel)
        shape = (axis.size, nbytes)
        rows, after = _make_after(
            lambda: codec.encode(_rows(full, axis)), shape, torch.uint8, full, after
        )
        start = partial(collectives.start_all_to_all, rows.contiguous(), after=after, **how)
        pending = _start_coded(start, axis, numel, nbytes)

        def add_up(codes: Tensor) -> Tensor:
            wide = torch.promote_types(full.dtype, torch.float32)
            total = in_order(codec.decode(codes, numel, wide).unbind())
            return total.to(full.dtype) if out_S is None else out_S.copy_(total)

        return Sending(pending.then(add_up, out_S), lambda: state)

    def nbytes_of(numel: int, itemsize: int) -> int:
        return codec.nbytes(numel)

    return CommHook(
        codec.name, nbytes_of, lambda like: None, start_gather, start_reduce_scatter, lossy
    )


def error_feedback(hook: CommHook, *, decay: float = 0.0) -> CommHook:
    """Adds the error of one round to the numbers that this rank sends in the next
    (Seide et al. 2014; LoCo with `decay` 0.8).

    The state is the error so far; it has the shape of the tensor that is sent. An error
    that is not finite becomes 0.

    Args:
        hook: the comm hook to correct; it must have no state.
        decay: the weight of the old error against the new one: error ← decay · error +
            (1 - decay) · lost.
    """
    _check_hook("error_feedback", hook)
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ValueError(
            f"error_feedback: decay must be in [0, 1), got {decay!r}; 0 keeps the last round's "
            f"error only"
        )

    def corrected(
        x: Tensor, error: Tensor, parts: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The tensor to send instead of `x`, in the error's dtype, and the new error."""
        sent = x.to(error.dtype) + error
        lost = sent - hook.lossy(parts(sent)).reshape(sent.shape)
        error = decay * error + (1 - decay) * lost
        return sent, torch.where(error.isfinite(), error, 0.0)

    def start_gather(
        shard: Tensor, axis: Axis, error: State, *, full_P: Tensor | None = None, **how: Any
    ) -> Sending:
        sent, error = corrected(shard, error, lambda x: x)
        pending = hook.start_gather(sent, axis, None, **how).pending
        return Sending(pending.then(_copy_into(full_P, shard.dtype), full_P), lambda: error)

    def start_reduce_scatter(
        full: Tensor,
        axis: Axis,
        error: State,
        *,
        out_S: Tensor | None = None,
        after: Pending | None = None,
        **how: Any,
    ) -> Sending:
        errors: list[Tensor] = []
        # If another stream makes it, in memory of this one, where the next round reads it.
        kept = None if after is None or after.has_ended else torch.empty_like(error)

        def make() -> Tensor:
            sent, new = corrected(full, error, lambda x: _rows(x, axis))
            errors.append(new if kept is None else kept.copy_(new))
            return sent

        sent, after = _make_after(make, full.shape, error.dtype, full, after)
        pending = hook.start_reduce_scatter(sent, axis, None, after=after, **how).pending
        return Sending(pending.then(_copy_into(out_S, full.dtype), out_S), lambda: errors[0])

    def init(like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))

    name = f"error_feedback({hook.name}, {decay})"
    return CommHook(name, hook.nbytes, init, start_gather, start_reduce_scatter, hook.lossy)


def _check_hook(field: str, hook: CommHook) -> None:
    if not isinstance(hook, CommHook):
        raise ValueError(
            f"{field}: comm hook must be a CommHook, got {hook!r}; pass compressed(quantize(4)), "
            f"say"
        )
    if hook.init(torch.empty(2, device="meta")) is not None:
        raise ValueError(
            f"{field}: comm hook must be without a state of its own, got {hook.name}; pass the "
            f"hook inside of it"
        )


class ResetEvery(NamedTuple):
    """The state of a comm hook that is reset every few rounds."""

    state: State
    num_rounds: Tensor
    """0-d int64: rounds made so far."""


def reset_every(hook: CommHook, *, every: int) -> CommHook:
    """A comm hook whose state is reset to that of `init` every `every` rounds (LoCo's
    `reset_T`).
    """
    if not isinstance(hook, CommHook):
        raise ValueError(
            f"reset_every: hook must be a CommHook, got {type(hook).__name__}; pass "
            f"error_feedback(compressed(quantize(4))), say"
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"reset_every: every must be a positive number of rounds, got {every!r}; pass 1024, say"
        )

    def init(like: Tensor) -> ResetEvery:
        return ResetEvery(hook.init(like), torch.zeros((), dtype=torch.int64, device=like.device))

    def present(x: Tensor, state: ResetEvery) -> State:
        is_new = state.num_rounds % every == 0
        return optree.tree_map(
            lambda first, now: torch.where(is_new, first, now), hook.init(x), state.state
        )

    def later(sending: Sending, state: ResetEvery) -> Sending:
        return sending._replace(state=lambda: ResetEvery(sending.state(), state.num_rounds + 1))

    def start_gather(shard: Tensor, axis: Axis, state: State, **how: Any) -> Sending:
        return later(hook.start_gather(shard, axis, present(shard, state), **how), state)

    def start_reduce_scatter(full: Tensor, axis: Axis, state: State, **how: Any) -> Sending:
        return later(hook.start_reduce_scatter(full, axis, present(full, state), **how), state)

    name = f"reset_every({hook.name}, {every})"
    return CommHook(name, hook.nbytes, init, start_gather, start_reduce_scatter, hook.lossy)


def _make_after(
    make: Callable[[], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    like: Tensor,
    after: Pending | None,
) -> tuple[Tensor, Pending | None]:
    """A tensor that is made when `after` has ended (now, if it has), and the collective
    that must end before the tensor may be read."""
    if after is None or after.has_ended:
        return make(), None
    made = like.new_empty(shape, dtype=dtype)
    return made, after.then(lambda _: made.copy_(make()), made)


def _copy_into(out: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that copies a result into `out`, or casts it."""
    return lambda x: x.to(dtype) if out is None else out.copy_(x)


def _start_coded(start: Callable[[Axis], Pending], axis: Axis, before: int, after: int) -> Pending:
    """Starts a collective that is recorded with the number of elements before encoding;
    `before`, `after`: lengths of a row.
    """
    if not isinstance(axis, RankAxis):
        with torch.fx.traceback.annotate({"coded": (before, after)}):
            return start(axis)
    report = axis.observe
    if report is None or before == after:
        return start(axis)
    return start(
        replace(
            axis,
            observe=lambda r: report(r._replace(num_elements=r.num_elements // after * before)),
        )
    )


def _rows(full: Tensor, axis: Axis) -> Tensor:
    """The parts for the ranks: (P) → (W, S)."""
    rows: Tensor = rearrange(full, "(rank shard) -> rank shard", rank=axis.size)
    return rows
