"""The unit scheduler, a state machine without tensors: decides when a unit is gathered,
kept, prefetched, reduced and released.

A `UnitScheduler` takes the requests of the model, of autograd and of the step, and
returns `Event`s in order. The eager step executes them on tensors
(`fzero.runtime.sequencer`), a dry run on a ledger (`fzero.estimation.dry_pass`), and
`fzero.plans.schedule_check` checks the events of all ranks. The kinds of events, in the
order in which a unit meets them:

| kind | what happens |
| --- | --- |
| gather | the all-gathers of the unit start (agreed) |
| prefetch_shards | the shards of a unit that is gathered next are loaded |
| wait_gather | the gather is waited for, and the unit is in use |
| release | the memory of the unit in use is given back |
| drop_gather | this rank did not use the gathered unit: the gather is waited for, and its memory given back |
| boundary | the forward ends (agreed) |
| collect | a flat gradient begins; `unit` is the key of its flat buffer |
| reduce | the reductions of the unit start, with zeros where it has no gradients (agreed) |
| keep | instead of reduce: the full gradients of the unit stay for the next micro-step |
| end_reduce | the oldest reductions are waited for, and written to the memory where the gradients live |
| negotiate, leave_order | the runtime agrees with all ranks on the next event, or to leave it; calls `agreed` or `leave_order` |
| use, grad | only in a record for the checker: the model uses a unit; the gradients of one visit are written |
| exchange | only there, too: activations go to the ranks of the mesh axis `unit` |

`executed`, the order and the events that `_issue` starts are the same on all ranks. The
units that a rank uses, and so `_in_use`, are its own. A rule that leaves out a collective
may only read what is the same on all ranks.

A new kind is one name in `Event.kind`, one line in the rule that returns it, and one
case in each of the two executors; the checker needs a line if the event holds memory.
If all ranks must agree on it, its name goes into `AGREED` too, and `_issue` starts it.
A request that causes it is a method that returns a tuple; `Sequencer.request` takes the
method.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from fzero.plans.unit_orders import BOUNDARY, END, Event, Run, early, is_whole
from fzero.plans.unit_rules import UnitRules


@dataclass(slots=True)
class _Run:
    """A run: the order that it follows, None while ranks negotiate; the place in it;
    where it begins in `executed`.
    """

    order: Sequence[Event] | None = None
    begun: int = 0
    place: int = 0
    _gather: int = 0  # index of the next gather

    @property
    def next(self) -> Event | None:
        return (
            None if self.order is None or self.place == len(self.order) else self.order[self.place]
        )

    @property
    def next_gather(self) -> str | None:
        """The next unit that the order gathers."""
        if self.order is None:
            return None
        self._gather = max(self._gather, self.place)
        while self._gather < len(self.order) and self.order[self._gather].kind != "gather":
            self._gather += 1
        return self.order[self._gather].unit if self._gather < len(self.order) else None


class UnitScheduler:
    """Turns the requests of one rank's forwards and backwards into events; see the
    module.

    Args:
        rules: the units of the plan.
        device: the type of the rank's device; a gradient that does not live there is
            written back while the backward goes on.
        is_alone: whether no other rank takes part; every event is agreed then.

    Attributes:
        in_forward: whether the model runs forward now, or backward.
        executed: the events of all runs that ranks have agreed on.
        needed: the event that this rank negotiates, `END` at the end of a run; None
            otherwise.
    """

    def __init__(self, rules: UnitRules, *, device: str = "cuda", is_alone: bool = False) -> None:
        self._rules, self._device, self._is_alone = rules, device, is_alone
        self.in_forward = True
        self.executed: list[Event] = []
        self.needed: Event | None = None
        self._rest: Iterator[Event] = iter(())  # the wishes after this one
        self._run = _Run()
        # the index in `executed` at which the first forward after the last backward begins
        self._since = 0
        self._in_use = self._under_way = ""  # the units in use and being gathered
        # units that this rank has used in the forwards of the present backward
        self._entered: set[str] = set()
        # per unit: complete gradients that are not yet reduced
        self._ready: Counter[str] = Counter()
        # per unit: keys of flat gradients that have begun
        self._filling = defaultdict[str, set[str]](set)
        self._in_flight: deque[str] = deque()  # units whose reductions are under way
        self._num_reducing = 0  # elements of the full gradients of `_in_flight`
        self._is_last = True
        # per unit: visits whose gradients are not complete
        self._open_visits: Counter[str] = Counter()

    # --- runs -------------------------------------------------------------------------------------

    def begin(self, order: Sequence[Event] | None) -> None:
        """A run begins: it follows an order, or negotiates one."""
        # drops what the previous run left
        self._run, self._rest = _Run(order, len(self.executed)), iter(())

    def begin_forward(self, is_first: bool) -> tuple[Event, ...]:
        """The run is a forward; `is_first`: the first since the last backward."""
        self.in_forward = True
        if is_first:
            self._since = self._run.begun
            self._entered.clear()  # a unit of the last micro-step may be skipped in this one
        return self.release()

    def begin_backward(self, is_last: bool, visits: Iterable[tuple[str, int]] = ()) -> None:
        """The run is a backward.

        Args:
            is_last: whether it is the last before the update; only then are full
                gradients reduced.
            visits: by unit, the number of forwards with gradients that visited it and
                that this backward ends. A unit that is not listed is complete after its
                first `end_visit`.
        """
        self.in_forward = False  # also where this rank has run no forward
        self._is_last, self._open_visits = is_last, Counter(dict(visits))
        # Also units of forwards before the last backward.
        self._entered.update(unit for unit, num_visits in self._open_visits.items() if num_visits)

    def recorded(self, run: Run, *, differ: bool) -> tuple[tuple[Event, ...], bool]:
        """The order that later runs follow, made from the run that ended, and whether
        that run has all blocks (`is_whole`).
        """
        events = self.executed[self._run.begun :]
        before = self.executed[self._since : self._run.begun]
        forward, backward = (events, []) if run[0] == "forward" else (before, events)
        units = (name for name, unit in self._rules.units.items() if unit.gathered_numel)
        return early(events, self._rules.may_start_early), is_whole(
            forward, backward, units, differ=differ
        )

    # --- requests of the model and of autograd ----------------------------------------------------

    def enter(self, unit: str) -> tuple[Event, ...]:
        """The model accesses the parameters of a unit."""
        self._entered.add(unit)
        return self.need(unit)

    def need(self, unit: str) -> tuple[Event, ...]:
        """A unit is needed: by the model, or by a saved view of it in the backward."""
        if self._in_use == unit and (self._under_way or not self._may_start_next(unit)):
            return ()
        out = [*self.release(unit)]
        if self._rules.units[unit].gathered_numel and self._in_use != unit:
            gather = Event("gather", unit)
            if self._under_way != unit and not self._advance_to(gather, out):
                return tuple(out)
            self._go_on(gather, out)
        if not self._under_way and (following := self._may_start_next(unit)):
            self._issue(following, out)
        return tuple(out)

    def collect(self, unit: str, key: str) -> tuple[Event, ...]:
        """A gradient is written into a unit's flat gradient."""
        begun = self._filling[unit]
        if key in begun:
            return ()
        begun.add(key)
        return (Event("collect", key),)

    def expect(self, units: Iterable[str]) -> None:
        """The present backward also brings gradients of these units from outside of the
        forwards; `end_visit` ends each.
        """
        for unit in units:
            self._open_visits[unit] += 1
            self._entered.add(unit)

    def end_visit(self, unit: str) -> tuple[Event, ...]:
        """All gradients of a unit in one forward are written. After the last it is
        reduced, as soon as the order allows.
        """
        self._open_visits[unit] -= 1
        if self._open_visits[unit] > 0:
            return ()
        self._ready[unit] += 1
        out: list[Event] = []
        if self._run.order is None:
            self._advance_to(Event("reduce", unit), out)
        while (
            (event := self._run.next) is not None
            and event.kind == "reduce"
            and not self._is_early(event)
        ):
            self._issue(event, out)
        return tuple(out)

    def boundary(self) -> tuple[Event, ...]:
        """The forward has ended. Units that only other ranks need are gathered up to
        here.
        """
        out: list[Event] = []
        if self._advance_to(BOUNDARY, out):
            self._go_on(BOUNDARY, out)
        return tuple(out)

    def end_backward(self) -> tuple[Event, ...]:
        """The backward has ended: reduces the remaining units, and continues like
        `take_part`.

        If the order has reduced a unit whose gradients came later (a reentrant
        checkpoint around a part of the model, which is known when it runs), it is
        reduced once more.
        """
        self._ready.update(self._entered)
        self._rest = self._unreduced()
        return self.take_part()

    def take_part(self) -> tuple[Event, ...]:
        """The run has ended on this rank, which still takes part in events that only
        other ranks need.
        """
        out: list[Event] = []
        while (event := self._run.next) is not None:
            self._issue(event, out)
        is_followed = self._run.order is not None
        if is_followed and not self._filling:
            return tuple(out)
        if self._is_alone:
            for needed in self._rest:
                self._issue(needed, out)
        else:
            self._rest = chain(self._rest, (END,))
            self._request_event(
                next(self._rest), "leave_order" if is_followed else "negotiate", out
            )
        return tuple(out)

    def finish(self) -> tuple[Event, ...]:
        """Ends a backward: reductions are waited for, and all units released."""
        assert not self._filling, self._filling
        out: list[Event] = []
        while self._in_flight:
            self._end_reduce(out)
        self._ready.clear()
        self._drop(out)
        return (*out, *self.release())

    def release(self, kept: str = "") -> tuple[Event, ...]:
        """The unit in use is not needed any more, unless it is `kept`."""
        released = self._in_use
        if not released or released == kept:
            return ()
        self._in_use = ""
        return (Event("release", released),)

    # --- what ranks have agreed on ----------------------------------------------------------------

    def agreed(self, event: Event) -> tuple[Event, ...]:
        """All ranks have agreed on an event. After the event that this rank needed,
        `needed` is its next one, or None.
        """
        out: list[Event] = []
        if event != END:
            # an incomplete gradient is sent as it is, and its rest in a later event
            self._issue(event, out)
        if event == self.needed:
            self.needed = next(self._rest, None)
            self._go_on(event, out)
        return tuple(out)

    @property
    def place(self) -> int:
        """How many events of the order were issued."""
        return self._run.place

    def leave_order(self, place: int) -> tuple[Event, ...]:
        """All ranks need an event that the order lacks. They negotiate from event
        number `place` of the order on.

        The ranks have reached different places in it, because a rank stops before the
        reduction of a unit that it uses. So all first issue the events up to the last
        of these places.
        """
        out: list[Event] = []
        while self.place < place and (event := self._run.next) is not None:
            self._issue(event, out)
        self._run.order, needed, self.needed = None, self.needed, None
        assert needed is not None
        if needed == Event("gather", self._under_way) or self._advance_to(needed, out):
            self._go_on(needed, out)
        return tuple(out)

    # --- rules ------------------------------------------------------------------------------------

    def _advance_to(self, wanted: Event, out: list[Event]) -> bool:
        """Issues the events up to `wanted`. False if ranks must agree on `wanted`
        first; `needed` is set to it then.
        """
        if self._run.order is None:
            if self._is_alone:
                self._issue(wanted, out)
            else:
                self._request_event(wanted, "negotiate", out)
            return self._is_alone
        while (event := self._run.next) is not None:
            if event.kind == "boundary" and wanted.kind == "gather" and self.in_forward:
                break
            if event != wanted and event.kind == "reduce" and self._is_early(event):
                break
            self._issue(event, out)
            if event == wanted:
                return True
        self._request_event(wanted, "leave_order", out)
        return False

    def _request_event(
        self, wanted: Event, kind: Literal["negotiate", "leave_order"], out: list[Event]
    ) -> None:
        self.needed = wanted
        out.append(Event(kind))

    def _go_on(self, event: Event, out: list[Event]) -> None:
        """Continues after an event that this rank waited for: uses the gathered unit,
        or turns from forward to backward.
        """
        if event.kind == "gather":
            out.append(Event("wait_gather", event.unit))
            self._in_use, self._under_way = event.unit, ""
        elif event.kind == "boundary":
            self.in_forward = False

    def _is_early(self, reduction: Event) -> bool:
        """Whether this rank uses the unit and its gradients are not complete."""
        return reduction.unit in self._entered and not self._ready[reduction.unit]

    def _may_start_next(self, present: str) -> Event | None:
        """The next event of the order, if it is a gather that may start while `present`
        is in use.
        """
        event = self._run.next
        is_gather = (
            event is not None
            and event.kind == "gather"
            and self._rules.may_start_early(present, event.unit)
        )
        return event if is_gather else None

    def _unreduced(self) -> Iterator[Event]:
        """The reductions that a negotiated backward lacks, last declared unit first."""
        done = {event.unit for event in self.executed[self._run.begun :] if event.kind == "reduce"}
        for name in reversed(self._rules.units):
            if self._rules.units[name].grads and (name in self._filling or name not in done):
                yield Event("reduce", name)

    def _issue(self, event: Event, out: list[Event]) -> None:
        """Starts a collective, with the events that it needs before and after it."""
        self.executed.append(event)
        self._run.place += 1
        if event.kind == "reduce":
            self._reduce(event, out)
            return
        self._drop(out)  # a gather that was not awaited on this rank served other ranks only
        out.append(event)
        if event.kind == "gather":
            self._under_way = event.unit
            # On one shard nothing is sent: the next shard is loaded when its gather is issued,
            # early.
            if (
                self._rules.prefetches
                and self._rules.num_shards > 1
                and (following := self._run.next_gather)
            ):
                out.append(Event("prefetch_shards", following))

    def _reduce(self, event: Event, out: list[Event]) -> None:
        unit = self._rules.units[event.unit]
        self._ready[event.unit] = max(self._ready[event.unit] - 1, 0)
        while (
            self._in_flight and self._num_reducing + unit.reduced_numel > self._rules.max_reducing
        ):
            self._end_reduce(out)
        while unit.remembers and event.unit in self._in_flight:
            self._end_reduce(out)  # the next reduction needs the state of its comm hook
        begun = self._filling.pop(event.unit, ())
        out += [Event("collect", grad.key) for grad in unit.grads if grad.key not in begun]
        started = [grad for grad in unit.grads if self._is_last or not grad.is_full]
        if not started:
            out.append(Event("keep", event.unit))
            return
        out.append(event)
        self._in_flight.append(event.unit)
        self._num_reducing += unit.reduced_numel
        if not all(grad.placement.is_here(self._device) for grad in started):
            # A gradient that lives in other memory is written there while the next unit's backward
            # runs.
            while len(self._in_flight) > (self._rules.world_size > 1):
                self._end_reduce(out)

    def _end_reduce(self, out: list[Event]) -> None:
        unit = self._in_flight.popleft()
        self._num_reducing -= self._rules.units[unit].reduced_numel
        out.append(Event("end_reduce", unit))

    def _drop(self, out: list[Event]) -> None:
        if self._under_way:
            out.append(Event("drop_gather", self._under_way))
            self._under_way = ""
