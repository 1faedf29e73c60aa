"""Who keeps a collective waiting, and what does each rank do meanwhile? Asked when a timeout has passed.

1. A rank counts the collectives that it starts and knows for which it waits (`HERE`); that is all that a step pays.
2. Each rank has a *watch*: a thread that looks once a second, and only where nothing has moved, whether the job's store has
   an alarm. A rank whose wait times out sets it. On CUDA nothing waits on the host, and the watch sets it before NCCL ends
   the process.
3. Then all watches answer with place and stack. Of a rank that does not answer, for C code holds its interpreter, another
   one on the same host asks for the stack by a signal that `faulthandler` answers without the interpreter.
4. The first to ask tells who is missing, and everyone's stack on its stderr; all raise with the same lines.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Protocol

from fzero.sent import Label
from fzero.stacks import WATCH, answer_no_signals, answer_signals, identity_of, stack_here, stack_of

TICK = 1.0  # seconds between two looks of a watch
SILENT = 10.0  # seconds after which a rank is taken for one that cannot answer
PATIENCE = 20.0  # seconds that a report waits for answers at the most


class Store(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(slots=True)
class Progress:
    """How far this process has come."""

    num_steps: int = 0
    number: int = 0
    """Collectives started in this step."""
    label: Label | None = None
    """Of the last one."""
    waits: dict[int, Label | str] = field(default_factory=dict)
    """What threads wait for."""
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the host has waited for collectives since the process began, by their purpose."""
    call: str | None = None
    """Where this rank waits for the others to make the same call (`fzero.meeting`)."""

    def next_step(self) -> None:
        self.num_steps, self.number = self.num_steps + 1, 0

    def start(self, label: Label) -> None:
        self.number, self.label = self.number + 1, label


HERE = Progress()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says of itself when it is asked, or another one says of it (`is_silent`)."""

    rank: int
    host: str
    pid: int
    place: tuple[int, int]
    """Step, and number of collectives started in it."""
    doing: str
    waits: bool
    stack: str
    is_silent: bool = False

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def where(label: Label | str | None, place: tuple[int, int]) -> str:
    """A collective by its label and its number.

    >>> where(Label("gather", "blocks.0/float32", "forward"), (3, 5))
    'gather blocks.0/float32 (forward, collective 5 of step 3)'
    """
    if label is None:
        return "the start"
    phase = f"{label.phase}, " if isinstance(label, Label) and label.phase else ""
    return f"{label} ({phase}collective {place[1]} of step {place[0]})"


def summary(answers: Sequence[Answer], world_size: int) -> list[str]:
    """Who is missing, and what all do.

    >>> waiting = Answer(0, "a", 7, (2, 5), "waiting for gather x", True, "")
    >>> busy = Answer(1, "a", 8, (2, 4), "in no collective, the last was gather w", False, "")
    >>> print("\\n".join(summary([waiting, busy], 3)))
    rank 1 (a, pid 8) has not come: in no collective, the last was gather w
    rank 2 has not come and does not answer: its process has ended, or its host cannot be reached
    rank 0: waiting for gather x
    """
    furthest = max((answer.place for answer in answers if not answer.is_silent), default=(0, 0))
    behind = [answer for answer in answers if answer.is_silent or answer.place < furthest]
    late = [answer for answer in answers if not answer.waits] or behind
    lines = [f"{answer.who} has not come: {answer.doing}" for answer in late]
    ended = "does not answer: its process has ended, or its host cannot be reached"
    silent = {*range(world_size)} - {answer.rank for answer in answers}
    lines += [f"rank {rank} has not come and {ended}" for rank in sorted(silent)]
    if not lines:
        lines = ["all ranks have come to the same place, so look at the network between them"]
    others: defaultdict[str, list[int]] = defaultdict(list)
    for answer in answers:
        if answer not in late:
            others[answer.doing].append(answer.rank)
    return lines + [f"{ranks_of(found)}: {doing}" for doing, found in others.items()]


def ranks_of(numbers: Iterable[int]) -> str:
    """Ranks in words.

    >>> ranks_of([4]), ranks_of([0, 1, 2, 5])
    ('rank 4', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    told = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {told}"


def stacks(answers: Sequence[Answer]) -> str:
    """The stacks of all, equal ones once."""
    by_stack: defaultdict[str, list[int]] = defaultdict(list)
    for answer in answers:
        by_stack[answer.stack].append(answer.rank)
    return "\n".join(f"fzero: the stack of {ranks_of(ranks)}:\n{stack}" for stack, ranks in by_stack.items())


class Watch:
    """Answers for this rank of a job, and reports when a collective of it does not come back.

    Args:
        store: of the job, with a connection of its own.
        is_stuck: whether the device does not get on with its work; asked where nothing has moved for `seconds`.
        seconds: after which a rank that waits for its device sets the alarm.
        each_tick: called once a second while nothing moves.
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
        self._file, self._has_waited = answer_signals(), False
        store.set(f"who/{rank}", json.dumps(identity_of(self._file)))
        self._thread = threading.Thread(target=self._run, name=WATCH, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch. Before the interpreter does: a thread in a call of the store would abort the process then."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        if self._file is not None:
            answer_no_signals(self._file)
            self._file = None

    def _run(self) -> None:
        before, since = (0, 0), time.monotonic()
        while not self._stopped.wait(TICK):
            now = (HERE.num_steps, HERE.number)
            if now != before:
                before, since = now, time.monotonic()
                continue
            with suppress(RuntimeError):  # the store's, which has ended with the job
                self.each_tick()
                if self.store.check(["alarm"]):
                    self._answer()
                    self._ask_silent()
                    return
                is_late = time.monotonic() - since > self.seconds
                if is_late and self.is_stuck is not None and self.is_stuck():
                    told = "\n  ".join(["", *self.report()])
                    print(f"fzero: the device waits since {self.seconds:.0f} s:{told}", file=sys.stderr, flush=True)
                    return

    def report(self) -> list[str]:
        """Sets the alarm, waits for the answers, and tells who is missing; the first to ask also writes all stacks to stderr."""
        is_first = self.store.add("alarm", 1) == 1
        self._answer()
        deadline = time.monotonic() + PATIENCE
        if not is_first:
            while not self.store.check(["summary"]) and time.monotonic() < deadline + 2:
                time.sleep(0.1)
            return _text(self.store, "summary").splitlines()
        missing = {*range(self.world_size)}
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not self.store.check([f"answer/{rank}"])}
            time.sleep(0.1)
        answers = [
            answer_of(_text(self.store, f"answer/{rank}")) for rank in range(self.world_size) if rank not in missing
        ]
        print(stacks(answers), file=sys.stderr, flush=True)
        lines = summary(answers, self.world_size)
        self.store.set("summary", "\n".join(lines))
        return lines

    def follows(self, seconds: float) -> bool:
        """Whether another rank has set the alarm; waits a moment for it, once."""
        deadline = time.monotonic() + (0 if self._has_waited else seconds)
        self._has_waited = True
        while not (found := self.store.check(["alarm"])) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _answer(self) -> None:
        with self._lock:
            if self._has_answered:
                return
            self._has_answered = True
        place, waits = (HERE.num_steps, HERE.number), next(iter(HERE.waits.values()), None)
        doing = f"in no collective, the last was {where(HERE.label, place)}"
        if waits is not None:
            doing = f"waiting for {where(waits, place)}"
        elif self.is_stuck is not None and self.is_stuck():
            waits, doing = HERE.label, f"waiting for its device, the last was {where(HERE.label, place)}"
        identity = identity_of(None)
        answer = Answer(self.rank, identity["host"], identity["pid"], place, doing, waits is not None, stack_here())
        self.store.set(f"answer/{self.rank}", json.dumps(asdict(answer)))

    def _ask_silent(self) -> None:
        """Has ranks of this host that cannot answer write their stacks, if no rank before this one is there to do so."""
        if self._stopped.wait(SILENT):
            return
        mine, silent = identity_of(None), {}
        for rank in range(self.world_size):
            its = json.loads(_text(self.store, f"who/{rank}") or "{}")
            if its.get("host") != mine["host"] or its.get("pids") != mine["pids"]:
                continue
            if not self.store.check([f"answer/{rank}"]):
                silent[rank] = its
            elif rank < self.rank:
                return
        for rank, its in silent.items():
            stack = stack_of(its)
            doing = "cannot answer, for code in C holds its interpreter"
            answer = Answer(rank, its["host"], its["pid"], (0, 0), doing, False, stack, is_silent=True)
            if stack:
                self.store.set(f"answer/{rank}", json.dumps(asdict(answer)))


def answer_of(text: str) -> Answer:
    """What `Watch` wrote."""
    told = json.loads(text)
    return Answer(**told | {"place": tuple(told["place"])})


def _text(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
