"""The watchdog: when a collective fails, it reports which ranks are missing, and what
each rank is doing.

1. A rank counts the collectives that it starts, and records the one that it waits for
  (`PROGRESS`). A step has no other overhead.
2. Each rank has a watchdog thread. It looks for an alarm in the job's store once a
   second, or every three seconds while the rank starts collectives. A rank whose
   collective fails sets the alarm. On CUDA the host does not wait in a collective, so
   the watchdog sets the alarm before NCCL ends the process.
3. After an alarm all watchdogs answer with the rank's place and stack. For a process
   that has ended or is stopped another rank on its host answers. If C code holds the
   interpreter of a rank, another rank on its host sends it a signal, which
   `faulthandler` answers with the stack, without the interpreter. A rank that ends with
   an error reports that before it ends.
4. The first rank that asks writes the report of the missing ranks. After a timeout it
   also prints all stacks to its stderr. All ranks raise an error with the same report.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fzero.comms.hangs.progress import PROGRESS
from fzero.comms.hangs.thread_dumps import (
    WATCH,
    answer_no_signals,
    answer_signals,
    fate_of,
    identity_of,
    stack_here,
    stack_of,
)
from fzero.comms.records import Label

TICK = 1.0  # seconds between two reads of the store by a watchdog
SILENT = 10.0  # seconds without an answer after which a rank counts as one that cannot answer
MOVING = 3.0  # the same as TICK while this rank starts collectives
PATIENCE = 20.0  # the longest time that a report waits for answers, in seconds
# the same as PATIENCE after a lost connection, which one rank may see long before the others
HASTE = 8.0
# the longest time for which the rank that keeps the store stays until the others have read the
# report
HEARD = 8.0
# after it finds a rank that is gone, seconds in which a report looks for more such ranks
MORE = 1.0
# seconds between two checks for something that is expected soon, such as the end of a process
AGAIN = 0.3


class Store(Protocol):
    """The methods of a torch.distributed store that are used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's answer about itself, or another rank's answer about that rank
    (`is_silent`).
    """

    rank: int
    host: str
    pid: int
    place: tuple[int, int]
    """The step, and the number of collectives started in it."""
    doing: str
    waits: bool
    stack: str
    is_silent: bool = False
    is_gone: bool = False
    """Whether its process has ended or is stopped."""

    @property
    def who(self) -> str:
        return f"{PROGRESS.name_of(self.rank)} ({self.host}, pid {self.pid})"


def where(label: Label | str | None, place: tuple[int, int]) -> str:
    """A collective in words: its label and its number.

    >>> where(Label("gather", "blocks.0/float32", "forward"), (3, 5))
    'gather blocks.0/float32 (forward, collective 5 of step 3)'
    """
    if label is None:
        return "the start"
    phase = f"{label.phase}, " if isinstance(label, Label) and label.phase else ""
    return f"{label} ({phase}collective {place[1]} of step {place[0]})"


def summary(answers: Sequence[Answer], world_size: int) -> list[str]:
    """The report: the missing ranks, and what each rank does.

    >>> waiting = Answer(0, "a", 7, (2, 5), "waiting for gather x", True, "")
    >>> busy = Answer(1, "a", 8, (2, 4), "in no collective, the last was gather w", False, "")
    >>> print("\\n".join(summary([waiting, busy], 3)))
    rank 1 (a, pid 8) has not come: in no collective, the last was gather w
    rank 2 has not come and does not answer: its process has ended or is stopped, or its host cannot be reached
    rank 0: waiting for gather x

    If a rank is gone, no other rank counts as missing, even if it is behind:

    >>> stopped = Answer(
    ...     2, "a", 9, (0, 0), "its process is stopped", False, "", is_silent=True, is_gone=True
    ... )
    >>> print("\\n".join(summary([waiting, busy, stopped], 4)))
    rank 2 (a, pid 9) has not come: its process is stopped
    rank 0: waiting for gather x
    rank 1: in no collective, the last was gather w
    """
    furthest = max((answer.place for answer in answers if not answer.is_silent), default=(0, 0))
    silent = {*range(world_size)} - {answer.rank for answer in answers}
    gone = [answer for answer in answers if answer.is_gone]
    behind = [
        answer for answer in answers if not silent and (answer.is_silent or answer.place < furthest)
    ]
    late = gone or [answer for answer in answers if not answer.waits] or behind
    lines = [f"{answer.who} has not come: {answer.doing}" for answer in late]
    ended = "does not answer: its process has ended or is stopped, or its host cannot be reached"
    lines += [
        f"{PROGRESS.name_of(rank)} has not come and {ended}" for rank in sorted(silent) if not gone
    ]
    if not lines:
        lines = ["all ranks have come to the same place, so look at the network between them"]
    others: defaultdict[str, list[int]] = defaultdict(list)
    for answer in answers:
        if answer not in late:
            others[answer.doing].append(answer.rank)
    return lines + [f"{ranks_of(found)}: {doing}" for doing, found in others.items()]


def ranks_of(numbers: Iterable[int]) -> str:
    """A list of ranks in words.

    >>> ranks_of([4]), ranks_of([0, 1, 2, 5])
    ('rank 4', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def stacks(answers: Sequence[Answer]) -> str:
    """The stacks of all ranks; equal stacks are printed once."""
    by_stack: defaultdict[str, list[int]] = defaultdict(list)
    for answer in answers:
        by_stack[answer.stack].append(answer.rank)
    return "\n".join(
        f"fzero: the stack of {ranks_of(ranks)}:\n{stack}" for stack, ranks in by_stack.items()
    )


class Watchdog:
    """Answers for this rank of a job, and reports when one of its collectives does not
    end.

    Args:
        store: the store of the job, over a connection of its own.
        is_stuck: returns whether the device is still busy; called when this rank has
            started no collective for `seconds`.
        seconds: the time after which a rank that waits for its device sets the alarm.
        each_tick: called once a second while this rank starts no collectives.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        is_stuck: Callable[[], bool] | None = None,
        seconds: float = float("inf"),
        each_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.rank, self.world_size, self.each_tick = store, rank, world_size, each_tick
        self.is_stuck, self.seconds = is_stuck, seconds
        self._stopped, self._has_answered, self._lock = threading.Event(), False, threading.Lock()
        self._file = answer_signals()
        self._report: list[str] = []  # the report of the first rank that asks
        self._keeper: dict[str, Any] | None = None
        """The identity of rank 0, if it keeps the job's store: when rank 0 has ended,
        the store cannot be asked any more.
        """
        store.set(f"who/{rank}", json.dumps(identity_of(self._file)))
        deadline = time.monotonic() + 1
        while rank_0_keeps_store() and not self._finds_keeper() and time.monotonic() < deadline:
            # rank 0 must be known before it can end; the thread continues to look for it
            time.sleep(0.01)
        self._thread = threading.Thread(target=self._run, name=WATCH, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. It must end before the interpreter: a thread in a call of
        the store would abort the process.
        """
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        # At a normal end the store may be gone already, and torch would log that on stderr.
        if error is not None and not self._has_answered and not self._thread.is_alive():
            line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            self._answer_for(self.rank, identity_of(None), f"it has left with {line}", is_gone=True)
        if self._file is not None:
            answer_no_signals(self._file)
            self._file = None

    def _run(self) -> None:
        before, since = (0, 0), time.monotonic()
        looked = since
        while not self._stopped.wait(
            TICK if self._keeper is not None or not rank_0_keeps_store() else AGAIN
        ):
            now = (PROGRESS.num_steps, PROGRESS.number)
            moves = now != before
            if moves:
                before, since = now, time.monotonic()
                if since - looked < MOVING:
                    continue
            with suppress(RuntimeError):  # the store has ended with the job
                looked = time.monotonic()
                if rank_0_keeps_store():
                    self._finds_keeper()
                if not moves:
                    self.each_tick()
                if self.store.check(["alarm"]):
                    self._answer()
                    if not self._hears(SILENT):
                        self._ask_silent()
                        self._hears(PATIENCE)
                    return
                is_late = time.monotonic() - since > self.seconds
                if is_late and self.is_stuck is not None and self.is_stuck():
                    lines = [
                        f"fzero: the device has waited for {self.seconds:.0f} s:",
                        *self.ask(is_late=True),
                    ]
                    print("\n  ".join(lines), file=sys.stderr, flush=True)
                    return

    def ask(self, *, is_late: bool) -> list[str]:
        """The report. If the job's store has ended or does not answer, it names the
        process that keeps the store.
        """
        found: list[str] = []

        def report() -> None:
            with suppress(RuntimeError):
                found.extend(self.report(is_late=is_late))

        thread = threading.Thread(target=report, name=WATCH, daemon=True)
        thread.start()
        # if the process that keeps the store is stopped, a report never ends
        thread.join(PATIENCE + SILENT)
        if found or self._report:
            return found or self._report
        ended = "its process has ended or is stopped, or its host cannot be reached"
        if not rank_0_keeps_store():
            agent = f"the agent on {os.environ.get('MASTER_ADDR')}"
            return [f"the job's store, which {agent} keeps, cannot be reached: {ended}"]
        who, fate = PROGRESS.name_of(0), ""
        if keeper := self._keeper:
            who = f"{who} ({keeper['host']}, pid {keeper['pid']})"
            deadline = time.monotonic() + MORE
            while not (fate := fate_of(keeper)) and time.monotonic() < deadline:
                time.sleep(0.1)
        return [f"{who} has not come: {fate or ended} (it keeps the job's store)"]

    def report(self, *, is_late: bool = True) -> list[str]:
        """Sets the alarm, waits for the answers, and reports the missing ranks.

        After a timeout (`is_late`) the first rank to ask also prints all stacks to
        stderr.
        """
        is_first = self.store.add("alarm", 1) == 1
        self._answer()
        if not is_first:
            self._hears(PATIENCE + 2)
            self._stay_until_heard()
            return self._report
        deadline = time.monotonic() + (PATIENCE if is_late else HASTE)
        answers: dict[int, Answer] = {}
        while len(answers) < self.world_size and time.monotonic() < deadline:
            self._answer_for_gone()
            for rank in {*range(self.world_size)} - {*answers}:
                if text := _text(self.store, f"answer/{rank}"):
                    values = json.loads(text)
                    answers[rank] = Answer(**values | {"place": tuple(values["place"])})
                    if answers[rank].is_gone and not is_late:
                        deadline = min(deadline, time.monotonic() + MORE)
            time.sleep(AGAIN)
        found = [answers[rank] for rank in sorted(answers)]
        if is_late:
            print(stacks(found), file=sys.stderr, flush=True)
        self._report = summary(found, self.world_size)
        self.store.set("summary", "\n".join(self._report))
        self.store.add("heard", 1)
        self._stay_until_heard()
        return self._report

    def _stay_until_heard(self) -> None:
        """If this rank keeps the job's store: waits until all ranks whose processes
        live have read the report.

        A rank that has not answered yet counts, too: on a busy machine it may see the
        lost connection seconds later.
        """
        if self.rank != 0 or not rank_0_keeps_store():
            return
        deadline = time.monotonic() + HEARD
        while time.monotonic() < deadline:
            self._answer_for_gone()
            answers = [_text(self.store, f"answer/{rank}") for rank in range(self.world_size)]
            num_gone = sum(json.loads(answer or "{}").get("is_gone", False) for answer in answers)
            if self.store.add("heard", 0) >= self.world_size - num_gone:
                return
            time.sleep(0.1)

    def _finds_keeper(self) -> bool:
        if self._keeper is None:
            self._keeper = json.loads(_text(self.store, "who/0") or "null")
        return self._keeper is not None

    def _hears(self, seconds: float) -> bool:
        """Waits for the report of the first rank that asks. Returns whether the report
        has come.
        """
        deadline = time.monotonic() + seconds
        while not self._report and time.monotonic() < deadline and not self._stopped.is_set():
            if text := _text(self.store, "summary"):
                with self._lock:
                    if not self._report:
                        self._report = text.splitlines()
                        self.store.add("heard", 1)
            else:
                self._answer_for_gone()
            time.sleep(AGAIN)
        return bool(self._report)

    def _answer(self) -> None:
        with self._lock:
            if self._has_answered:
                return
            self._has_answered = True
        place, waits = (
            (PROGRESS.num_steps, PROGRESS.number),
            next(iter(PROGRESS.waits.values()), None),
        )
        doing = f"in no collective, the last was {where(PROGRESS.label, place)}"
        if waits is not None:
            doing = f"waiting for {where(waits, place)}"
        elif self.is_stuck is not None and self.is_stuck():
            waits, doing = (
                PROGRESS.label,
                f"waiting for its device, the last was {where(PROGRESS.label, place)}",
            )
        mine = identity_of(None)
        answer = Answer(
            self.rank, mine["host"], mine["pid"], place, doing, waits is not None, stack_here()
        )
        self.store.set(f"answer/{self.rank}", json.dumps(asdict(answer)))

    def _answer_for(
        self,
        rank: int,
        its: Mapping[str, Any],
        doing: str,
        *,
        stack: str = "",
        is_gone: bool = False,
    ) -> None:
        """Answers for a rank that cannot answer."""
        answer = Answer(
            rank,
            its["host"],
            its["pid"],
            (0, 0),
            doing,
            False,
            stack,
            is_silent=True,
            is_gone=is_gone,
        )
        with suppress(RuntimeError):
            self.store.set(f"answer/{rank}", json.dumps(asdict(answer)))

    def _identities(self) -> dict[int, dict[str, Any]]:
        """The identities of the processes of all ranks, as far as they are known."""
        keys = [f"who/{rank}" for rank in range(self.world_size)]
        texts = (
            [text.decode() for text in self.store.multi_get(keys)] if self.store.check(keys) else []
        )
        texts = texts or [_text(self.store, key) for key in keys]
        return {rank: json.loads(text) for rank, text in enumerate(texts) if text}

    def _answer_for_gone(self) -> None:
        """Answers for the ranks of this host whose processes have ended or are stopped."""
        for rank, its in self._identities().items():
            if (
                rank != self.rank
                and (fate := fate_of(its))
                and not self.store.check([f"answer/{rank}"])
            ):
                self._answer_for(rank, its, fate, is_gone=True)

    def _ask_silent(self) -> None:
        """Makes silent ranks of this host write their stacks, if this is the first rank
        of the host that can answer.
        """
        mine, silent = identity_of(None), {}
        for rank, its in self._identities().items():
            if its.get("host") != mine["host"] or its.get("pids") != mine["pids"]:
                continue
            if not self.store.check([f"answer/{rank}"]):
                silent[rank] = its
            elif rank < self.rank:
                return
        for rank, its in silent.items():
            if stack := stack_of(its):
                self._answer_for(
                    rank, its, "cannot answer, for code in C holds its interpreter", stack=stack
                )


def rank_0_keeps_store() -> bool:
    """Whether rank 0 keeps the job's store. If not, an agent of torchrun keeps it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _text(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
