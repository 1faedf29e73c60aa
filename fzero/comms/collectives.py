"""How ranks exchange tensors: the only door to torch.distributed.

A collective takes an *axis*, a value that says who takes part, never a process group:

- `ProcessAxis`: this process is one rank of a torch.distributed group (of one rank alone where there is no group),
- `LockstepAxis`: this thread is one rank of several in this process, which run in turn (`fzero.comms.lockstep`),
- `Sim`: all ranks live in this process, stacked along the first dimension of every tensor,
- `AbstractAxis`: a number of ranks of which none is there, for what can be told before there is a job.

Where the ranks stand in a mesh of several axes, `along` gives the axes one by one.

Collectives that can overlap compute return a `Pending`: they have been started, and `wait()` gives the result.

On NCCL the named collectives are the fast ones. On gloo they are not (but for an all-reduce of two ranks): an all-gather
and a reduce-scatter made of sends and receives, with a sum in rank order, are three to four times as fast. The sum in
rank order (x[0] + x[1] + …) also fixes the bits: they do not depend on the layout, the stage or the slice.

Shapes: P padded elements = W·S, S elements of a shard, W ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import operator
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import current_thread, get_ident
from typing import Any, Literal, Self, TypeVar
from unittest.mock import patch
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its functions' defaults would keep the group of that time, and its connections
from einops import rearrange
from torch import Tensor

from fzero.common.pickles import pack, unpack
from fzero.common.profiler_ranges import profiler_range
from fzero.comms.lockstep import Hub
from fzero.comms.meeting import LoneCallError, Meeting, Notified
from fzero.comms.records import CommRecord, Label
from fzero.comms.rendezvous import launched
from fzero.comms.watchdog import HERE, Watchdog
from sharding import Mesh, reference

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
TIMEOUTS = {"FZERO_TIMEOUT": "seconds", "DEEPSPEED_TIMEOUT": "minutes"}
"""Variables that say how long a collective waits, and their units; the first that is set counts."""
DATA = "data"
"""The name of the axis that the state is sharded over."""
WORLD = "world"
"""The name of all ranks together, where they stand in a mesh of several axes."""
GATHER, REDUCE, OTHER = Label("gather"), Label("reduce"), Label("other")
"""The labels of collectives that are given none."""
_PROBE = 0x70726F62
"""The tag of what is sent to see whether a rank is there, and never received."""
_SENDER = "fzero-send"
_STARTER = ThreadPoolExecutor(1, thread_name_prefix=_SENDER)
_ABANDONED: list[Pending] = []
_PARTS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""The groups made of the ranks of another one, which live as long as that."""

# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class CollectiveError(RuntimeError):
    """A collective did not end: another rank died, left, or did not arrive in time."""


@dataclass(frozen=True, slots=True)
class ProcessAxis:
    """One rank of a process group along the mesh axis `name`.

    Args:
        name: the mesh axis.
        size: number of ranks W.
        rank: this process.
        group: the torch.distributed group; None is the default group (one rank alone never communicates).
        observe: called with a `CommRecord` for every collective, before it starts.
        mesh: how the ranks stand along several axes, of which this one is all together; None is one axis.

    >>> alone = ProcessAxis("data")
    >>> alone.size, alone.rank
    (1, 0)
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    observe: Callable[[CommRecord], None] | None = field(default=None, repr=False)
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"ProcessAxis: rank must be in [0, {self.size}), got {self.rank}; give the group's own rank"
            )
        if self.size > 1 and not dist.is_initialized():
            raise ValueError(
                f"ProcessAxis: {self.size} ranks need a process group; start with torchrun and use fzero.join()"
            )

    def global_rank(self, rank: int) -> int:
        """The rank in the whole job of `rank` on this axis."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclass(frozen=True, slots=True)
class LockstepAxis:
    """One of `size` ranks along the mesh axis `name` that run in turn in this process, on the CPU.

    Args:
        name: the mesh axis.
        size: number of ranks W.
        rank: this thread.
        hub: through which they send.
        observe, mesh: as for `ProcessAxis`.
        ranks: by what number the hub knows each; empty is by its rank on this axis.
    """

    name: str
    size: int
    rank: int
    hub: Hub = field(repr=False)
    observe: Callable[[CommRecord], None] | None = field(default=None, repr=False)
    mesh: Mesh | None = None
    ranks: tuple[int, ...] = ()

    def global_rank(self, rank: int) -> int:
        """The rank in the whole job of `rank` on this axis."""
        return self.ranks[rank] if self.ranks else rank


@dataclass(frozen=True, slots=True)
class Sim:
    """All `size` ranks of the mesh axis `name` in this process: every tensor has a leading dimension of ranks.

    >>> all_gather(torch.tensor([[1, 2], [3, 4]]), Sim("data", 2))
    tensor([[1, 2, 3, 4],
            [1, 2, 3, 4]])
    """

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class AbstractAxis:
    """One rank of `size` along the mesh axis `name`, none of which is there: for plans and schedules, not to be run.

    Args:
        name: the mesh axis.
        size: number of ranks W.
        rank: whose part.
        backend: `"nccl"` captures the named collectives, `"gloo"` what stands for them there.
        mesh: as for `ProcessAxis`; see `of`.

    >>> AbstractAxis("data", 1024).rank
    0
    """

    name: str
    size: int
    rank: int = 0
    backend: Literal["nccl", "gloo"] = "nccl"
    mesh: Mesh | None = None

    @classmethod
    def of(cls, mesh: Mesh, rank: int = 0, backend: Literal["nccl", "gloo"] = "nccl") -> Self:
        """One rank of a mesh.

        >>> AbstractAxis.of(Mesh.of(node=2, data=4)).size
        8
        """
        if not isinstance(mesh, Mesh):
            raise ValueError(
                f"AbstractAxis.of: mesh must be a sharding.Mesh, got {mesh!r}; pass Mesh.of(node=2, data=4), say"
            )
        return cls("data", mesh.size, rank, backend, mesh)

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(
                f"AbstractAxis: size must be a whole number, at least 1, got {self.size!r}; pass how many ranks are meant"
            )
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.size:
            raise ValueError(
                f"AbstractAxis: rank must be in [0, {self.size}), got {self.rank}; say whose part is meant"
            )
        if self.backend not in ("nccl", "gloo"):
            raise ValueError(f"AbstractAxis: backend must be 'nccl' or 'gloo', got {self.backend!r}; pass one of these")


Bound = ProcessAxis | LockstepAxis
"""An axis of which this process, or this thread, is one rank."""
Axis = Bound | Sim


@dataclass(slots=True)
class Pending:
    """A collective that has been started; `wait()` once, for its result.

    Holds the tensors that the collective reads and writes, so that they live until it ends.
    """

    label: Label
    works: Sequence[dist.Work] | Future[list[dist.Work]] | Letters
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The result. Raises `CollectiveError` when another rank has died or the timeout has passed."""
        self.end()
        return self.finish()

    def end(self) -> None:
        """Waits until everything has been sent and received."""
        if not self.works:  # as always in a graph, which could not hold what follows
            return
        thread, began = get_ident(), time.perf_counter()
        HERE.waits[thread] = self.label
        try:
            with profiler_range("wait", self.label):
                for work in self.works.result() if isinstance(self.works, Future) else self.works:
                    work.wait()
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise failed(self.label, error) from error
        finally:
            HERE.waits.pop(thread, None)
            if not current_thread().name.startswith(_SENDER):  # which waits in place of the caller
                HERE.waited[self.label.purpose] += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Letter:
    """A tensor on its way from a rank in lockstep."""

    hub: Hub
    message: tuple[int, int, int]
    target: Tensor

    def wait(self) -> None:
        self.target.copy_(self.hub.receive(self.message))


class Letters(tuple[Letter, ...]):
    """What one collective in lockstep receives."""

    __slots__ = ()


def abandon(pendings: Sequence[Pending]) -> None:
    """Keeps collectives that nobody will wait for, until `settle`.

    gloo forgets a send that is freed early, so that the rank that receives would wait for ever; and before it frees a
    receive it waits for the rank that sends.
    """
    _ABANDONED.extend(pending for pending in pendings if not isinstance(pending.works, Letters))


def settle() -> None:
    """Waits until abandoned collectives have ended, which write into tensors that come next to use."""
    while _ABANDONED:
        with suppress(CollectiveError):
            _ABANDONED.pop(0).end()


@atexit.register
def _never_free() -> None:
    """At the end of a process the system closes the connections; freeing what is abandoned would wait for other ranks."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_ABANDONED))


def failed(label: Label | str, error: Exception) -> CollectiveError:
    """The error to raise in place of what torch.distributed raised.

    First all ranks are asked what they do, so that the error names those that are missing (`fzero.comms.watchdog`).
    """
    HERE.waits.setdefault(get_ident(), label)  # which a captured step did not tell
    cause = f"torch.distributed said: {error}"
    with suppress(RuntimeError):  # of a store that has ended with its rank
        if _WATCHES and _WATCHES[-1][2].store.check(["alone"]):
            return CollectiveError(f"{label}: {_WATCHES[-1][2].store.get('alone').decode()}. {cause}")
    is_late = re.search(r"time(d|-| )*out", str(error), re.IGNORECASE) is not None
    told = "\n  ".join(["", *_WATCHES[-1][1].ask(is_late=is_late)]) if _WATCHES else ""
    if is_late:
        return CollectiveError(f"{label}: the collective did not come back in time. {cause}{told}")
    return CollectiveError(
        f"{label}: the collective failed; most often another rank died, left the job or did not arrive in time, so look "
        f"for the first error among the logs of all ranks. {cause}{told}"
    )


# --- the axes of a mesh -------------------------------------------------------------------------------------------


AnyRank = TypeVar("AnyRank", Bound, ProcessAxis | AbstractAxis)


def along(world: AnyRank, mesh: Mesh, name: str) -> AnyRank:
    """The ranks that differ from this one along the axis `name` of a mesh only; `world` are all of its ranks.

    *Collective* on a `ProcessAxis` axis, where a process group is made the first time: every rank, for one axis after the other.
    """
    size, rank = mesh.axis_size(name), mesh.coordinate(world.rank)[name]
    if size == world.size:
        return replace(world, name=name, mesh=None)
    if isinstance(world, AbstractAxis):
        return replace(world, name=name, size=size, rank=rank, mesh=None)
    ranks = tuple(map(world.global_rank, mesh.peers(world.rank, name)))
    if isinstance(world, LockstepAxis):
        return replace(world, name=name, size=size, rank=rank, mesh=None, ranks=ranks)
    group = _part_of(world.group, ranks, f"fzero {name}") if size > 1 else None
    return ProcessAxis(name, size, rank, group, world.observe)


def _part_of(whole: dist.ProcessGroup | None, ranks: tuple[int, ...], description: str) -> dist.ProcessGroup:
    """The group of some `ranks` of another group, by their ranks in the whole job."""
    whole = whole or dist.group.WORLD
    assert whole is not None
    parts = _PARTS.setdefault(whole, {})
    if ranks not in parts:
        # Only its own ranks make it, for `whole` need not be all of the job.
        try:
            with _name_of_group(f"{whole.group_name} {description} {ranks}"):
                parts[ranks] = dist.new_group(
                    list(ranks), timeout=_timeout_of(whole), use_local_synchronization=True, group_desc=description
                )
        except RuntimeError as error:
            raise failed(f"group {description!r} of ranks {list(ranks)}", error) from error
    return parts[ranks]


@contextmanager
def _name_of_group(name: str) -> Iterator[None]:
    """Names the group that is made inside.

    The name by which ranks find each other else tells how many groups a process has, which not all need have as many of: one
    that was outside of an earlier job has fewer.
    """
    module: Any = dist.distributed_c10d
    with patch.object(module, "_process_group_name", lambda ranks, use_hashed_name: name):
        yield


def observed(axis: Bound, observe: Callable[[CommRecord], None]) -> Bound:
    """The same axis, whose collectives are told to `observe`, too."""
    before = axis.observe

    def both(sent: CommRecord) -> None:
        if before is not None:
            before(sent)
        observe(sent)

    return replace(axis, observe=both)


# --- joining and leaving -----------------------------------------------------------------------------------------


def timeout_of(environment: Mapping[str, str]) -> timedelta:
    """How long a collective waits for a rank that does not come, as the environment says.

    >>> timeout_of({"FZERO_TIMEOUT": "90"}), timeout_of({"DEEPSPEED_TIMEOUT": "30"}), timeout_of({})
    (datetime.timedelta(seconds=90), datetime.timedelta(seconds=1800), datetime.timedelta(seconds=600))
    """
    for name, unit in TIMEOUTS.items():
        if name in environment:
            try:
                given = timedelta(**{unit: float(environment[name])})
            except (ValueError, OverflowError):
                given = timedelta(0)
            if given <= timedelta(0):
                raise ValueError(f"{name}: must be a positive number of {unit}, got {environment[name]!r}")
            return given
    return TIMEOUT


def join(device: torch.device | str = "cpu", *, name: str = "data", timeout: timedelta | None = None) -> ProcessAxis:
    """This process' place on the axis `name`: in the job that started it, or the group already initialised, or alone.

    *Collective:* every rank of the job, when `fzero.launched()` finds one: of torchrun, mpirun or srun.

    Args:
        device: CUDA picks NCCL and this rank's own GPU (LOCAL_RANK), anything else gloo.
        name: the mesh axis.
        timeout: how long a collective waits for a rank that does not come, where this call makes the group; None is what
            FZERO_TIMEOUT says, in seconds (`fzero --timeout`), or DEEPSPEED_TIMEOUT, in minutes, or 10 minutes.
    """
    if not dist.is_initialized():
        me, kind = launched(), torch.device(device).type
        if me is None:
            return ProcessAxis(name)
        on_cuda = kind == "cuda"
        if on_cuda:
            torch.cuda.set_device(me.local_rank)
        # torchrun's agent may hold the store, which only env:// finds.
        by_environment = me.by == "torchrun"
        url = "env://" if by_environment else f"tcp://{me.master_addr}:{me.master_port}"
        rank, world_size = (-1, -1) if by_environment else (me.rank, me.world_size)
        limit = timeout or timeout_of(os.environ)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo", init_method=url, timeout=limit, rank=rank, world_size=world_size
        )
        atexit.register(_leave)
    _keep_watch()
    return ProcessAxis(name, dist.get_world_size(), dist.get_rank())


_WATCHES: list[tuple[ref[dist.ProcessGroup], Watchdog, Meeting]] = []
"""The watch of the present default group, if there is one, and the place where its ranks meet."""


def _keep_watch() -> None:
    """Starts the watch of the default group, unless there is one."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_world_size() == 1 or (_WATCHES and _WATCHES[-1][0]() is group):
        return
    _end_watch()
    HERE.num_steps = HERE.number = 0  # ranks of the job may have done other things before
    own: Any = dist.distributed_c10d._get_default_store()
    # Another connection: a thread that waits for a key holds up the others of its connection.
    store = dist.distributed_c10d.PrefixStore(f"fzero-watch-{group.group_name}", own.clone())
    on_cuda = "nccl" in str(dist.get_backend_config())
    limit = _timeout_of(group).total_seconds()
    # NCCL ends the process when its own timeout has passed, which began a little before the host stood still.
    seconds = limit - min(30.0, limit / 4) if on_cuda else float("inf")
    is_stuck = _is_device_stuck if on_cuda else None
    rank, told = dist.get_rank(), Notified(store, dist.get_rank())
    watch = Watchdog(store, rank, dist.get_world_size(), is_stuck=is_stuck, seconds=seconds, each_tick=told.answer)
    _WATCHES.append((ref(group), watch, Meeting(store, rank, _is_gone)))


@atexit.register
def _end_watch() -> None:
    while _WATCHES:
        _WATCHES.pop()[1].stop()


def meet(call: str, axis: Axis) -> None:
    """Returns when every rank of the axis has come to this call; for the start of calls that all ranks must make.

    *Collective:* every rank of `axis`; sends some numbers to the job's store.

    Raises:
        CollectiveError: the others are somewhere else and will not come, or did not come in time.
    """
    if not isinstance(axis, ProcessAxis) or axis.size == 1:
        return
    _keep_watch()  # some ranks may have joined for a part of the job before, and others not
    group = axis.group or dist.group.WORLD
    assert group is not None
    ranks = [axis.global_rank(rank) for rank in range(axis.size)]
    HERE.waits[get_ident()] = call
    try:
        _WATCHES[-1][2](call, group.group_name, ranks, _timeout_of(group).total_seconds())
    except LoneCallError as error:
        raise CollectiveError(str(error)) from None
    except (TimeoutError, RuntimeError) as error:
        raise failed(call, error) from error
    finally:
        HERE.waits.pop(get_ident(), None)


_PROBES: list[Any] = []
"""CommRecord to ranks that do not answer; never received."""


def _is_gone(rank: int) -> bool:
    """Whether the connection to a rank is closed."""
    if "gloo" not in str(dist.get_backend_config()):
        return False
    try:
        _PROBES.append(dist.isend(torch.zeros(1, dtype=torch.uint8), rank, tag=_PROBE))
    except RuntimeError:
        return True
    return False


def _is_device_stuck() -> bool:
    return not torch.cuda.default_stream().query()


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group waits."""
    device = torch.device("cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu")
    options: Any = getattr(group._get_backend(device), "options", None)
    found: timedelta = getattr(options, "_timeout", TIMEOUT)
    return found


def waited() -> dict[str, float]:
    """Seconds that the host has waited for collectives since the process began, by their purpose."""
    return dict(HERE.waited)


def next_step(axis: Bound) -> None:
    """Collectives are numbered anew, by which ranks are compared when one does not come; steps of a rank alone do not count."""
    if isinstance(axis, ProcessAxis) and axis.size > 1:
        HERE.next_step()


def job() -> ProcessAxis:
    """This process among all processes of the default group, whatever axes they form; alone where there is none."""
    return ProcessAxis("job", dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else ProcessAxis("job")


def is_joined(*, without: str = "-") -> bool:
    """Whether this process is in a process group, and one that lacks the backend `without`."""
    return dist.is_initialized() and without not in str(dist.get_backend_config())


def _leave() -> None:
    """Leaves the group at the end of a process that nothing went wrong in.

    A thread of gloo lets go of a collective's tensors a moment after it has ended, and aborts the process if the interpreter
    is shutting down by then; leaving the group waits for it. After an error other ranks may be waiting: then just end.
    """
    if not _ABANDONED and not hasattr(sys, "last_type"):
        shutdown()


def backends() -> tuple[str, ...]:
    """The backends of process groups that this build of torch has."""
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return tuple(name for name, is_there in has.items() if is_there)


def check_backend(device: torch.device) -> None:
    """Raises ValueError when the process group that was joined cannot send tensors of `device`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    needed, found = ("nccl" if device.type == "cuda" else "gloo"), str(dist.get_backend_config())
    if needed not in found:
        raise ValueError(
            f"process group: a model on {device} needs the backend {needed!r}, got {found!r}; join with "
            f"fzero.join({device.type!r}), or put the model on the other device"
        )


def shutdown() -> None:
    """Leaves the process group, if there is one. *Collective:* call it on every rank, once, at the end.

    After an error on this rank alone it tells the others, whose collectives fail then.
    """
    for pending in _ABANDONED:
        if isinstance(pending.works, Future):
            pending.works.cancel()  # what is not started yet must not be, in a group that is joined later
    _ABANDONED.clear()  # a collective under way would keep the connections open
    _PROBES.clear()  # and so would these
    _end_watch()
    if dist.is_initialized():
        dist.destroy_process_group()


# --- collectives that overlap compute (ProcessAxis and LockstepAxis) ---------------------------------------------------


def start_all_gather(
    shard_S: Tensor, full_P: Tensor, axis: Bound, *, after: Pending | None = None, label: Label = GATHER
) -> Pending:
    """Starts to fill `full_P` with the shards of all ranks, in rank order. `shard_S` may be a slice of `full_P`.

    *Collective:* every rank of `axis`; each sends `(W-1)/W · P` elements.

    Args:
        after: the collective that writes `shard_S`; it is ended first, without holding up the caller.
    """
    if axis.size == 1:
        is_there = shard_S.data_ptr() == full_P.data_ptr()
        return _nothing(label, lambda: full_P if is_there else full_P.copy_(shard_S), after)
    _tell(axis, "all_gather", label, shard_S.numel() * (axis.size - 1), shard_S)
    if full_P.numel() == 0:
        return _nothing(label, lambda: full_P, after)
    if isinstance(axis, ProcessAxis) and full_P.is_cuda:
        return Pending(label, _start(label, _all_gather, full_P, shard_S, axis=axis, after=after), lambda: full_P)
    full_WS = rearrange(full_P, "(rank shard) -> rank shard", rank=axis.size)
    if full_WS[axis.rank].data_ptr() != shard_S.data_ptr():
        full_WS[axis.rank].copy_(shard_S)
    received = {rank: full_WS[rank] for rank in range(axis.size) if rank != axis.rank}
    return Pending(label, _swap(received, dict.fromkeys(received, shard_S), axis, after), lambda: full_P)


def start_reduce_scatter(
    full_P: Tensor,
    axis: Bound,
    *,
    out_S: Tensor | None = None,
    after: Pending | None = None,
    label: Label = REDUCE,
) -> Pending:
    """Starts to sum `full_P` over the ranks, in rank order; the result is this rank's shard (S) of the sum.

    *Collective:* every rank of `axis`; each sends `(W-1)/W · P` elements.

    Args:
        full_P: this rank's summand; must not change until the end. With one rank it is the result.
        out_S: takes the result; may be this rank's slice of `full_P`. None makes a new tensor.
        after: the collective that writes `full_P`; it is ended first, without holding up the caller.
    """
    if axis.size == 1:
        return _nothing(label, lambda: full_P if out_S is None or out_S is full_P else out_S.copy_(full_P), after)
    shard_numel = full_P.numel() // axis.size
    sum_S = full_P.new_empty(shard_numel) if out_S is None else out_S
    _tell(axis, "reduce_scatter", label, shard_numel * (axis.size - 1), full_P)
    if full_P.numel() == 0:
        return _nothing(label, lambda: sum_S, after)
    if isinstance(axis, ProcessAxis) and full_P.is_cuda:
        return Pending(label, _start(label, _reduce_scatter, sum_S, full_P, axis=axis, after=after), lambda: sum_S)
    full_WS = rearrange(full_P, "(rank shard) -> rank shard", rank=axis.size)
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    # The result's own memory takes the first arrival, unless the memory is a summand.
    is_summand = sum_S.data_ptr() == full_WS[axis.rank].data_ptr()
    buffers = [*([] if is_summand else [sum_S]), *full_P.new_empty(len(others) - (not is_summand), shard_numel)]
    received = dict(zip(others, buffers, strict=True))
    works = _swap(received, {rank: full_WS[rank] for rank in others}, axis, after)

    def finish() -> Tensor:
        summands = [received.get(rank, full_WS[axis.rank]) for rank in range(axis.size)]
        total_S = received[others[0]] if axis.size > 2 else sum_S
        torch.add(summands[0], summands[1], out=total_S)
        for summand in summands[2:-1]:
            total_S.add_(summand)
        return total_S if axis.size == 2 else torch.add(total_S, summands[-1], out=sum_S)

    return Pending(label, works, finish)


def start_all_to_all(rows_WN: Tensor, axis: Bound, *, after: Pending | None = None, label: Label = REDUCE) -> Pending:
    """Starts to send row r to rank r, for every r; the result (W, N) has the rows that came, in rank order.

    *Collective:* every rank of `axis`; each sends `(W-1) · N` elements.

    Args:
        rows_WN: contiguous; must not change until the end. With one rank it is the result.
        after: the collective that writes `rows_WN`; it is ended first, without holding up the caller.
    """
    if axis.size == 1:
        return _nothing(label, lambda: rows_WN, after)
    _tell(axis, "all_to_all", label, rows_WN[0].numel() * (axis.size - 1), rows_WN)
    arrived_WN = torch.empty_like(rows_WN)
    if rows_WN.numel() == 0:
        return _nothing(label, lambda: arrived_WN, after)
    if isinstance(axis, ProcessAxis) and rows_WN.is_cuda:
        started = _start(label, dist.all_to_all_single, arrived_WN, rows_WN, axis=axis, after=after)
        return Pending(label, started, lambda: arrived_WN)
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    received, sent = ({rank: x[rank] for rank in others} for x in (arrived_WN, rows_WN))
    works = _swap(received, sent, axis, after)

    def finish() -> Tensor:
        arrived_WN[axis.rank].copy_(rows_WN[axis.rank])
        return arrived_WN

    return Pending(label, works, finish)


def start_all_reduce(
    full_P: Tensor,
    axis: Bound,
    *,
    then: Sequence[Bound] = (),
    after: Pending | None = None,
    label: Label = REDUCE,
) -> Pending:
    """Starts to sum `full_P` over the ranks, in rank order and in place.

    *Collective:* every rank of `axis`; each sends `2(W-1)/W · P` elements, and over the axes in `then` what an all-reduce
    of P/W elements sends.

    Args:
        then: replicate axes to sum over: between the reduce-scatter and the all-gather that an all-reduce is made of.
        after: the collective that writes `full_P`; it is ended first, without holding up the caller.
    """
    _tell(axis, "all_reduce", label, 2 * (full_P.numel() // axis.size) * (axis.size - 1), full_P)
    is_at_once = after is None or full_P.is_cuda
    if isinstance(axis, ProcessAxis) and axis.size == 2 and full_P.numel() and not then and is_at_once:
        # Two summands have one order: the same bits. gloo tells collectives of a group by their number, so that one which a
        # thread of its own started later could meet another one on the other rank.
        return Pending(label, _start(label, dist.all_reduce, full_P, axis=axis, after=after), lambda: full_P)
    silent = replace(axis, observe=None)
    shard_S = rearrange(full_P, "(rank shard) -> rank shard", rank=axis.size)[axis.rank]
    reduction = start_reduce_scatter(full_P, silent, out_S=shard_S, after=after, label=label)
    if then:
        reduction = start_all_reduce(shard_S, then[0], then=then[1:], after=reduction, label=label)
    is_in_order = full_P.is_cuda and not then  # as one communicator runs them
    return start_all_gather(shard_S, full_P, silent, after=None if is_in_order else reduction, label=label)


def start_stack(x: Tensor, axis: Bound, *, label: Label = OTHER) -> Pending:
    """Starts to stack the small tensors of all ranks along a new first dimension. *Collective:* sends (W-1) · numel."""
    if axis.size == 1:
        return Pending(label, (), lambda: x[None])
    rows = x.new_empty((axis.size, *x.shape))
    _tell(axis, "stack", label, x.numel() * (axis.size - 1), x)
    if isinstance(axis, LockstepAxis):
        rows[axis.rank].copy_(x)
        received = {rank: rows[rank] for rank in range(axis.size) if rank != axis.rank}
        return Pending(label, _post(received, dict.fromkeys(received, x), axis), lambda: rows)
    try:
        works = [dist.all_gather(list(rows), x.contiguous(), group=axis.group, async_op=True)]
    except RuntimeError as error:
        raise failed(label, error) from error
    return Pending(label, works, lambda: rows)


def _nothing(label: Label, finish: Callable[[], Tensor], after: Pending | None) -> Pending:
    """A collective that sends nothing."""
    if after is None:
        return Pending(label, (), finish)

    def both() -> Tensor:
        after.finish()
        return finish()

    return Pending(label, after.works, both)


def _start(
    label: Label, collective: Callable[..., Any], *tensors: Tensor, axis: ProcessAxis, after: Pending | None = None
) -> list[dist.Work]:
    """Starts a collective of torch.distributed: at once, or on CUDA on a stream of its own that waits for another."""

    def start() -> list[dist.Work]:
        try:
            if after is not None:
                after.wait()
            return [collective(*tensors, group=axis.group, async_op=True)]
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise failed(label, error) from error

    if after is None:
        return start()
    stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # which waits for `after` in place of the compute
        return start()


def _swap(
    received: dict[int, Tensor], sent: dict[int, Tensor], axis: Bound, after: Pending | None = None
) -> Future[list[dist.Work]] | Letters:
    """Starts to receive a tensor from, and to send one to, each of some ranks of `axis`.

    Sends between two ranks arrive in the order in which they were started. They are started on a thread of their own,
    because gloo begins to copy at once and would hold up the compute.
    """
    if isinstance(axis, LockstepAxis):
        if after is not None:
            after.wait()
        return _post(received, sent, axis)
    group = axis.group or dist.group.WORLD  # now: by the time of a late start there may be another default group
    transfers: list[tuple[Callable[..., Any], int, Tensor]]
    transfers = [(dist.irecv, rank, x) for rank, x in received.items()]
    transfers += [(dist.isend, rank, x) for rank, x in sent.items()]

    def start() -> list[dist.Work]:
        if after is not None:
            after.wait()
        works = []
        while transfers:  # emptied, so that nothing here keeps the tensors alive
            transfer, rank, x = transfers.pop(0)
            works.append(transfer(x, axis.global_rank(rank), group=group))
        return [work for work in works if work is not None]

    return _STARTER.submit(start)


def _post(received: dict[int, Tensor], sent: dict[int, Tensor], axis: LockstepAxis) -> Letters:
    """The same in lockstep: sends copies, one for all ranks that are sent the same tensor."""
    copies, me = {id(x): x.clone() for x in sent.values()}, axis.global_rank(axis.rank)
    for rank, x in sent.items():
        axis.hub.send(me, axis.global_rank(rank), copies[id(x)])
    return Letters(Letter(axis.hub, axis.hub.expect(axis.global_rank(rank), me), x) for rank, x in received.items())


def _tell(axis: Bound, collective: str, label: Label, num_elements: int, tensor: Tensor) -> None:
    if isinstance(axis, ProcessAxis):
        HERE.start(label)
    if axis.observe is not None:
        axis.observe(CommRecord(collective, axis.name, label, num_elements, num_elements * tensor.element_size()))


# --- collectives as nodes of a captured graph (ProcessAxis and AbstractAxis) -----------------------------------------------


@dataclass(frozen=True, slots=True)
class TracedAxis:
    """A rank on an axis, by what a graph can hold: numbers, the name of the axis and that of the group.

    The collectives below are traced into a graph and never run as they stand. On gloo they are all-to-alls, and a sum in
    rank order; on NCCL the named ones.
    """

    size: int
    rank: int
    group_name: str
    is_nccl: bool
    name: str = "data"

    @classmethod
    def of(cls, axis: ProcessAxis | AbstractAxis, device: torch.device, *, name: str | None = None) -> Self:
        """That of an axis, which may go by another name."""
        name = name or axis.name
        if isinstance(axis, AbstractAxis):
            return cls(axis.size, axis.rank, name, axis.backend == "nccl", name)
        group = axis.group or (dist.group.WORLD if axis.size > 1 else None)
        return cls(axis.size, axis.rank, "" if group is None else group.group_name, device.type == "cuda", name)

    def all_gather(self, shard_S: Tensor) -> Tensor:
        """The shards of all ranks joined in rank order, S → P. *Collective:* sends (W-1)/W · P."""
        if self.size == 1 or not shard_S.numel():
            return shard_S
        if self.is_nccl:
            return _wait(_ops.all_gather_into_tensor(shard_S, self.size, self.group_name))
        return self._all_to_all(shard_S.repeat(self.size))

    def reduce_scatter(self, full_P: Tensor) -> Tensor:
        """This rank's shard of the sum over ranks, P → S. *Collective:* sends (W-1)/W · P."""
        if self.size == 1 or not full_P.numel():
            return full_P
        if self.is_nccl:
            return _wait(_ops.reduce_scatter_tensor(full_P, "sum", self.size, self.group_name))
        return in_order(torch.split(self._all_to_all(full_P), full_P.numel() // self.size))

    def all_reduce(self, full_P: Tensor) -> Tensor:
        """The sum over ranks, in rank order. *Collective:* sends 2(W-1)/W · P."""
        if self.size == 1 or not full_P.numel():
            return full_P
        if self.size == 2 or self.is_nccl:
            return _wait(_ops.all_reduce(full_P, "sum", self.group_name))
        return self.all_gather(self.reduce_scatter(full_P))

    def stack(self, x: Tensor) -> Tensor:
        """The small tensors of all ranks along a new first dimension. *Collective:* sends (W-1) · numel."""
        if self.size == 1:
            return x[None]
        rows = _wait(_ops.all_gather_into_tensor(x.reshape(-1), self.size, self.group_name))
        return rows.view(self.size, *x.shape)

    def all_to_all(self, rows_WN: Tensor) -> Tensor:
        """Row r of every rank, in rank order, on rank r. *Collective:* sends (W-1) · N."""
        if self.size == 1 or not rows_WN.numel():
            return rows_WN
        return self._all_to_all(rows_WN.reshape(-1)).view(rows_WN.shape)

    def _all_to_all(self, x: Tensor) -> Tensor:
        numels = [x.numel() // self.size] * self.size
        return _wait(_ops.all_to_all_single(x, numels, numels, self.group_name))


_ops = torch.ops._c10d_functional


def in_order(summands: Sequence[Tensor]) -> Tensor:
    """The sum, from the first to the last: of ranks in rank order it has the bits that real ranks give."""
    return functools.reduce(operator.add, summands)


def _wait(x: Tensor) -> Tensor:
    waited: Tensor = _ops.wait_tensor(x)
    return waited


def collective_that_raised(error: BaseException) -> str | None:
    """The name of the node of a graph that an error comes from, if it is a collective (or the wait for one)."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        operator = frame.f_locals.get("self")
        if getattr(operator, "namespace", None) == _ops.name:
            return str(operator._opname)  # type: ignore[union-attr]
    return None


# --- whole collectives, on either axis ---------------------------------------------------------------------------


def all_gather(shard: Tensor, axis: Axis, *, label: Label = GATHER) -> Tensor:
    """The shards of all ranks joined in rank order: S → P (`Sim`: [W, S] → [W, P]). *Collective:* sends (W-1)/W · P."""
    if isinstance(axis, Sim):
        return reference.all_gather(shard)
    shard = shard.contiguous()
    return start_all_gather(shard, shard.new_empty(shard.numel() * axis.size), axis, label=label).wait()


def reduce_scatter(full: Tensor, axis: Axis) -> Tensor:
    """This rank's shard of the mean over ranks: P → S (`Sim`: [W, P] → [W, S]). *Collective:* sends (W-1)/W · P."""
    if isinstance(axis, Sim):
        return reference.reduce_scatter(full, "mean")
    shard = start_reduce_scatter(full.contiguous(), axis).wait()
    return shard * (1 / axis.size)


def all_to_all(rows: Tensor, axis: Axis, *, label: Label = REDUCE) -> Tensor:
    """Row r of every rank, in rank order, on rank r: (W, N) → (W, N) (`Sim`: [W, W, N] → [W, W, N]). *Collective.*"""
    if isinstance(axis, Sim):
        return rows.transpose(0, 1).contiguous()
    return start_all_to_all(rows.contiguous(), axis, label=label).wait()


def stack(x: Tensor, axis: Bound, *, label: Label = OTHER) -> Tensor:
    """The small tensors of all ranks, stacked along a new first dimension. *Collective:* sends (W-1) · numel."""
    return start_stack(x, axis, label=label).wait()


def broadcast(x: Tensor, axis: Bound, *, source: int = 0, label: Label = OTHER) -> Tensor:
    """Overwrites `x` with rank `source`'s and returns it. *Collective:* the source sends numel to each other rank."""
    if axis.size > 1 and x.numel():
        _tell(axis, "broadcast", label, x.numel() * (axis.size - 1) * (axis.rank == source), x)
        if isinstance(axis, LockstepAxis):
            others = [rank for rank in range(axis.size) if rank != source]
            is_source = axis.rank == source
            works = _post({} if is_source else {source: x}, dict.fromkeys(others, x) if is_source else {}, axis)
            return Pending(label, works, lambda: x).wait()
        try:
            dist.broadcast(x, axis.global_rank(source), group=axis.group)
        except RuntimeError as error:
            raise failed(label, error) from error
    return x


def exchange(value: Any, axis: Bound, *, label: Label = OTHER) -> list[Any]:
    """Every rank's small Python value, in rank order; for start-up checks.

    *Collective:* every rank of `axis`; sends the number of bytes that it is packed to, and as many as the longest of all.

    Args:
        value: made of None, numbers, strings, bytes, and tuples, lists, dicts and sets of these. Nothing that arrives can name a
            class or a function (`fzero.common.pickles`).
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


def aside(value: int, axis: Bound, *, seconds: float) -> list[int] | None:
    """Every rank's number, in rank order, outside of the order of collectives; None unless all ask within `seconds`.

    For a rank that does not know whether the others are where it is: it sends nothing, and reads the job's store.
    """
    if axis.size == 1:
        return [value]
    if isinstance(axis, LockstepAxis):
        return axis.hub.aside(axis.global_rank(axis.rank), value)
    store: Any = dist.distributed_c10d._get_default_store()
    rank = axis.global_rank(axis.rank)
    number = store.add(f"fzero-aside/{rank}", 1)  # how often this rank has asked
    keys = [f"fzero-aside/{number}/{axis.global_rank(other)}" for other in range(axis.size)]
    store.set(keys[axis.rank], str(value))
    end = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > end:
            store.delete_key(keys[axis.rank])
            return None
        time.sleep(0.002)
    return [int(store.get(key)) for key in keys]


def swap(
    received: Sequence[tuple[int, Tensor]],
    sent: Sequence[tuple[int, Tensor]],
    axis: ProcessAxis,
    *,
    label: Label = OTHER,
) -> None:
    """Receives tensors from some ranks, and sends tensors to some; returns when all have arrived.

    *Collective* of the ranks that are named only: what one sends another must receive, in the same order for each pair of
    ranks. A rank that has nothing to send or to receive need not call it. Sends the elements of `sent`.

    Args:
        received: memory to be written, each with the rank that it comes from; contiguous.
        sent: what is sent, each with the rank that it goes to; contiguous, and the same tensor may go to several ranks.
    """
    for _, x in sent:
        _tell(axis, "swap", label, x.numel(), x)
    transfers = [
        dist.P2POp(transfer, x, axis.global_rank(rank), axis.group)
        for transfer, pairs in ((dist.irecv, received), (dist.isend, sent))
        for rank, x in pairs
        if x.numel()
    ]
    if not transfers:
        return
    try:
        works = dist.batch_isend_irecv(transfers)
    except RuntimeError as error:
        raise failed(label, error) from error
    pending = Pending(label, works, lambda: transfers[0].tensor)
    try:
        pending.end()
    except CollectiveError:
        abandon([pending])
        raise
