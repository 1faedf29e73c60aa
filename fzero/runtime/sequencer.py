"""`Sequencer`: executes the events of a rank's unit scheduler on tensors, and negotiates those that have no order yet.

`fzero.plans.unit_scheduler` holds the rules as a state machine without tensors; a `Sequencer` hands each event to `Gathers` or
`Reductions`. If the scheduler needs an event that is not in the order (its `wish`), all ranks agree on the next event.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from fzero.common.profiler_ranges import is_recording, profiler_range
from fzero.comms import collectives
from fzero.comms.mesh import RankMesh
from fzero.comms.records import Label, Phase
from fzero.plans.plan import Plan
from fzero.plans.replay import Replay
from fzero.plans.unit_orders import AGREED, BOUNDARY, END, Event, Run, ScheduleError, serve
from fzero.plans.unit_scheduler import UnitScheduler
from fzero.runtime.gathers import Gathers
from fzero.runtime.learned import Learned
from fzero.runtime.reductions import Reductions

PATIENCE = 20.0
"""If a rank must leave the learned order, it waits so many seconds for all others to leave it, too."""


class Sequencer:
    """Executes the events of one `ForwardBackward`.

    Args:
        plan: the units.
        mesh: the ranks.
        learned: the orders by run, and the answers of the unit scheduler so far. A run without an order is negotiated, and its
            order learned.
        gathers, reductions: execute the events.

    Attributes:
        phase: whether the present collectives belong to a forward or to a backward.
    """

    def __init__(self, plan: Plan, mesh: RankMesh, learned: Learned, gathers: Gathers, reductions: Reductions) -> None:
        self._mesh, self._orders = mesh, learned.orders
        self._gathers, self._reductions = gathers, reductions
        self._units = {unit.name: unit for unit in plan.units}
        self._flats = plan.flats
        self._gathers_nothing = not any(unit.gathered_numel for unit in plan.units)
        make = partial(UnitScheduler, plan.unit_rules, device=gathers.device.type, is_alone=mesh.world.size == 1)
        self._replay = Replay(make, learned.answers)
        self.phase: Phase = "forward"
        self._run: Run = ()
        self._is_known = False  # whether its order was learned before it began

    def ask(self, *request: Any) -> None:
        """Executes the events that answer a request: the name of a method of `UnitScheduler`, and its arguments.

        *Collective* for the events that ranks agree on.
        """
        if events := self._replay.ask(request):
            self.execute(events)

    def execute(self, events: Iterable[Event]) -> None:
        """Executes events of the scheduler. *Collective* for the events that ranks agree on."""
        with_ranges = _RANGES if is_recording() else ()
        for event in events:
            if event.kind in with_ranges:
                with profiler_range(self._range_of(event), event.unit):
                    EXECUTORS[event.kind](self, event.unit)
            else:
                EXECUTORS[event.kind](self, event.unit)

    def begin(self, run: Run) -> None:
        """From here on, follows the order of a run, or negotiates it. A forward that gathers nothing has one order."""
        known = None if self._orders is None else self._orders.learned.get(run)
        self._run, self._is_known, self.phase = run, known is not None, "forward" if run[0] == "forward" else "backward"
        if known is None and self._gathers_nothing:
            known = _WITHOUT_GATHERS.get(run[0])
        self.ask("begin", known)

    def end(self) -> None:
        """The run has ended without an error: a negotiated order is learned."""
        if self._orders is not None and not self._is_known:
            events, is_whole = self._replay.scheduler.recorded(self._run, differ=self._orders.differ)
            if self._orders.learn(self._run, events, is_whole=is_whole):
                self._warn()

    def _turn(self, _: str) -> None:
        self.phase = "backward"

    def _range_of(self, event: Event) -> str:
        """The name of an event in traces."""
        is_full = self._units[event.unit].buffers[0].flow.reduces_to == "full"
        return "gather" if event.kind == "gather" else "all_reduce" if is_full else "reduce_scatter"

    # --- other ranks -----------------------------------------------------------------------------------------------

    def _negotiate(self) -> None:
        """Agrees with all ranks on one event after the other, until this rank needs no more (`wish` is None)."""
        names, scheduler = list(self._units), self._replay.scheduler
        while (wish := scheduler.wish) is not None:
            code = [-1, -1]
            if wish.kind in AGREED:
                code = [AGREED.index(wish.kind), names.index(wish.unit) if wish.unit else -1]
            row = torch.tensor(code, device=self._gathers.device)
            rows = collectives.stack(row, self._mesh.world, label=Label("negotiate", phase=self.phase)).tolist()
            served = serve(rows, in_forward=scheduler.in_forward)
            if served is None:
                self.execute(scheduler.agreed(END))
                continue
            if scheduler.in_forward and self._orders is not None:
                self._orders.differ |= any(row != served for row in rows)
            self.execute(scheduler.agreed(Event(AGREED[served[0]], names[served[1]] if served[1] >= 0 else "")))

    def _depart(self) -> None:
        """Abandons the order if every rank needs an event that it lacks; the run is negotiated from here on.

        Raises:
            ScheduleError: some ranks do not leave the order.
        """
        scheduler, wish = self._replay.scheduler, self._replay.scheduler.wish
        places = collectives.aside(scheduler.place, self._mesh.world, seconds=PATIENCE) if self._orders else None
        if places is None or self._orders is None:
            raise ScheduleError(
                f"rank {self._mesh.world.rank} needs to {wish} where the schedule of collectives has no such event: the "
                f"model runs its units in another order than in the first step (a branch on data, a router, layer drop); pass "
                f"schedule='negotiated', or name a module that holds the whole branch in units="
            )
        events = scheduler.depart(max(places))
        if self._orders.give_up(self._run):
            self._warn()
        self.execute(events)

    def _warn(self) -> None:
        """Warns on rank 0, once per run, that its order is negotiated."""
        if self._mesh.world.rank == 0 and self._mesh.world.size > 1:
            warnings.warn(
                f"the {self._run[0]} runs its units in an order that differs from step to step (layer drop, a branch), so all "
                f"ranks negotiate it from now on, which is slower; name a module that holds the whole branch in units=, or "
                f"pass schedule='negotiated' to do so from the start",
                stacklevel=2,
            )


EXECUTORS: dict[str, Callable[[Sequencer, str], object]] = {
    "gather": lambda work, unit: work._gathers.start(work._units[unit], work.phase),
    "prefetch_shards": lambda work, unit: work._gathers.prefetch_shards(work._units[unit]),
    "wait_gather": lambda work, unit: work._gathers.wait(work._units[unit]),
    "release": lambda work, unit: work._gathers.release(unit),
    "drop_gather": lambda work, unit: work._gathers.drop(unit),
    "boundary": Sequencer._turn,
    "collect": lambda work, key: work._reductions.collect(*work._flats[key]),
    "keep": lambda work, unit: work._reductions.start(work._units[unit], work.phase),
    "reduce": lambda work, unit: work._reductions.start(work._units[unit], work.phase),
    "end_reduce": lambda work, _: work._reductions.end_oldest(),
    "negotiate": lambda work, _: work._negotiate(),
    "depart": lambda work, _: work._depart(),
}
"""The function that executes each kind of event on tensors."""
_WITHOUT_GATHERS: dict[object, tuple[Event, ...]] = {"forward": (BOUNDARY,), "through": ()}  # they reduce nothing
_RANGES = ("gather", "keep", "reduce")
"""The kinds of events that are ranges of a trace."""
