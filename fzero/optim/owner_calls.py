"""`call_owners`: whole matrices of several flat tensors, computed by their owners.

An update that looks at whole matrices is a generator. It yields an `OwnerCall`, and
goes on with the result. So the updates of many flat buffers reach their owners
together: matrices of equal shape are one stack (n, R, C), and each group of equal
shapes is one packed all-to-all to the owners and one back. All groups are sent before
the first is computed, so that transfers run under the products.

Shape letters: n matrices of one shape, R rows, C columns, W ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharding.owners import MatrixMove, OwnedBuffer

Exchange = Callable[[Tensor, list[int], list[int]], Callable[[], Tensor]]
"""(x, elements for each rank, elements from each rank) -> a function that waits, and
returns the elements that have arrived. `x` holds those for rank 0 first, and so on."""

Run = Callable[[Tensor, tuple[Tensor, ...], Tensor], tuple[Tensor, Sequence[Tensor]]]
"""(stack (n, R, C), the other tensors' entries (n, …), counts (n,)) -> the results that
are sent back: a stack, and entries."""


def alone(x: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
    """The exchange of a single rank."""
    return lambda: x


class OwnerCall(NamedTuple):
    """What one flat tensor asks the owners of its matrices.

    Attributes:
        run: see `Run`.
        kind: calls of one kind have equal functions `run`.
        tensors: the flat tensor of the matrices, and others that have entries for each
            of them: their states.
        buffers: where the matrices' entries are in each of these.
        shapes: by tensor and matrix, the shape of the entries.
        step: the number of updates, 0-d.
        reply_dtype: the dtype of the first result, in which it is sent back.
        rank, exchange: this rank, and the collective.
        num_not_returned: the last so many tensors are sent to owners only.
    """

    run: Run
    kind: Hashable
    tensors: tuple[Tensor, ...]
    buffers: tuple[OwnedBuffer, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    step: Tensor
    reply_dtype: torch.dtype
    rank: int
    exchange: Exchange
    num_not_returned: int = 0

    def dtypes(self, *, back: bool) -> tuple[torch.dtype, ...]:
        """The dtypes of the tensors, as they are sent."""
        found = tuple(x.dtype for x in self.tensors)
        if back:
            return (self.reply_dtype, *found[1 : len(found) - self.num_not_returned])
        return found


Reply = tuple[Tensor, ...]
"""The results of a call, flat like its tensors."""

Calls = Generator[OwnerCall, Reply, Any]
"""An update that calls owners; it returns what an update returns."""


def run_together(updates: Sequence[Calls]) -> list[Any]:
    """The results of updates whose calls go to the owners together.

    *Collective:* every rank, with the same updates.
    """
    results: list[Any] = [None] * len(updates)
    replies: dict[int, Reply | None] = dict.fromkeys(range(len(updates)))
    while replies:
        waiting: dict[int, OwnerCall] = {}
        for index, reply in replies.items():
            try:
                # the first value that is sent into a generator must be None
                waiting[index] = updates[index].send(reply)  # type: ignore[arg-type]
            except StopIteration as end:
                results[index] = end.value
        replies = dict(zip(waiting, call_owners([*waiting.values()]), strict=True))
    return results


class _Group(NamedTuple):
    """The matrices of one shape: (index of the call, index of the matrix)."""

    members: tuple[tuple[int, int], ...]

    def of_call(self, index: int) -> set[int]:
        return {matrix for call, matrix in self.members if call == index}


Pieces = dict[tuple[int, int, int], list[tuple[int, Tensor]]]
"""By (call, tensor, matrix): parts of its entries, each with its start."""


def call_owners(calls: Sequence[OwnerCall]) -> list[Reply]:
    """The replies of the owners, in the order of the calls.

    *Collective:* every rank that a call's matrices have an owner or a shard on; sends
    at most the elements of its shards there, and those of the matrices that it owns
    back (`OwnedBuffer.num_sent`).
    """
    groups = _groups(calls)
    arriving = [_start_there(calls, group) for group in groups]
    leaving = [
        _start_back(calls, group, _compute(calls, group, [wait() for wait in waits]))
        for group, waits in zip(groups, arriving, strict=True)
    ]
    found: dict[tuple[int, int], list[tuple[int, Tensor]]] = defaultdict(list)
    for wait in (wait for waits in leaving for wait in waits):
        for (call, tensor, _), pieces in wait().items():
            found[call, tensor] += pieces
    return [
        tuple(
            _joined(found[index, k], x.numel(), x.new_empty(0, dtype=dtype))
            for k, (x, dtype) in enumerate(zip(call.tensors, call.dtypes(back=True)))
        )
        for index, call in enumerate(calls)
    ]


def _groups(calls: Sequence[OwnerCall]) -> list[_Group]:
    """The matrices that are computed together: of one kind, shapes and dtypes."""
    found: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for index, call in enumerate(calls):
        for number, shapes in enumerate(zip(*call.shapes, strict=True)):
            found[call.kind, shapes, call.dtypes(back=False)].append((index, number))
    return [_Group(tuple(members)) for members in found.values()]


def _start_there(calls: Sequence[OwnerCall], group: _Group) -> list[Callable[[], Pieces]]:
    """Starts to send a group's matrices and states to their owners, one exchange for
    each dtype; the functions return the pieces of this rank's matrices.
    """
    out: dict[torch.dtype, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    into: dict[torch.dtype, dict[int, list[_Piece]]] = defaultdict(lambda: defaultdict(list))
    for index, call, members in _members(calls, group):
        dtypes = call.dtypes(back=False)
        for k, (x, buffer) in enumerate(zip(call.tensors, call.buffers, strict=True)):
            sends, receives = out[dtypes[k]], into[dtypes[k]]
            for move in moves(buffer, call.rank, back=False):
                if move.matrix in members:
                    if move.rank == call.rank:
                        piece = x[move.offset : move.offset + move.numel]
                        sends[move.owner].append(piece)
                    if move.owner == call.rank:
                        key = (index, k, move.matrix)
                        receives[move.rank].append(_Piece(key, move.start, move.numel))
    return [_start(calls[0], dtype, out[dtype], into[dtype]) for dtype in out]


def _start_back(
    calls: Sequence[OwnerCall], group: _Group, results: dict[tuple[int, int, int], Tensor]
) -> list[Callable[[], Pieces]]:
    """Starts to send results to the ranks that hold their elements."""
    out: dict[torch.dtype, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    into: dict[torch.dtype, dict[int, list[_Piece]]] = defaultdict(lambda: defaultdict(list))
    for index, call, members in _members(calls, group):
        dtypes = call.dtypes(back=True)
        for k, (dtype, buffer) in enumerate(zip(dtypes, call.buffers)):
            sends, receives = out[dtype], into[dtype]
            for move in moves(buffer, call.rank, back=True):
                if move.matrix in members:
                    key = (index, k, move.matrix)
                    if move.owner == call.rank:
                        piece = results[key][move.start : move.start + move.numel]
                        sends[move.rank].append(piece)
                    if move.rank == call.rank:
                        receives[move.owner].append(_Piece(key, move.offset, move.numel))
    return [_start(calls[0], dtype, out[dtype], into[dtype]) for dtype in out]


class _Piece(NamedTuple):
    """Elements that arrive: (call, tensor, matrix), where they start, how many."""

    key: tuple[int, int, int]
    start: int
    numel: int


def _start(
    call: OwnerCall,
    dtype: torch.dtype,
    out: dict[int, list[Tensor]],
    into: dict[int, list[_Piece]],
) -> Callable[[], Pieces]:
    """Starts one exchange, of tensors for each rank."""
    size = len(call.buffers[0].places)
    sent = [sum(x.numel() for x in out.get(rank, ())) for rank in range(size)]
    received = [sum(piece.numel for piece in into.get(rank, ())) for rank in range(size)]
    pieces = [x for rank in range(size) for x in out.get(rank, ())]
    empty = call.tensors[0].new_empty(0, dtype=dtype)
    wait = call.exchange(torch.cat(pieces) if pieces else empty, sent, received)
    expected = [piece for rank in range(size) for piece in into.get(rank, ())]

    def arrived() -> Pieces:
        found: Pieces = defaultdict(list)
        parts = torch.split(wait(), [piece.numel for piece in expected]) if expected else ()
        if not expected:
            wait()
        for piece, x in zip(expected, parts, strict=True):
            found[piece.key].append((piece.start, x))
        return found

    return arrived


def _members(calls: Sequence[OwnerCall], group: _Group) -> list[tuple[int, OwnerCall, set[int]]]:
    indices = dict.fromkeys(call for call, _ in group.members)
    return [(index, calls[index], group.of_call(index)) for index in indices]


def _compute(
    calls: Sequence[OwnerCall], group: _Group, arrived: Sequence[Pieces]
) -> dict[tuple[int, int, int], Tensor]:
    """The results for this rank's own matrices of a group, flat, by (call, tensor,
    matrix).
    """
    own = [
        (index, matrix)
        for index, matrix in group.members
        if calls[index].buffers[0].owners[matrix] == calls[index].rank
    ]
    if not own:
        return {}
    entries = {key: pieces for of_dtype in arrived for key, pieces in of_dtype.items()}
    call, number = calls[own[0][0]], own[0][1]

    def stack_of(k: int) -> Tensor:
        shape, empty = call.shapes[k][number], call.tensors[k].new_empty(0)
        numel = math.prod(shape)
        found = (entries.get((index, k, matrix), []) for index, matrix in own)
        flats = [_joined(pieces, numel, empty) for pieces in found]
        return torch.stack(flats).view(len(own), *shape)

    stacks = [stack_of(k) for k in range(len(call.tensors))]
    counts = torch.stack([calls[index].step for index, _ in own])
    found = {}
    dtypes = call.dtypes(back=True)
    for k, stack in enumerate(_run(call, stacks, counts)):
        for (index, matrix), x in zip(own, stack.to(dtypes[k]), strict=True):
            found[index, k, matrix] = x.reshape(-1)
    return found


def _run(call: OwnerCall, stacks: list[Tensor], counts: Tensor) -> list[Tensor]:
    """The results of the matrices of a stack, which are computed in one product.

    A processor gains nothing from that, and rounds a product of a batch in another way.
    So there each is computed alone: its bits do not depend on the other matrices of its
    owner.
    """
    if not stacks[0].is_cpu or torch.compiler.is_compiling():
        result, states = call.run(stacks[0], tuple(stacks[1:]), counts)
        return [result, *states]
    alone = []
    for one in zip(*(torch.split(x, 1) for x in (*stacks, counts)), strict=True):
        result, states = call.run(one[0], one[1:-1], one[-1])
        alone.append((result, *states))
    return [torch.cat(results) for results in zip(*alone, strict=True)]


def _joined(pieces: list[tuple[int, Tensor]], numel: int, empty: Tensor) -> Tensor:
    """Pieces in the order of their starts, padded with zeros to `numel` elements.

    Args:
        empty: a tensor like the pieces, without elements.
    """
    parts = [x for _, x in sorted(pieces, key=lambda piece: piece[0])]
    if rest := numel - sum(x.numel() for x in parts):
        parts.append(empty.new_zeros(rest))
    return torch.cat(parts) if len(parts) > 1 else (*parts, empty)[0]


@lru_cache(maxsize=4096)  # an update asks again, with the values of the last one
def moves(buffer: OwnedBuffer, rank: int, *, back: bool) -> tuple[MatrixMove, ...]:
    """The moves of a rank, to the owners or back."""
    return tuple(buffer.from_owners(rank) if back else buffer.to_owners(rank))
