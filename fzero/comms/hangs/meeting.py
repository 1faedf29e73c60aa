"""Meetings of ranks before a call that every rank must make. A rank that makes the call
alone gets an error instead of a crash.

For example, one rank saves while the others run a step: they would receive its tensors
as tensors of the step. If the sizes differ, gloo aborts the process in C++. So the
ranks meet first, at the job's store:

1. A rank counts itself under the name of the call, and waits until all ranks are
  counted.
2. After a moment the first of the waiting ranks asks the others where they are. Their
   watchdogs (`fzero.comms.hangs.watchdog`) answer while the rank starts no collectives.
3. A rank will not come if it is in another call, waits for a collective that the asking
   rank has not begun, or has left the job. If this holds for all missing ranks, the
   waiting ones raise.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

from fzero.comms.hangs.progress import PROGRESS, LoneCallError
from fzero.comms.hangs.watchdog import Store, ranks_of, where

MOMENT = 1.0
"""The seconds that a rank waits before it asks the others."""
MOST = 30.0
"""The longest time between two questions, in seconds."""
BARRIER = "torch.distributed.barrier"


class Meeting:
    """The place where the ranks of a job meet. `is_gone` says whether a rank has left
    the job.
    """

    def __init__(self, store: Store, rank: int, is_gone: Callable[[int], bool]) -> None:
        self.store, self.rank, self.is_gone = store, rank, is_gone
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._last: dict[str, str] = {}

    def __call__(self, call: str, group: str, ranks: Sequence[int], timeout: float) -> None:
        """Returns when all ranks have come to this call. *Collective:* sends nothing to
        ranks, some numbers to the store.

        Args:
            group, ranks: the ranks that take part, by the name of their group and by
                their ranks in the job.
            timeout: in seconds.

        Raises:
            LoneCallError: the others will not come. This rank may continue as if it had
                not called.
            TimeoutError: the others may still come, but have not come in time.
        """
        number = self._numbers[group]
        key = f"meet/{group}/{number}/{call}"
        if self.store.add(key, 1) == len(ranks):
            self.store.set(f"{key}/all", "")
            if group in self._last:  # every rank has left that meeting
                for old in (self._last[group], f"{self._last[group]}/all", "alone"):
                    self.store.delete_key(old)
        else:
            PROGRESS.call = key
            try:
                self._wait(key, call, ranks, timeout)
            except BaseException:
                self._withdraw(key)
                raise
            finally:
                PROGRESS.call = None
        self._numbers[group], self._last[group] = number + 1, key

    def _wait(self, key: str, call: str, ranks: Sequence[int], timeout: float) -> None:
        deadline, pause, before = time.monotonic() + timeout, MOMENT, ""
        while not self._has_come(f"{key}/all", pause):
            if self.store.check([f"{key}/alone"]):
                raise LoneCallError(self.store.get(f"{key}/alone").decode())
            if time.monotonic() > deadline:
                raise TimeoutError(f"{call} timed out: not all ranks have come to it")
            if self.store.add(f"{key}/asks", 1) > 1 and not before:  # another rank asks
                continue
            found = self._answers(key, ranks)
            if found is not None and found == before:
                message = (
                    f"{call}: every rank must call it, but {found}; call it on all ranks, "
                    f"not under `if rank == 0:`"
                )
                self.store.set("alone", message)
                self.store.set(f"{key}/alone", message)
                raise LoneCallError(message)
            before, pause = found or " ", min(1.5 * pause, MOST)

    def _has_come(self, key: str, seconds: float) -> bool:
        """Whether all ranks come within so many seconds. (The `wait` of PyTorch's store
        would log a warning at each timeout.)
        """
        pause, deadline = 1e-4, time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        return True

    def _answers(self, key: str, ranks: Sequence[int]) -> str | None:
        """Where the missing ranks are; None while one of them may come."""
        asked, deadline = self.store.add("asks", 1), time.monotonic() + 3 * MOMENT
        left, reasons = {*ranks} - {self.rank}, dict[str, list[int]]()
        while left and time.monotonic() < deadline:
            for rank in [rank for rank in left if self.store.check([f"at/{rank}/{asked}"])]:
                left.remove(rank)
                its = json.loads(self.store.get(f"at/{rank}/{asked}").decode())
                self.store.delete_key(f"at/{rank}/{asked}")
                if its["call"] == key:
                    continue
                reason = _reason(its, (PROGRESS.num_steps, PROGRESS.number))
                if reason is None:
                    return None
                reasons.setdefault(reason, []).append(rank)
            if self.store.check([f"{key}/all"]):
                return None
            time.sleep(0.05 * MOMENT)
        if left:
            if not all(map(self.is_gone, left)):
                return None
            reasons["has left the job"] = sorted(left)
        return "; ".join(_said(found, reason) for reason, found in reasons.items()) or None

    def _withdraw(self, key: str) -> None:
        with suppress(RuntimeError):  # the store may have ended
            if self.store.add(key, -1) <= 0:
                for old in (f"{key}/alone", f"{key}/asks"):
                    self.store.delete_key(old)


def _reason(its: dict[str, object], mine: tuple[int, int]) -> str | None:
    """The reason why a rank will not come, from its answer; None if it may come.

    >>> _reason({"call": None, "waits": "gather a", "place": [2, 7]}, (2, 6))
    'waits for gather a'
    >>> _reason({"call": None, "waits": "gather a", "place": [2, 6]}, (2, 6))
    >>> _reason({"call": None, "waits": BARRIER, "place": [2, 6]}, (2, 6))
    'waits for torch.distributed.barrier'
    >>> _reason({"call": "meet/all/0/evaluate", "waits": None, "place": [2, 6]}, (2, 6))
    'calls evaluate'
    """
    call, waits, place = its["call"], its["waits"], its["place"]
    if isinstance(call, str):
        return f"calls {call.rpartition('/')[2]}"
    assert isinstance(place, list)
    is_ahead = tuple(place) > mine or (waits == BARRIER and tuple(place) == mine)
    return f"waits for {waits}" if waits is not None and is_ahead else None


def _said(ranks: list[int], reason: str) -> str:
    """The ranks and the reason, with the verb in their number.

    >>> _said([1], "waits for gather a"), _said([1, 2], "has left the job")
    ('rank 1 waits for gather a', 'ranks 1-2 have left the job')
    """
    verb, _, rest = reason.partition(" ")
    verb = verb if len(ranks) == 1 else {"waits": "wait", "calls": "call", "has": "have"}[verb]
    return f"{ranks_of(ranks)} {verb} {rest}"


class Notified:
    """Answers other ranks' questions about this rank, each question once."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store, self.rank, self._answered = store, rank, 0

    def answer(self) -> None:
        """Answers a new question, if there is one. Call it when this rank has started
        no collective for a while.
        """
        if not self.store.check(["asks"]) or (asked := self.store.add("asks", 0)) == self._answered:
            return
        self._answered = asked
        place, waits = (
            (PROGRESS.num_steps, PROGRESS.number),
            next(iter(PROGRESS.waits.values()), None),
        )
        waits_for = (
            where(waits, place) if waits is not None else BARRIER if _is_in_barrier() else None
        )
        answer = {"call": PROGRESS.call, "waits": waits_for, "place": place}
        self.store.set(f"at/{self.rank}/{asked}", json.dumps(answer))


def _is_in_barrier() -> bool:
    """Whether the main thread is in a barrier of the program's own."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(6):  # PyTorch wraps `barrier` a few times
        if frame is None:
            break
        if frame.f_code.co_name == "barrier" and frame.f_globals.get("__name__", "").startswith(
            "torch.distributed"
        ):
            return True
        frame = frame.f_back
    return False
