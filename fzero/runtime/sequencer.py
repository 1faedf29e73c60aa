"""`Sequencer`: issues the collectives of one rank's units in a learned order, or in one that ranks negotiate.

`fzero.plans.unit_scheduler` holds the rules of such an order as pure functions; a `Sequencer` follows them, and starts each
collective. A rank also takes part in events that only other ranks need.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from fzero.common.profiler_ranges import profiler_range
from fzero.comms import collectives
from fzero.comms.mesh import RankMesh
from fzero.comms.records import Label, Phase
from fzero.plans.plan import Plan, UnitPlan
from fzero.plans.unit_scheduler import BOUNDARY, Event, Orders, Run, ScheduleError, early, is_whole
from fzero.runtime.gathers import Gathers
from fzero.runtime.reductions import Reductions

PATIENCE = 20.0
"""Seconds that a rank whose order departs from the schedule waits for all others to depart from it too."""

KINDS: tuple[Literal["gather", "reduce", "boundary"], ...] = ("gather", "reduce", "boundary")
"""The kinds of events, indexed by the number that ranks exchange; `boundary` is the forward-backward boundary."""


class Sequencer:
    """Issues the events of one `ForwardBackward` in an order that all ranks share.

    Args:
        plan: the units.
        mesh: the ranks.
        orders: the learned orders by run; a run without one is negotiated, and learned. None negotiates every run.
        gathers, reductions: start the collectives of an event.

    Attributes:
        in_forward: whether the model runs forward now, or backward.
        executed: the events so far.
        schedule: those events and the ones to follow; None while ranks negotiate.
        entered: the units that the model has used on this rank.
        ready: the units whose gradients are complete and not yet reduced.
    """

    def __init__(
        self, plan: Plan, mesh: RankMesh, orders: Orders | None, gathers: Gathers, reductions: Reductions
    ) -> None:
        self._plan, self._mesh, self._orders, self._gathers, self._reductions = plan, mesh, orders, gathers, reductions
        self._units = {unit.name: unit for unit in plan.units}
        self.in_forward = True
        self.executed: list[Event] = []
        self.schedule: Sequence[Event] | None = None
        self.entered: set[str] = set()
        self.ready: set[str] = set()
        self._run: Run = ()
        self._begun = 0  # index in `executed` where the present run begins
        self._since = 0  # index where the first forward since the last backward begins

    @property
    def phase(self) -> Phase:
        return "forward" if self.in_forward else "backward"

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Inside, follows the order of a run, or negotiates it; a negotiated order is learned on exit."""
        known = None if self._orders is None else self._orders.learned.get(run)
        self._run, self._begun = run, len(self.executed)
        self.schedule = None if known is None else (*self.executed, *known)
        yield
        if self._orders is not None and known is None:
            events = early(self.executed[self._begun :], self._plan.may_start_early)
            units = [unit.name for unit in self._plan.units if unit.gathered_numel]
            begun = self._begun if run[0] != "forward" else len(self.executed)
            since = self._since if run[0] != "forward" else self._begun
            forward, backward = self.executed[since:begun], self.executed[begun:]
            if self._orders.learn(run, events, is_whole=is_whole(forward, backward, units, differ=self._orders.differ)):
                self._warn()

    def begin_forward(self, *, is_first: bool) -> None:
        """Called when a forward begins; `is_first`: it is the first since the last backward."""
        self.in_forward = True
        if is_first:
            self._since = self._begun

    def end_forward(self) -> None:
        """Issues the events up to the forward-backward boundary."""
        self.advance_to(BOUNDARY)

    def complete(self, unit: str) -> None:
        """Called when the gradients of a unit are complete. Issues the reductions that the schedule allows now."""
        self.ready.add(unit)
        if self.schedule is None:
            self.advance_to(Event("reduce", unit))
            return
        while len(self.executed) < len(self.schedule):
            event = self.schedule[len(self.executed)]
            if event.kind != "reduce" or not (event.unit in self.ready or event.unit not in self.entered):
                return
            self._issue(event)

    def end_backward(self, units: Sequence[str], has_grads: Callable[[str], bool]) -> None:
        """Reduces the remaining units, and takes part in events that only other ranks need.

        Args:
            units: the trained units, in the order of their reductions.
            has_grads: whether a unit has gradients that were not reduced.
        """
        executed = self.executed[self._begun :]
        self.ready |= self.entered
        if self.schedule is None:
            for unit in units:
                event = Event("reduce", unit)
                if has_grads(unit) or event not in executed:
                    self._negotiate(event)
        self.take_part()

    def take_part(self) -> None:
        """Issues the rest of the schedule, or serves the wishes of other ranks until none has one."""
        if self.schedule is None:
            self._negotiate(None)
        else:
            for event in self.schedule[len(self.executed) :]:
                self._issue(event)

    def start_early(self, present: str) -> None:
        """Issues the next event of the schedule if it is a gather that may start while `present` is in use."""
        if self.schedule is not None and len(self.executed) < len(self.schedule):
            event = self.schedule[len(self.executed)]
            if event.kind == "gather" and self._plan.may_start_early(present, event.unit):
                self._issue(event)

    def advance_to(self, wanted: Event) -> None:
        """Issues the events that come before `wanted`, and `wanted` itself.

        Raises:
            ScheduleError: the schedule has no such event left, and not all ranks depart from it.
        """
        if self.schedule is None:
            self._negotiate(wanted)
            return
        for event in self.schedule[len(self.executed) :]:
            if event.kind == "boundary" and wanted.kind == "gather" and self.in_forward:
                break
            if event.kind == "reduce" and event != wanted and event.unit in self.entered - self.ready:
                break
            self._issue(event)
            if event == wanted:
                return
        issued = self._depart()
        if issued is None:
            raise ScheduleError(
                f"rank {self._mesh.world.rank} needs to {wanted} where the schedule of collectives has no such event: the "
                f"model runs its units in another order than in the first step (a branch on data, a router, layer drop); pass "
                f"schedule='negotiated', or name a module that holds the whole branch in units="
            )
        if [event for event in issued if event.kind == "gather"][-1:] != [wanted]:  # else it is under way
            self._negotiate(wanted)

    def _depart(self) -> list[Event] | None:
        """Abandons the schedule if every rank needs an event that it lacks; the run is negotiated from here on.

        The ranks have reached different positions in it, because a rank stops before the reduction of a unit that it uses. So
        all first issue the events up to the last of these positions. Returns those; None if some rank follows the schedule.
        """
        places = collectives.aside(len(self.executed), self._mesh.world, seconds=PATIENCE) if self._orders else None
        if places is None or self.schedule is None or self._orders is None:
            return None
        issued = list(self.schedule[len(self.executed) : max(places)])
        for event in issued:
            self._issue(event)
        self.schedule = None
        if self._orders.give_up(self._run):
            self._warn()
        return issued

    def _warn(self) -> None:
        """Warns on rank 0, once per run, that its order is negotiated."""
        if self._mesh.world.rank == 0 and self._mesh.world.size > 1:
            warnings.warn(
                f"the {self._run[0]} runs its units in an order that differs from step to step (layer drop, a branch), so all "
                f"ranks negotiate it from now on, which is slower; name a module that holds the whole branch in units=, or "
                f"pass schedule='negotiated' to do so from the start",
                stacklevel=2,
            )

    def _negotiate(self, wanted: Event | None) -> None:
        """Agrees with all ranks on each next event until `wanted` has been served; None takes part until no rank has a wish."""
        if self._mesh.world.size == 1:
            if wanted is not None:
                self._issue(wanted)
            return
        names = [unit.name for unit in self._plan.units]
        while True:
            code = (
                [-1, -1]
                if wanted is None
                else [KINDS.index(wanted.kind), names.index(wanted.unit) if wanted.unit else -1]
            )
            row = torch.tensor(code, device=self._gathers.device)
            rows = collectives.stack(row, self._mesh.world, label=Label("negotiate", phase=self.phase)).tolist()
            served = serve(rows, in_forward=self.in_forward)
            if served is None:
                return
            if self.in_forward and self._orders is not None:
                self._orders.differ |= any(row != served for row in rows)
            event = Event(KINDS[served[0]], names[served[1]] if served[1] >= 0 else "")
            self._issue(event)  # an incomplete gradient is sent as it is, and its rest in a later event
            if event == wanted:
                return

    def _issue(self, event: Event) -> None:
        self.executed.append(event)
        if event.kind == "boundary":
            return
        unit = self._units[event.unit]
        with profiler_range(_verb(event, unit), event.unit):
            if event.kind == "reduce":
                self.ready.discard(event.unit)
                self._reductions.start(unit, self.phase)
                return
            self._gathers.start(unit, self.phase)
            # On one shard nothing is sent: the next shard is loaded when its gather is issued, early.
            if self._plan.prefetch != 0 and self._mesh.num_shards > 1 and (following := self._next_gather()):
                self._gathers.prefetch_shards(self._units[following])

    def _next_gather(self) -> str | None:
        """The next unit that the schedule gathers."""
        rest = () if self.schedule is None else self.schedule[len(self.executed) :]
        return next((event.unit for event in rest if event.kind == "gather"), None)


def _verb(event: Event, unit: UnitPlan) -> str:
    """The event's name in a trace."""
    if event.kind == "gather":
        return "gather"
    return "all_reduce" if unit.buffers[0].flow.reduces_to == "full" else "reduce_scatter"


def serve(rows: list[list[int]], *, in_forward: bool) -> list[int] | None:
    """The wish that ranks serve next: that of the first declared unit, in a backward the last; None when no rank has a wish.

    When ranks run different units, this is usually an order in which one rank could run them all. A unit's gather precedes
    its reduction. The forward-backward boundary is served when all ranks want it.

    Args:
        rows: each rank's wish as (kind, unit), by number; -1 is none.
        in_forward: whether the model runs forward.
    """
    wishes = [row for row in rows if row[0] >= 0]
    return min(wishes, key=lambda row: (row[0], row[1]) if in_forward else (-row[1], row[0]), default=None)
