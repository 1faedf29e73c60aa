"""`check_schedules`: proves from the events of all ranks that no rank hangs, leaks a
unit, or reduces a gradient too early.

A record holds the events that a rank's unit scheduler returned, in order, and the
model's actions between them: `use` where it used a unit, `grad` where the gradients of
a visit were written, `exchange` where it sent activations to the ranks that share its
samples. The kinds are those of `fzero.plans.unit_scheduler`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from fzero.plans.unit_orders import AGREED, Event, ScheduleError
from fzero.plans.unit_rules import UnitRules


def check_schedules(
    schedules: Sequence[Sequence[Event]], rules: UnitRules, *, seq_size: int = 1
) -> int:
    """Raises unless the ranks' schedules can run together; returns the peak of gathered
    elements on any rank.

    1. All ranks issue the same agreed events in the same order. A rank waits only for
       what it has issued itself, so no rank waits for ever. Ranks that share samples
       also exchange activations in the same places between them: all wait there.
    2. Each gather is either waited for and then released, or dropped, exactly once. No
       gather is under way at the boundary. A unit is used only between the wait and the
       release.
    3. A reduction starts after all gradients of its unit. Reductions end in the order
       of their starts, all before the end of the schedule. If a comm hook keeps a
       state, a reduction ends before the next one of its unit starts.
    4. Gathered elements stay within `UnitRules.most_gathered`, those in memory until a
      reduction ends within `max_reducing`.

    Args:
        schedules: the record of each rank, in rank order, from the first forward to the
            end of the last backward.
        rules: the rules of the plan.
        seq_size: so many neighbouring ranks share samples (`Plan.seq_size`).

    Raises:
        ScheduleError: a rule is broken; the message names the rank, the event and the
            rule.

    >>> from fzero.plans.unit_rules import UnitRule
    >>> rules = UnitRules({"a": UnitRule(8, 0, (), False)}, 2, 2, True, 8, 8, None)
    >>> schedule = [Event(kind, "a") for kind in ("gather", "wait_gather", "use", "release")]
    >>> check_schedules([schedule, schedule], rules)
    8
    >>> check_schedules([schedule, schedule[1:]], rules)
    Traceback (most recent call last):
    fzero.plans.unit_orders.ScheduleError: check_schedules: all ranks must issue the same collectives in the same order, but \
number 0 is 'gather a' on rank 0 and missing on rank 1
    """
    _check_alike(schedules, AGREED, 0)
    for start in range(0, len(schedules) if seq_size > 1 else 0, seq_size):
        _check_alike(schedules[start : start + seq_size], (*AGREED, "exchange"), start)
    has_drops = any(event.kind == "drop_gather" for event in schedules[0])
    alike = not has_drops and all(list(schedule) == list(schedules[0]) for schedule in schedules)
    return max(
        _Rank(rank, rules, alike).follow(schedule) for rank, schedule in enumerate(schedules)
    )


def _check_alike(schedules: Sequence[Sequence[Event]], kinds: Collection[str], start: int) -> None:
    """Raises unless the ranks from `start` on have the same events of some kinds."""
    first, *others = ([event for event in one if event.kind in kinds] for one in schedules)
    for rank, other in enumerate(others, start + 1):
        for number, (one, two) in enumerate(zip_longest(first, other)):
            if one != two:
                names = ["missing" if event is None else repr(str(event)) for event in (one, two)]
                raise ScheduleError(
                    f"check_schedules: all ranks must issue the same collectives in the same "
                    f"order, but number {number} is {names[0]} on rank {start} and {names[1]} on "
                    f"rank {rank}"
                )


@dataclass(slots=True)
class _Rank:
    """The units of one rank while its schedule is followed."""

    rank: int
    rules: UnitRules
    alike: bool
    where: str = "the begin"
    under_way: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    collected: Counter[str] = field(default_factory=Counter)  # per flat gradient, by its key
    reducing: deque[str] = field(default_factory=deque)
    peak: int = 0

    def follow(self, schedule: Sequence[Event]) -> int:
        """Checks one event after the other; returns the peak of gathered elements."""
        for index, event in enumerate(schedule):
            self.where = f"event {index} ({event})"
            if event.kind in CHECKS:
                CHECKS[event.kind](self, event.unit)
        self.where = "the end"
        self.must(
            not self.under_way and not self.live,
            "every gather is released",
            self.under_way | self.live,
        )
        self.must(not +self.collected, "every flat gradient is reduced", +self.collected)
        self.must(not self.reducing, "every reduction is waited for", self.reducing)
        return self.peak

    def must(self, holds: bool, rule: str, found: object) -> None:
        if not holds:
            raise ScheduleError(
                f"check_schedules: rank {self.rank}, {self.where}: the rule is that {rule}, got "
                f"{found}"
            )

    def gather(self, unit: str) -> None:
        self.must(
            unit not in self.under_way, "a gather ends before it starts again", self.under_way
        )
        self.under_way.add(unit)
        held = sum(self.rules.units[name].gathered_numel for name in (*self.under_way, *self.live))
        most = self.rules.most_gathered(alike=self.alike)
        self.must(held <= most, f"at most {most} elements are gathered", held)
        self.peak = max(self.peak, held)

    def wait_gather(self, unit: str) -> None:
        self.drop_gather(unit)
        self.must(
            unit not in self.live, "a unit is released before it is gathered again", self.live
        )
        self.live.add(unit)

    def drop_gather(self, unit: str) -> None:
        self.must(
            unit in self.under_way, "a gather is waited for once, after its start", self.under_way
        )
        self.under_way.remove(unit)

    def release(self, unit: str) -> None:
        self.must(unit in self.live, "a unit is released once, after its gather", self.live)
        self.live.remove(unit)

    def use(self, unit: str) -> None:
        is_gathered = unit in self.live or not self.rules.units[unit].gathered_numel
        self.must(is_gathered, "a unit is gathered while it is used", self.live)

    def boundary(self, _: str) -> None:
        self.must(
            not self.under_way,
            "no gather is under way between forward and backward",
            self.under_way,
        )

    def collect(self, key: str) -> None:
        self.collected[key] += 1
        self.must(self.collected[key] == 1, "a flat gradient begins once before its reduction", key)

    def grad(self, unit: str) -> None:
        begun = any(self.collected[grad.key] for grad in self.rules.units[unit].grads)
        self.must(begun, "gradients come before the reduction of their unit", +self.collected)

    def keep(self, unit: str) -> None:
        keys = Counter(grad.key for grad in self.rules.units[unit].grads)
        self.must(
            keys <= self.collected,
            "a reduction has all flat gradients of its unit",
            +self.collected,
        )
        self.collected -= keys

    def reduce(self, unit: str) -> None:
        self.keep(unit)
        is_free = not self.rules.units[unit].remembers or unit not in self.reducing
        self.must(is_free, "the state of a comm hook is written before it is read", self.reducing)
        self.reducing.append(unit)
        held = sum(self.rules.units[name].reduced_numel for name in self.reducing)
        is_bounded = len(self.reducing) == 1 or held <= self.rules.max_reducing
        self.must(
            is_bounded, f"at most {self.rules.max_reducing} elements are reduced at once", held
        )

    def end_reduce(self, unit: str) -> None:
        oldest = self.reducing.popleft() if self.reducing else None
        self.must(oldest == unit, "reductions end in the order of their start", oldest)


CHECKS: dict[str, Callable[[_Rank, str], None]] = {
    check.__name__: check
    for check in (
        *(
            _Rank.gather,
            _Rank.wait_gather,
            _Rank.drop_gather,
            _Rank.release,
            _Rank.use,
            _Rank.boundary,
        ),
        *(_Rank.collect, _Rank.grad, _Rank.keep, _Rank.reduce, _Rank.end_reduce),
    )
}
"""The check for each kind of event."""
