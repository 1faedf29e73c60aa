"""Collectives along an axis.

Those that can overlap compute are named `start_…` and return a `Pending`. On a
`GraphAxis` the `Pending` has its result at once.

On NCCL the backend's own collectives are fast. On gloo they are slow, except for an
all-reduce of two ranks. There, an all-gather and a reduce-scatter made of sends and
receives, with a sum in rank order, are three to four times as fast. The sum in rank
order (x[0] + x[1] + …) also fixes the bits: they do not depend on the layout, the stage
or the slice.

Shapes: P padded elements = W·S, S elements of a shard, W ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.fx.traceback
from einops import rearrange
from torch import Tensor

from fzero.common.plain_values import pack, unpack
from fzero.comms.axes import CollectiveError, LockstepAxis, ProcessAxis, RankAxis
from fzero.comms.hangs.failures import Explained, failed
from fzero.comms.hangs.progress import PROGRESS
from fzero.comms.pending import SENDER, Letter, Letters, Pending, abandon, ended
from fzero.comms.records import CommRecord, Label

GATHER, REDUCE, OTHER = Label("gather"), Label("reduce"), Label("other")
"""The labels of collectives that are called without one."""
_STARTER = ThreadPoolExecutor(1, thread_name_prefix=SENDER)

# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_KNOWN_DTYPES = frozenset(
    getattr(torch, name)
    for name in [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int8",
        "uint8",
        "bool",
        "int32",
        "int64",
    ]
)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class GraphAxis(Protocol):
    """An axis whose collectives are operators on values, in a graph or on stacked
    ranks. `TracedAxis` documents the methods.
    """

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, shard_S: Tensor) -> Tensor: ...
    def reduce_scatter(self, full_P: Tensor) -> Tensor: ...
    def all_reduce(self, full_P: Tensor) -> Tensor: ...
    def all_to_all(self, rows_WN: Tensor) -> Tensor: ...
    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor: ...
    def stack(self, x: Tensor) -> Tensor: ...


Axis = RankAxis | GraphAxis
"""An axis to which this rank belongs, or an axis of a graph or of stacked ranks."""
AnyAxis = TypeVar("AnyAxis", bound=Axis)


def waited() -> dict[str, float]:
    """Seconds that the host has waited for collectives since the process began, by
    their purpose.
    """
    return dict(PROGRESS.waited)


def next_step(axis: RankAxis) -> None:
    """Starts to number collectives from 1 again, by which a report compares ranks; a
    step of a single rank is not counted.
    """
    if isinstance(axis, ProcessAxis) and axis.size > 1:
        PROGRESS.num_steps, PROGRESS.number = PROGRESS.num_steps + 1, 0


# --- collectives that overlap compute -------------------------------------------------------------


def start_all_gather(
    shard_S: Tensor,
    full_P: Tensor | None,
    axis: Axis,
    *,
    after: Pending | None = None,
    label: Label = GATHER,
) -> Pending:
    """Starts to write the shards of all ranks into `full_P`, in rank order. `shard_S`
    may be a slice of `full_P`.

    *Collective:* every rank of `axis`; each sends `(W-1)/W · P` elements.

    Args:
        full_P: None makes a new tensor.
        after: the collective that writes `shard_S`, which must then be a slice of
            `full_P`. This collective waits for it; the caller does not.
    """
    _check_constant("start_all_gather", shard_S)
    if not isinstance(axis, RankAxis):
        return _in_graph(axis.all_gather, shard_S, label)
    if full_P is None:
        shard_S = shard_S.contiguous()
        full_P = shard_S.new_empty(shard_S.numel() * axis.size)
    if axis.size == 1:
        is_there = shard_S.data_ptr() == full_P.data_ptr()
        return _without_sending(label, full_P, after, None if is_there else shard_S)
    _report(axis, "all_gather", label, shard_S.numel() * (axis.size - 1), shard_S)
    if pending := _in_one_call(_all_gather, full_P, shard_S, axis, after, label):
        return pending
    full_WS = rearrange(full_P, "(rank shard) -> rank shard", rank=axis.size)
    if full_WS[axis.rank].data_ptr() != shard_S.data_ptr():
        full_WS[axis.rank].copy_(shard_S)
    received = {rank: full_WS[rank] for rank in range(axis.size) if rank != axis.rank}
    return Pending(
        label, _swap(received, dict.fromkeys(received, shard_S), axis, after), None, full_P
    )


def start_reduce_scatter(
    full_P: Tensor,
    axis: Axis,
    *,
    out_S: Tensor | None = None,
    after: Pending | None = None,
    label: Label = REDUCE,
) -> Pending:
    """Starts to sum `full_P` over the ranks, in rank order; the result is this rank's
    shard (S) of the sum.

    *Collective:* every rank of `axis`; each sends `(W-1)/W · P` elements.

    Args:
        full_P: this rank's summand; must not change until the end. With one rank it is
            the result.
        out_S: the result is written here; may be this rank's slice of `full_P`. None
            makes a new tensor.
        after: the collective that writes `full_P`; this one waits for it, and the
            caller does not.
    """
    _check_constant("start_reduce_scatter", full_P)
    if not isinstance(axis, RankAxis):
        return _in_graph(axis.reduce_scatter, full_P, label)
    if axis.size == 1:
        is_there = out_S is None or out_S is full_P
        return _without_sending(
            label, full_P if out_S is None else out_S, after, None if is_there else full_P
        )
    shard_numel = full_P.numel() // axis.size
    sum_S = full_P.new_empty(shard_numel) if out_S is None else out_S
    _report(axis, "reduce_scatter", label, shard_numel * (axis.size - 1), full_P)
    if pending := _in_one_call(_reduce_scatter, sum_S, full_P, axis, after, label):
        return pending
    full_WS = rearrange(full_P, "(rank shard) -> rank shard", rank=axis.size)
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    # The first shard that arrives is written into the memory of the result, unless this memory is a
    # summand.
    is_summand = sum_S.data_ptr() == full_WS[axis.rank].data_ptr()
    buffers = [
        *([] if is_summand else [sum_S]),
        *full_P.new_empty(len(others) - (not is_summand), shard_numel),
    ]
    received = dict(zip(others, buffers, strict=True))
    works = _swap(received, {rank: full_WS[rank] for rank in others}, axis, after)

    def finish() -> Tensor:
        summands = [received.get(rank, full_WS[axis.rank]) for rank in range(axis.size)]
        total_S = received[others[0]] if axis.size > 2 else sum_S
        torch.add(summands[0], summands[1], out=total_S)
        for summand in summands[2:-1]:
            total_S.add_(summand)
        return total_S if axis.size == 2 else torch.add(total_S, summands[-1], out=sum_S)

    return Pending(label, works, finish, sum_S)


def start_all_to_all(
    rows_WN: Tensor, axis: Axis, *, after: Pending | None = None, label: Label = REDUCE
) -> Pending:
    """Starts to send row r to rank r, for every r; the result (W, N) holds the rows
    that arrive, in rank order.

    *Collective:* every rank of `axis`; each sends `(W-1) · N` elements.

    Args:
        rows_WN: contiguous; must not change until the end. With one rank it is the
            result.
        after: the collective that writes `rows_WN`; this one waits for it, and the
            caller does not.
    """
    _check_constant("start_all_to_all", rows_WN)
    if not isinstance(axis, RankAxis):
        return _in_graph(axis.all_to_all, rows_WN, label)
    if axis.size == 1:
        return _without_sending(label, rows_WN, after)
    _report(axis, "all_to_all", label, rows_WN[0].numel() * (axis.size - 1), rows_WN)
    arrived_WN = torch.empty_like(rows_WN)
    if pending := _in_one_call(dist.all_to_all_single, arrived_WN, rows_WN, axis, after, label):
        return pending
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    received, sent = ({rank: x[rank] for rank in others} for x in (arrived_WN, rows_WN))
    works = _swap(received, sent, axis, after)

    def finish() -> Tensor:
        arrived_WN[axis.rank].copy_(rows_WN[axis.rank])
        return arrived_WN

    return Pending(label, works, finish, arrived_WN)


def start_exchange(
    x: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    axis: Axis,
    *,
    label: Label = OTHER,
) -> Pending:
    """Starts to send `sent[r]` elements of `x` to each rank r, those for rank 0 first.
    The result holds `received[r]` elements of each rank, in rank order.

    *Collective:* every rank of `axis`, with sizes that fit; each sends the elements
    that are not for itself.
    """
    _check_constant("start_exchange", x)
    if not isinstance(axis, RankAxis):
        return _in_graph(lambda own: axis.exchange(own, list(sent), list(received)), x, label)
    if axis.size == 1:
        return _without_sending(label, x, None)
    num_sent = sum(sent) - sent[axis.rank]
    _report(axis, "exchange", label, num_sent, x)
    arrived = x.new_empty(sum(received))
    if isinstance(axis, ProcessAxis) and x.is_cuda:
        started = _start(label, dist.all_to_all_single, arrived, x, [*received], [*sent], axis=axis)
        return Pending(label, started, None, arrived, (x,))
    out, into = torch.split(x, list(sent)), torch.split(arrived, list(received))
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    works = _swap(
        {rank: into[rank] for rank in others if received[rank]},
        {rank: out[rank] for rank in others if sent[rank]},
        axis,
    )

    def finish() -> Tensor:
        into[axis.rank].copy_(out[axis.rank])
        return arrived

    return Pending(label, works, finish, arrived)


def start_all_reduce(
    full_P: Tensor, axis: Axis, *, after: Pending | None = None, label: Label = REDUCE
) -> Pending:
    """Starts to sum `full_P` over the ranks, in rank order and in place. `after` as for
    `start_reduce_scatter`.

    *Collective:* every rank of `axis`; each sends `2(W-1)/W · P` elements.
    """
    _check_constant("start_all_reduce", full_P)
    if not isinstance(axis, RankAxis):
        return _in_graph(axis.all_reduce, full_P, label)
    if axis.size == 1:
        return _without_sending(label, full_P, after)
    _report_all_reduce(full_P, axis, label)
    is_at_once = after is None or full_P.is_cuda
    if isinstance(axis, ProcessAxis) and axis.size == 2 and full_P.numel() and is_at_once:
        # Two summands give the same bits in either order. gloo pairs the collectives of a group by
        # their number. If a separate thread started this collective later, gloo could pair it with
        # a different one of the other rank.
        return Pending(
            label,
            _start(label, dist.all_reduce, full_P, axis=axis, after=after),
            None,
            full_P,
            (after,),
        )
    halves = replace(axis, observe=None)
    shard_S = rearrange(full_P, "(rank shard) -> rank shard", rank=axis.size)[axis.rank]
    reduction = start_reduce_scatter(full_P, halves, out_S=shard_S, after=after, label=label)
    # one communicator runs its collectives in order
    is_in_order = isinstance(axis, ProcessAxis) and full_P.is_cuda
    return start_all_gather(
        shard_S, full_P, halves, after=None if is_in_order else reduction, label=label
    )


def in_halves(full_P: Tensor, axis: AnyAxis, label: Label) -> AnyAxis:
    """The axis for the two halves of an all-reduce (a reduce-scatter, an all-gather),
    which are reported here as one.
    """
    if not isinstance(axis, RankAxis):
        return axis
    _report_all_reduce(full_P, axis, label)
    return replace(axis, observe=None)


def start_stack(x: Tensor, axis: Axis, *, label: Label = OTHER) -> Pending:
    """Starts to stack the small tensors of all ranks along a new first dimension.
    *Collective:* sends (W-1) · numel.
    """
    if not isinstance(axis, RankAxis):
        return _in_graph(axis.stack, x, label)
    if axis.size == 1:
        return ended(x[None], label)
    rows = x.new_empty((axis.size, *x.shape))
    _report(axis, "stack", label, x.numel() * (axis.size - 1), x)
    if isinstance(axis, LockstepAxis):
        rows[axis.rank].copy_(x)
        received = {rank: rows[rank] for rank in range(axis.size) if rank != axis.rank}
        return Pending(label, _post(received, dict.fromkeys(received, x), axis), None, rows)
    x = x.contiguous()
    if pending := _in_one_call(_all_gather, rows, x, axis, None, label):
        return pending
    gathered = ([*rows], x) if x.dtype in _KNOWN_DTYPES else ([*map(_as_bytes, rows)], _as_bytes(x))
    return Pending(label, _start(label, dist.all_gather, *gathered, axis=axis), None, rows)


def _as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes. gloo's collectives do not know some
    dtypes, such as an 8-bit float.
    """
    return x.view(-1).view(torch.uint8)


def _check_constant(name: str, x: Tensor) -> None:
    """Raises ValueError if a gradient would be lost: a collective writes its result
    into memory that autograd does not follow.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: must get a tensor without gradients, because it is not differentiable, and "
            f"got one that requires them; call a primitive (fzero.comms.all_gather, "
            f"reduce_scatter), whose transpose is a collective, or pass x.detach()"
        )


def labelled(label: Label) -> AbstractContextManager[None]:
    """Inside, a trace writes the label into `meta["custom"]["sent"]` of every node: of
    collectives, and of a comm hook's encoding."""
    context: AbstractContextManager[None] = torch.fx.traceback.annotate({"sent": label})
    return context


def _in_graph(collective: Callable[[Tensor], Tensor], x: Tensor, label: Label) -> Pending:
    with labelled(label):
        return ended(collective(x), label)


def _without_sending(
    label: Label, out: Tensor, after: Pending | None, source: Tensor | None = None
) -> Pending:
    """A collective that sends nothing: the result is `out`, into which `source` is
    copied at the end.
    """
    if after is None and source is None:
        return ended(out, label)

    def last() -> Tensor:
        if after is not None:
            after.finish()
        return out if source is None else out.copy_(source)

    return Pending(label, () if after is None else after.works, last, out)


def _in_one_call(
    collective: Callable[..., Any],
    out: Tensor,
    x: Tensor,
    axis: RankAxis,
    after: Pending | None,
    label: Label,
) -> Pending | None:
    """The backend's own collective (on CUDA), or none for empty tensors. Returns None
    if sends and receives are faster.
    """
    if x.numel() == 0:
        return _without_sending(label, out, after)
    if isinstance(axis, ProcessAxis) and x.is_cuda:
        return Pending(
            label, _start(label, collective, out, x, axis=axis, after=after), None, out, (x, after)
        )
    return None


def _start(
    label: Label,
    collective: Callable[..., Any],
    *tensors: Any,
    axis: ProcessAxis,
    after: Pending | None = None,
) -> list[dist.Work]:
    """Starts a collective now, or (on CUDA) on a stream that waits for `after` and the
    compute so far.
    """
    try:
        if after is None or after.has_ended:
            return [collective(*tensors, group=axis.group, async_op=True)]
        stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(stream):
            after.wait()
            return [collective(*tensors, group=axis.group, async_op=True)]
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise failed(label, error) from error


def _swap(
    received: dict[int, Tensor],
    sent: dict[int, Tensor],
    axis: RankAxis,
    after: Pending | None = None,
) -> Future[list[dist.Work]] | Letters:
    """Starts to receive one tensor from each rank in `received`, and to send one to
    each rank in `sent`.

    A separate thread starts the sends, because gloo begins to copy immediately and
    would delay the compute.
    """
    if isinstance(axis, LockstepAxis):
        if after is not None:
            after.wait()
        return _post(received, sent, axis)
    # read now: at a late start the default group may be another one
    group = axis.group or dist.group.WORLD
    pairs: Any = ((dist.irecv, received), (dist.isend, sent))
    transfers = [(transfer, rank, x) for transfer, tensors in pairs for rank, x in tensors.items()]

    def start() -> list[dist.Work]:
        if after is not None:
            after.wait()
        works = []
        while transfers:  # the list is emptied, so that it does not keep the tensors alive
            transfer, rank, x = transfers.pop(0)
            works.append(transfer(x, axis.global_rank(rank), group=group))
        return [work for work in works if work is not None]

    return _STARTER.submit(start)


def _post(received: dict[int, Tensor], sent: dict[int, Tensor], axis: LockstepAxis) -> Letters:
    """`_swap` for ranks in lockstep: sends copies, one for all ranks that get the same
    tensor.
    """
    copies, me = {id(x): x.clone() for x in sent.values()}, axis.global_rank(axis.rank)
    for rank, x in sent.items():
        axis.hub.send(me, axis.global_rank(rank), copies[id(x)])
    return Letters(
        Letter(axis.hub, axis.hub.expect(axis.global_rank(rank), me), x)
        for rank, x in received.items()
    )


def _report_all_reduce(full_P: Tensor, axis: RankAxis, label: Label) -> None:
    _report(axis, "all_reduce", label, 2 * (full_P.numel() // axis.size) * (axis.size - 1), full_P)


def _report(
    axis: RankAxis, collective: str, label: Label, num_elements: int, tensor: Tensor
) -> None:
    if isinstance(axis, ProcessAxis):
        PROGRESS.number, PROGRESS.label = PROGRESS.number + 1, label
    if axis.observe is not None:
        axis.observe(
            CommRecord(
                collective, axis.name, label, num_elements, num_elements * tensor.element_size()
            )
        )


# --- collectives that return their result ---------------------------------------------------------


def stack(x: Tensor, axis: Axis, *, label: Label = OTHER) -> Tensor:
    """The small tensors of all ranks, stacked along a new first dimension.
    *Collective:* sends (W-1) · numel.
    """
    return start_stack(x, axis, label=label).wait()


def broadcast(x: Tensor, axis: RankAxis, *, source: int = 0, label: Label = OTHER) -> Tensor:
    """Overwrites `x` with the tensor of rank `source`, and returns it. *Collective:*
    the source sends numel to each rank.
    """
    if axis.size > 1 and x.numel():
        _report(axis, "broadcast", label, x.numel() * (axis.size - 1) * (axis.rank == source), x)
        if isinstance(axis, LockstepAxis):
            others = [rank for rank in range(axis.size) if rank != source]
            works = (
                _post({}, dict.fromkeys(others, x), axis)
                if axis.rank == source
                else _post({source: x}, {}, axis)
            )
            return Pending(label, works, None, x).wait()
        # gloo sends and writes numel consecutive elements, whatever the strides
        dense = x.contiguous()
        with Explained(label):
            known = dense if x.dtype in _KNOWN_DTYPES else _as_bytes(dense)
            dist.broadcast(known, axis.global_rank(source), group=axis.group)
        return x if dense is x else x.copy_(dense)
    return x


def exchange(value: Any, axis: RankAxis, *, label: Label = OTHER) -> list[Any]:
    """Every rank's small Python value, in rank order; for start-up checks.

    *Collective:* every rank of `axis`; sends the length of its packed value, and then
    as many bytes as the longest packed value has.

    Args:
        value: made of None, numbers, strings, bytes, and tuples, lists, dicts and sets
            of these. A received value cannot name a class or a function
            (`fzero.common.plain_values`).
    """
    if axis.size == 1:
        return [value]
    on_nccl = isinstance(axis, ProcessAxis) and dist.get_backend(axis.group) == "nccl"
    device = torch.device("cuda" if on_nccl else "cpu")
    mine = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    numels = stack(torch.tensor(mine.numel(), device=device), axis, label=label).tolist()
    padded = torch.zeros(max(numels), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    rows = stack(padded.to(device), axis, label=label).cpu()
    return [unpack(bytes(row[:numel].tolist())) for row, numel in zip(rows, numels, strict=True)]


def exchange_via_store(value: int, axis: RankAxis, *, seconds: float) -> list[int] | None:
    """Every rank's number, in rank order, outside the order of collectives; None unless
    all ranks call this within `seconds`.

    Use it if the other ranks may not make this call. The numbers go through the job's
    store.
    """
    if axis.size == 1:
        return [value]
    if isinstance(axis, LockstepAxis):
        return axis.hub.exchange_via_store(axis.global_rank(axis.rank), value)
    store: Any = dist.distributed_c10d._get_default_store()
    rank = axis.global_rank(axis.rank)
    number = store.add(f"fzero-aside/{rank}", 1)  # calls of this rank so far
    keys = [f"fzero-aside/{number}/{axis.global_rank(other)}" for other in range(axis.size)]
    store.set(keys[axis.rank], str(value))
    end = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > end:
            store.delete_key(keys[axis.rank])
            return None
        time.sleep(0.002)
    return [int(store.get(key)) for key in keys]


def start_send(x: Tensor, target: int, axis: RankAxis, *, label: Label = OTHER) -> Pending:
    """Starts to send `x` to the rank `target` of an axis, which calls `start_receive`.
    `x` must not change until the end.

    Messages between two ranks arrive in the order in which they were sent. Sends the
    elements of `x`.
    """
    # not counted in `PROGRESS`: the number of messages differs between ranks
    if axis.observe is not None:
        axis.observe(CommRecord("send", axis.name, label, x.numel(), x.nbytes))
    if isinstance(axis, LockstepAxis):
        return Pending(label, _post({}, {target: x}, axis), None, x)
    # On this thread: to hand the message of a micro-batch to another one costs more than gloo's
    # first copy.
    with Explained(label):
        work = dist.isend(x, group=axis.group, group_dst=target)
    return Pending(label, [work] if work is not None else (), None, x)


def start_receive(x: Tensor, source: int, axis: RankAxis, *, label: Label = OTHER) -> Pending:
    """Starts to write into `x` the next message that the rank `source` of an axis
    sends, of the same size.
    """
    if isinstance(axis, LockstepAxis):
        return Pending(label, _post({source: x}, {}, axis), None, x)
    with Explained(label):
        work = dist.irecv(x, group=axis.group, group_src=source)
    return Pending(label, [work] if work is not None else (), None, x)


def swap(
    received: Sequence[tuple[int, Tensor]],
    sent: Sequence[tuple[int, Tensor]],
    axis: ProcessAxis,
    *,
    label: Label = OTHER,
) -> None:
    """Receives tensors from some ranks, and sends tensors to some; returns when all
    have arrived.

    *Collective* of the named ranks only: for each pair of ranks, one must receive the
    tensors that the other sends, in the same order. A rank that has nothing to send or
    to receive need not call it. Sends the elements of `sent`.

    Args:
        received: the ranks to receive from, each with the memory to write; contiguous.
        sent: the ranks to send to, each with its tensor; contiguous. One tensor may go
            to several ranks.
    """
    for _, x in sent:
        _report(axis, "swap", label, x.numel(), x)
    transfers = [
        dist.P2POp(transfer, x, axis.global_rank(rank), axis.group)
        for transfer, pairs in ((dist.irecv, received), (dist.isend, sent))
        for rank, x in pairs
        if x.numel()
    ]
    if not transfers:
        return
    with Explained(label):
        works = dist.batch_isend_irecv(transfers)
    pending = Pending(label, works, None, transfers[0].tensor)
    try:
        pending.end()
    except CollectiveError:
        abandon([pending])
        raise
