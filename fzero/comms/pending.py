"""`Pending`: collectives under way, and those that a step left behind when it raised."""

from __future__ import annotations

import atexit
import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import current_thread, get_ident
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.comms.axes import CollectiveError
from fzero.comms.hangs.failures import failed
from fzero.comms.hangs.progress import PROGRESS
from fzero.comms.records import Label

if TYPE_CHECKING:
    from fzero.comms.lockstep import Hub

SENDER = "fzero-send"
"""The first part of the names of threads that start sends instead of the caller."""
_ABANDONED: list[Pending] = []


@dataclass(slots=True)
class Pending:
    """A collective that has been started; call `wait()` once for its result.

    Holds the tensors that the collective reads (`reads`, `works`) and writes, so that
    they live until it ends.

    Attributes:
        label: its purpose.
        works: the sends and receives to wait for.
        last: makes the result when `works` have ended; None if the result is in `out`
            by then.
        out: the tensor that will hold the result, so that the next collective can get
            it before this one has ended; None if there is none yet. In a graph it is
            the result.
    """

    label: Label
    works: Sequence[dist.Work] | Future[list[dist.Work]] | Letters
    last: Callable[[], Tensor] | None
    out: Tensor | None = None
    reads: tuple[Tensor | Pending | None, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the result is in `out` now, as always in a graph."""
        return not self.works and self.last is None

    def wait(self) -> Tensor:
        """The result. Raises `CollectiveError` when another rank has died or the
        timeout has passed.
        """
        if self.works:
            self.end()
        return self.finish()

    def finish(self) -> Tensor:
        """The result, after `end`."""
        if self.last is not None:
            return self.last()
        assert self.out is not None
        return self.out

    def then(self, function: Callable[[Tensor], Tensor], out: Tensor | None = None) -> Pending:
        """The same collective, whose result is `function(result)`, written to `out`.
        The function is called now if this one has ended."""
        if self.has_ended:
            return ended(function(self.finish()), self.label)
        return Pending(self.label, self.works, lambda: function(self.finish()), out)

    def end(self) -> None:
        """Waits until everything has been sent and received."""
        if not self.works:  # always true in a graph, which cannot contain the lines below
            return
        thread, began = get_ident(), time.perf_counter()
        PROGRESS.waits[thread] = self.label
        try:
            with profiler_range("wait", self.label):
                for work in self.works.result() if isinstance(self.works, Future) else self.works:
                    work.wait()
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise failed(self.label, error) from error
        finally:
            PROGRESS.waits.pop(thread, None)
            # that thread waits instead of the caller
            if not current_thread().name.startswith(SENDER):
                PROGRESS.waited[self.label.purpose] += time.perf_counter() - began


def ended(x: Tensor, label: Label) -> Pending:
    """A collective whose result exists already."""
    return Pending(label, (), None, x)


@dataclass(frozen=True, slots=True)
class Letter:
    """A tensor that a rank in lockstep has sent or will send."""

    hub: Hub
    message: tuple[int, int, int]
    target: Tensor

    def wait(self) -> None:
        self.target.copy_(self.hub.receive(self.message))


class Letters(tuple[Letter, ...]):
    """The tensors that one collective in lockstep receives."""


def abandon(pendings: Sequence[Pending]) -> None:
    """Keeps collectives that nobody will wait for, until `settle`.

    If a send is freed early, gloo forgets it, and the receiving rank waits for ever.
    Before gloo frees a receive, it waits for the sending rank.
    """
    _ABANDONED.extend(pending for pending in pendings if not isinstance(pending.works, Letters))


def settle() -> None:
    """Waits until abandoned collectives have ended, because they write into tensors
    that are used again.
    """
    while _ABANDONED:
        with suppress(CollectiveError):
            _ABANDONED.pop(0).end()


def has_abandoned() -> bool:
    """Whether there are abandoned collectives that have not been settled."""
    return bool(_ABANDONED)


def drop_abandoned() -> None:
    """Drops abandoned collectives, which would keep the connections of their group
    open.
    """
    for pending in _ABANDONED:
        if isinstance(pending.works, Future):
            pending.works.cancel()  # otherwise it could start in a group that is joined later
    _ABANDONED.clear()


@atexit.register
def _never_free() -> None:
    """Keeps abandoned collectives at the end of a process, because freeing them would
    wait for other ranks.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_ABANDONED))
