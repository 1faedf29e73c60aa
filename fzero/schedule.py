"""In which order are a step's collectives issued? Every rank must issue the same ones in the same order, or all hang.

The order is a value: a tuple of events. The first step *negotiates* it: before every event the ranks tell each other
what each needs next, the unit declared first is served (in the backward: last), and all take part. So the recorded order is the
same on every rank even when their models branch on data. The steps after it *follow* it:

- a rank that does not need a unit this time takes part in its gather all the same, and reduces zeros for it,
- a rank that needs a unit at a place where the schedule has none raises `ScheduleError`, which names the unit.

`early` is the one schedule transformation of the eager runner: gathers move one unit ahead of their use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class ScheduleError(RuntimeError):
    """A unit ran at a place where the schedule of collectives has no gather for it."""


class Event(NamedTuple):
    """One unit's collectives: `gather` its parameters or `reduce` its gradients; `turn` ends the forward."""

    kind: Literal["gather", "reduce", "turn"]
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}".strip()


TURN = Event("turn")

Run = tuple[str | int | frozenset[str], ...]
"""What runs, so far as its order of collectives may differ: `("forward", "train")`; a backward, the number of those since the
last forward, and which forwards before it are in it, from the last one back; where one of these holds parameters still, the names
of those of each."""
Orders = dict[Run, tuple[Event, ...]]
"""What was learned: the events of each run, in order."""


def early(schedule: Sequence[Event], may_start: Callable[[str, str], bool]) -> tuple[Event, ...]:
    """The schedule with each gather of the backward issued before the reduction that precedes it.

    So that the gather of the next unit is under way while the present one computes. In the forward the events are
    gathers only, and the runner starts the next one early without a change of order.

    Args:
        schedule: as recorded.
        may_start: whether the second unit's gather may start while the first is still in use.

    >>> recorded = [TURN, Event("reduce", "b"), Event("gather", "a"), Event("reduce", "a")]
    >>> print(*early(recorded, lambda present, following: True), sep=", ")
    turn, gather a, reduce b, reduce a
    """
    events = list(schedule)
    for index in range(1, len(events)):
        before, event = events[index - 1], events[index]
        if event.kind == "gather" and before.kind == "reduce" and may_start(before.unit, event.unit):
            events[index - 1], events[index] = event, before
    return tuple(events)
