"""The events of units, and the order of those that ranks agree on.

All ranks must issue the agreed events in the same order, or all hang. The order is a
tuple of events. The first step *negotiates* it: before every event each rank sends the
others the unit that it needs next. The next event is for the first of these units in
the order of declaration (in the backward, the last), and all ranks take part. So the
recorded order is the same on every rank even when their models branch on data. The
steps after it *follow* it:

- a rank that does not need a unit this time takes part in its gather all the same, and
  reduces zeros for it,
- if all ranks need a unit that the order does not have at this place, they negotiate
  from there on,
- if one rank alone needs such a unit, it raises `ScheduleError`, which names the unit.

A step may skip some blocks of a list (layer drop). Its order cannot be followed,
because a later step may run them. So ranks learn an order only when all members have
run in one step, or when several steps have had the same order. `early` transforms a
recorded order: it prefetches one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple, Self

from rich.table import Table

from fzero.common.notebooks import as_html
from fzero.common.text_tables import as_text


class ScheduleError(RuntimeError):
    """A unit ran at a place where the schedule of collectives has no gather for it."""


class Event(NamedTuple):
    """Something that happens to a unit, or to all of them (`unit` is empty);
    `unit_scheduler` has a table of the kinds.

    >>> print(Event("gather", "blocks.0"), Event("boundary"), sep=", ")
    gather blocks.0, boundary
    """

    kind: Literal[
        "gather",
        "prefetch_shards",
        "wait_gather",
        "release",
        "drop_gather",
        "boundary",
        "collect",
        "keep",
        "reduce",
        "end_reduce",
        "negotiate",
        "leave_order",
        "end",
        "use",
        "grad",
        "exchange",
    ]
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}".strip()


class EventOrder(tuple[Event, ...]):
    """The events of a micro-step in order: a tuple that shows itself as a table, a line
    for each phase and unit.

    >>> events = (
    ...     Event("gather", "a"),
    ...     Event("use", "a"),
    ...     Event("release", "a"),
    ...     BOUNDARY,
    ...     Event("gather", "a"),
    ... )
    >>> print(EventOrder(events))  # doctest: +NORMALIZE_WHITESPACE
    schedule of a micro-step
      unit      events
      a         gather, use, release
      boundary
      a         gather
    """

    def __rich__(self) -> Table:
        table = Table(
            "unit", "events", title="schedule of a micro-step", title_justify="left", box=None
        )
        for unit, events in groupby(self, key=lambda event: event.unit or event.kind):
            table.add_row(unit, ", ".join(event.kind for event in events if event.unit))
        return table

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


AGREED: tuple[Literal["gather", "reduce", "boundary"], ...] = ("gather", "reduce", "boundary")
"""The kinds of events that all ranks issue in one order, indexed by the number that
ranks exchange.
"""

BOUNDARY, END = Event("boundary"), Event("end")
"""The forward-backward boundary; and the end of a run, which ranks agree on when none
needs another event.
"""

Run = tuple[str | int | frozenset[str], ...]
"""The key of an order: runs with the same key have the same order of collectives.

A forward: `("forward", "train")`. The key of a backward holds the number of backwards
since the last forward, and each forward that it belongs to, by name and by distance
from the last forward; where nothing is gathered neither, because ranks may go back
through different forwards. If a forward excludes trained parameters from its gradients
(`still`), it also holds their names."""

MOST_TRIES = 16
"""The number of steps in which the order of a run may lack members of a list of blocks.
Then it is learned, or given up.
"""


@dataclass(slots=True)
class Orders:
    """The orders that were learned, by run. The same on all ranks.

    Attributes:
        learned: the orders to follow.
        tried: the orders so far of runs that lacked blocks.
        varying: runs without one order, which are negotiated each time.
        differ: whether ranks have needed different units at one time in a forward.
    """

    learned: dict[Run, tuple[Event, ...]] = field(default_factory=dict)
    tried: dict[Run, list[tuple[Event, ...]]] = field(default_factory=dict)
    varying: set[Run] = field(default_factory=set)
    differ: bool = False

    def learn(self, run: Run, events: tuple[Event, ...], *, is_whole: bool) -> bool:
        """Learns the negotiated order of a run, if it is complete; returns whether the
        run is given up instead.

        Args:
            run: the key of the run.
            events: its order.
            is_whole: whether no block was skipped by all ranks.

        >>> orders, run = Orders(), ("forward", "train")
        >>> some, all_ = (Event("gather", "0"),), (Event("gather", "0"), Event("gather", "1"))
        >>> orders.learn(run, some, is_whole=False), run in orders.learned
        (False, False)
        >>> orders.learn(run, all_, is_whole=True), run in orders.learned
        (False, True)
        """
        if run in self.varying:
            return False
        tried = self.tried.setdefault(run, [])
        tried.append(events)
        if is_whole or (len(tried) == MOST_TRIES and len(set(tried)) == 1):
            self.learned[run] = events
        elif len(tried) == MOST_TRIES:
            return self.give_up(run)
        return False

    def give_up(self, run: Run) -> bool:
        """Makes the run negotiate every time from now on; returns whether this is new."""
        is_new = run not in self.varying
        self.varying.add(run)
        self.learned.pop(run, None)
        self.tried.pop(run, None)
        return is_new

    def copy(self) -> Self:
        tried = {run: list(orders) for run, orders in self.tried.items()}
        return replace(self, learned=dict(self.learned), tried=tried, varying=set(self.varying))


def is_whole(
    forward: Iterable[Event], backward: Iterable[Event], units: Iterable[str], *, differ: bool
) -> bool:
    """Whether an order contains all blocks, so that later steps can follow it.

    Args:
        forward: its events in the forwards.
        backward: its events in the backwards, if these have run.
        units: the names of all units that are gathered.
        differ: whether each rank skips blocks of its own. Then every unit must come
            once, and in the backward in reverse order: such an order serves ranks that
            skip any of them.

    >>> forward, units = (
    ...     [Event("gather", "blocks.0"), Event("gather", "head")],
    ...     ["blocks.0", "blocks.1", "head"],
    ... )
    >>> (
    ...     is_whole(forward, [], units, differ=False),
    ...     is_whole(forward, [], ["blocks.0", "head"], differ=True),
    ... )
    (False, True)
    >>> is_whole(
    ...     forward,
    ...     [Event("reduce", "blocks.0"), Event("reduce", "head")],
    ...     ["blocks.0", "head"],
    ...     differ=True,
    ... )
    False
    """
    first = [event.unit for event in forward if event.kind == "gather"]
    blocks = {unit for unit in units if unit.rpartition(".")[2].isdigit()}  # members of a list
    if not differ or not blocks <= set(first):
        return blocks <= set(first)
    place = {unit: index for index, unit in enumerate(first)}
    back = {
        kind: [event.unit for event in backward if event.kind == kind]
        for kind in ("gather", "reduce")
    }
    if any(back.values()) and not blocks <= {*first[-1:], *back["gather"]}:
        return False
    orders = [
        first,
        *([unit for unit in reversed(found) if unit in place] for found in back.values()),
    ]
    return all(order == sorted(set(order), key=place.__getitem__) for order in orders)


def early(schedule: Sequence[Event], may_start: Callable[[str, str], bool]) -> tuple[Event, ...]:
    """The schedule with each gather of the backward issued before the reduction that
    precedes it.

    The gather of the next unit then overlaps with the compute of the present one. The
    forward has gathers only, and the runner starts the next one early without a change
    of order. A reduction lets one gather pass: a second one would delay it until other
    gradients of the same unit are there (a unit that several reentrant checkpoints
    use), and so change the sum.

    Args:
        schedule: as recorded.
        may_start: whether the second unit's gather may start while the first is still
            in use.

    >>> recorded = [BOUNDARY, Event("reduce", "b"), Event("gather", "a"), Event("reduce", "a")]
    >>> print(*early(recorded, lambda present, following: True), sep=", ")
    boundary, gather a, reduce b, reduce a
    """
    events, passed = list(schedule), -1  # the place of the last reduction that let a gather pass
    for index in range(1, len(events)):
        before, event = events[index - 1], events[index]
        is_free = passed != index - 1 and before.kind == "reduce"
        if is_free and event.kind == "gather" and may_start(before.unit, event.unit):
            events[index - 1], events[index], passed = event, before, index
    return tuple(events)


def serve(rows: list[list[int]], *, in_forward: bool) -> list[int] | None:
    """The next event: of the events that ranks need, the one of the unit declared first
    (in a backward last); None if no rank needs one.

    If ranks run different units, the result is usually an order in which one rank could
    run them all. A unit's gather precedes its reduction. The forward-backward boundary
    is served when all ranks want it.

    Args:
        rows: the event that each rank needs, as (number of its kind, number of its
            unit); -1 is none.
        in_forward: whether the model runs forward.
    """
    wishes = [row for row in rows if row[0] >= 0]
    return min(
        wishes, key=lambda row: (row[0], row[1]) if in_forward else (-row[1], row[0]), default=None
    )
