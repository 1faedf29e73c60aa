"""Comm hooks: how a gather or a reduce-scatter sends its numbers, as values that
compose.

A comm hook is a pair of pure functions over the ranks of an axis. Each takes a state
and returns the new one. They *start* to send and return at once, so that compute
overlaps communication. `exact()` sends the numbers unchanged; the hooks that send fewer
bytes are in `fzero.comms.compression`.

Shape letters: P padded elements = W·S, S elements of a shard, W ranks, N elements, B
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fzero.comms import collectives
from fzero.comms.collectives import OTHER, Axis
from fzero.comms.pending import Pending, ended

State = Any


class Sending(NamedTuple):
    """A gather or a reduce-scatter under way."""

    pending: Pending
    state: Callable[[], State]
    """Returns the new state, after `pending` has ended."""

    def wait(self) -> tuple[Tensor, State]:
        """The result and the new state."""
        return self.pending.wait(), self.state()


def completed(x: Tensor, state: State) -> Sending:
    """A collective that has ended already, with its result."""
    return Sending(ended(x, OTHER), lambda: state)


class CommHook(NamedTuple):
    """How shards are gathered and summands reduced.

    Attributes:
        name: shown in tables; the same on all ranks.
        nbytes: (N elements, bytes of each) → B.
        init: makes the state, from a tensor like the one that a rank sends in a round;
            None for a hook without a state. The floating-point leaves of a state have
            the scale of the numbers that are sent.
        start_gather: this rank's shard (S), the axis and the state → the shards of all
            ranks in rank order (P), and the new state. The result may be written into
            `full_P`.
        start_reduce_scatter: this rank's summand (P), … → this rank's shard of the sum
            (S), and the new state. The result may be written into `out_S`; `after` is
            the collective that writes the summand, which must not be read before
            `after` has ended.
        lossy: numbers to send → the numbers that other ranks receive for them, (…, N) →
            (…, N).
    """

    name: str
    nbytes: Callable[[int, int], int]
    init: Callable[[Tensor], State]
    start_gather: Callable[..., Sending]
    start_reduce_scatter: Callable[..., Sending]
    lossy: Callable[[Tensor], Tensor]

    def gather(self, shard: Tensor, axis: Axis, state: State) -> tuple[Tensor, State]:
        """The shards of all ranks in rank order (P), and the new state. *Collective.*"""
        return self.start_gather(shard, axis, state).wait()

    def reduce_scatter(self, full: Tensor, axis: Axis, state: State) -> tuple[Tensor, State]:
        """This rank's shard of the sum (S), and the new state. *Collective.*"""
        return self.start_reduce_scatter(full, axis, state).wait()


def _start_gather(
    shard: Tensor, axis: Axis, state: State, *, full_P: Tensor | None = None, **how: Any
) -> Sending:
    return Sending(
        collectives.start_all_gather(shard.contiguous(), full_P, axis, **how), lambda: state
    )


def _start_reduce_scatter(full: Tensor, axis: Axis, state: State, **how: Any) -> Sending:
    return Sending(collectives.start_reduce_scatter(full.contiguous(), axis, **how), lambda: state)


_EXACT = CommHook(
    "exact",
    lambda numel, itemsize: numel * itemsize,
    lambda like: None,
    _start_gather,
    _start_reduce_scatter,
    lambda x: x,
)


def exact() -> CommHook:
    """Sends numbers unchanged, like a step without comm hooks. *Collective:* each
    function sends `(W-1)/W · P` elements.
    """
    return _EXACT
