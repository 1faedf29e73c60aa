"""The watch over the default process group: how long a collective waits, and the error
when it does not end.

`keep_watch` starts a thread that answers questions about this rank
(`fzero.comms.hangs.watchdog`), and makes the meeting place of the ranks
(`fzero.comms.hangs.meeting`). `failed` asks all ranks where they are, and makes a
`CollectiveError` that names the missing ones.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from fzero.comms.axes import CollectiveError, ProcessAxis, RankAxis
from fzero.comms.hangs.meeting import Meeting, Notified
from fzero.comms.hangs.progress import PROGRESS, LoneCallError
from fzero.comms.hangs.watchdog import Watchdog
from fzero.comms.records import Label

if TYPE_CHECKING:
    from fzero.comms.hangs.meeting import Meeting
    from fzero.comms.hangs.watchdog import Watchdog

TIMEOUT = timedelta(minutes=10)
TIMEOUTS = {"FZERO_TIMEOUT": "seconds", "DEEPSPEED_TIMEOUT": "minutes"}
"""The variables that set how long a collective waits, with their units; the first that
is set counts.
"""
_PROBE = 0x70726F62
"""The tag of a message that tests whether a rank is alive; no rank receives it."""
_PROBES: list[Any] = []
"""The sends of these messages. They never end."""


class _Watch(NamedTuple):
    group: ref[dist.ProcessGroup]
    watchdog: Watchdog
    meeting: Meeting


_WATCHES: list[_Watch] = []
"""The watch of the present default group, if there is one."""


def timeout_of(environment: Mapping[str, str]) -> timedelta:
    """How long a collective waits for a rank that does not come, read from environment
    variables.

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
                raise ValueError(
                    f"{name}: must be a positive number of {unit}, got {environment[name]!r}"
                )
            return given
    return TIMEOUT


def timeout_of_group(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group waits."""
    device = torch.device("cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu")
    options: Any = getattr(group._get_backend(device), "options", None)
    found: timedelta = getattr(options, "_timeout", TIMEOUT)
    return found


def failed(label: Label | str, error: Exception) -> CollectiveError:
    """The error to raise instead of the one of torch.distributed; asks all ranks where
    they are, to name the missing ones.
    """
    PROGRESS.waits.setdefault(get_ident(), label)  # a captured step did not set it
    cause = f"torch.distributed said: {error}"
    with suppress(RuntimeError):  # from a store that ended with its rank
        if _WATCHES and _WATCHES[-1].meeting.store.check(["alone"]):
            return CollectiveError(
                f"{label}: {_WATCHES[-1].meeting.store.get('alone').decode()}. {cause}"
            )
    is_late = re.search(r"time(d|-| )*out", str(error), re.IGNORECASE) is not None
    report = "\n  ".join(["", *_WATCHES[-1].watchdog.ask(is_late=is_late)]) if _WATCHES else ""
    if is_late:
        return CollectiveError(
            f"{label}: the collective did not come back in time. {cause}{report}"
        )
    return CollectiveError(
        f"{label}: the collective failed; most often another rank died, left the job or did not "
        f"arrive in time, so look for the first error among the logs of all ranks. {cause}{report}"
    )


class Explained(NamedTuple):  # a generator would cost twice as much
    """Inside, an error of torch.distributed becomes one that says where all ranks are."""

    label: Label | str

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            raise failed(self.label, error) from error


def keep_watch() -> None:
    """Starts the watch of the default group, unless it is running already."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_world_size() == 1 or (_WATCHES and _WATCHES[-1].group() is group):
        return
    end_watch()
    PROGRESS.num_steps = PROGRESS.number = 0  # ranks of the job may have done other things before
    PROGRESS.places = {}
    own: Any = dist.distributed_c10d._get_default_store()
    # A second connection: a thread that waits for a key blocks all other calls on its connection.
    store = dist.distributed_c10d.PrefixStore(f"fzero-watch-{group.group_name}", own.clone())
    on_cuda = "nccl" in str(dist.get_backend_config())
    limit = timeout_of_group(group).total_seconds()
    # NCCL ends the process at its own timeout, which starts a little before the host stops.
    seconds = limit - min(30.0, limit / 4) if on_cuda else float("inf")
    # in the watchdog's thread the present one is 0
    own_device = torch.cuda.current_device() if on_cuda else 0
    is_stuck = (lambda: not torch.cuda.default_stream(own_device).query()) if on_cuda else None
    rank, answer = dist.get_rank(), Notified(store, dist.get_rank()).answer
    watchdog = Watchdog(
        store, rank, dist.get_world_size(), is_stuck=is_stuck, seconds=seconds, each_tick=answer
    )
    _WATCHES.append(_Watch(ref(group), watchdog, Meeting(store, rank, _is_gone)))


@atexit.register
def end_watch() -> None:
    """Ends the watch of the default group, if there is one."""
    while _WATCHES:
        _WATCHES.pop().watchdog.stop()


def store_barrier(call: str, axis: RankAxis) -> None:
    """Returns when every rank of the axis has come to this call; called at the start of
    calls that all ranks must make.

    *Collective:* every rank of `axis`; sends some numbers to the job's store.

    Raises:
        CollectiveError: the others are in another call and will not come, or did not
            come in time.
    """
    if not isinstance(axis, ProcessAxis) or axis.size == 1:
        return
    keep_watch()  # some ranks may have started theirs earlier, for a part of the job
    group = axis.group or dist.group.WORLD
    assert group is not None
    ranks = [axis.global_rank(rank) for rank in range(axis.size)]
    PROGRESS.waits[get_ident()] = call
    try:
        _WATCHES[-1].meeting(call, group.group_name, ranks, timeout_of_group(group).total_seconds())
    except LoneCallError as error:
        raise CollectiveError(str(error)) from None
    except (TimeoutError, RuntimeError) as error:
        raise failed(call, error) from error
    finally:
        PROGRESS.waits.pop(get_ident(), None)


def drop_probes() -> None:
    """Frees the messages to ranks that do not answer, which keep the connections of a
    group open.
    """
    _PROBES.clear()


def _is_gone(rank: int) -> bool:
    """Whether the connection to a rank is closed."""
    if "gloo" not in str(dist.get_backend_config()):
        return False
    try:
        _PROBES.append(dist.isend(torch.zeros(1, dtype=torch.uint8), rank, tag=_PROBE))
    except RuntimeError:
        return True
    return False
