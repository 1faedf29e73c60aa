"""`Sequencer`: executes the events of a rank's unit scheduler on tensors, and
negotiates those that have no order yet.

`fzero.plans.unit_scheduler` holds the rules as a state machine without tensors; a
`Sequencer` hands each event to `Gathers` or `Reductions`. If the scheduler needs an
event that is not in the order (its `needed`), all ranks agree on the next event.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVarTuple, assert_never

import torch

from fzero.common.profiler_ranges import profiler_range
from fzero.comms import collectives
from fzero.comms.mesh import RankMesh
from fzero.comms.records import Label, Phase
from fzero.plans.plan import Plan
from fzero.plans.unit_orders import AGREED, BOUNDARY, END, Event, Run, ScheduleError, serve
from fzero.plans.unit_scheduler import UnitScheduler
from fzero.runtime.gathers import Gathers
from fzero.runtime.learned import CachedScheduler, Learned
from fzero.runtime.reductions import Reductions

Arguments = TypeVarTuple("Arguments")

PATIENCE = 20.0
"""If a rank must leave the learned order, it waits so many seconds for all others to
leave it, too.
"""


class Sequencer:
    """Executes the events of one `ForwardBackward`.

    Args:
        plan: the units.
        mesh: the ranks.
        learned: the orders by run, and the answers of the unit scheduler so far. A run
            without an order is negotiated, and its order learned.
        gathers, reductions: execute the events.

    Attributes:
        phase: whether the present collectives belong to a forward or to a backward.
    """

    def __init__(
        self, plan: Plan, mesh: RankMesh, learned: Learned, gathers: Gathers, reductions: Reductions
    ) -> None:
        self._mesh, self._orders = mesh, learned.orders
        self._gathers, self._reductions = gathers, reductions
        self._units = {unit.name: unit for unit in plan.units}
        self._flats = plan.flats
        self._gathers_nothing = not any(unit.gathered_numel for unit in plan.units)
        make = partial(
            UnitScheduler,
            plan.unit_rules,
            device=gathers.device.type,
            is_alone=mesh.world.size == 1,
        )
        self._cached = CachedScheduler(make, learned.schedule_cache)
        self.phase: Phase = "forward"
        self._run: Run = ()
        self._is_known = False  # whether its order was learned before it began

    def request(
        self,
        method: Callable[[UnitScheduler, *Arguments], tuple[Event, ...] | None],
        *arguments: *Arguments,
    ) -> None:
        """Executes the events with which the unit scheduler answers a request: a method
        of it, and the arguments.

        *Collective* for the events that ranks agree on.
        """
        if events := self._cached.answer((method, *arguments)):
            self.execute(events)

    def execute(self, events: Iterable[Event]) -> None:
        """Executes events of the scheduler. *Collective* for the events that ranks
        agree on.
        """
        gathers, reductions, units = self._gathers, self._reductions, self._units
        for kind, unit in events:
            match kind:  # the cases that each unit has come first
                case "wait_gather":
                    gathers.wait(units[unit])
                case "release":
                    gathers.release(unit)
                case "gather":
                    with profiler_range("gather", unit):
                        gathers.start(units[unit], self.phase)
                case "collect":
                    reductions.collect(*self._flats[unit])
                case "reduce" | "keep":
                    is_full = units[unit].buffers[0].flow.reduces_to == "full"
                    with profiler_range("all_reduce" if is_full else "reduce_scatter", unit):
                        reductions.start(units[unit], self.phase)
                case "end_reduce":
                    reductions.end_oldest()
                case "prefetch_shards":
                    gathers.prefetch_shards(units[unit])
                case "drop_gather":
                    gathers.drop(unit)
                case "boundary":
                    self.phase = "backward"
                case "negotiate":
                    self._negotiate()
                case "leave_order":
                    self._leave_order()
                case "end" | "use" | "grad" | "exchange":
                    raise AssertionError(f"a scheduler returns no {kind}")
                case _:
                    assert_never(kind)

    def begin(self, run: Run) -> None:
        """From here on, follows the order of a run, or negotiates it. A forward that
        gathers nothing has one order.
        """
        known = None if self._orders is None else self._orders.learned.get(run)
        self._run, self._is_known, self.phase = (
            run,
            known is not None,
            "forward" if run[0] == "forward" else "backward",
        )
        if known is None and self._gathers_nothing:
            known = _WITHOUT_GATHERS.get(run[0])
        self.request(UnitScheduler.begin, known)

    def end(self) -> None:
        """The run has ended without an error: a negotiated order is learned."""
        if self._orders is not None and not self._is_known:
            events, is_whole = self._cached.scheduler.recorded(
                self._run, differ=self._orders.differ
            )
            if self._orders.learn(self._run, events, is_whole=is_whole):
                self._warn()

    # --- other ranks ------------------------------------------------------------------------------

    def _negotiate(self) -> None:
        """Agrees with all ranks on one event after the other, until this rank needs no
        more (`needed` is None).
        """
        names, scheduler = list(self._units), self._cached.scheduler
        while (needed := scheduler.needed) is not None:
            code = [-1, -1]
            if needed.kind in AGREED:
                code = [AGREED.index(needed.kind), names.index(needed.unit) if needed.unit else -1]
            row = torch.tensor(code, device=self._gathers.device)
            rows = collectives.stack(
                row, self._mesh.world, label=Label("negotiate", phase=self.phase)
            ).tolist()
            served = serve(rows, in_forward=scheduler.in_forward)
            if served is None:
                self.execute(scheduler.agreed(END))
                continue
            if scheduler.in_forward and self._orders is not None:
                self._orders.differ |= any(row != served for row in rows)
            self.execute(
                scheduler.agreed(
                    Event(AGREED[served[0]], names[served[1]] if served[1] >= 0 else "")
                )
            )

    def _leave_order(self) -> None:
        """Abandons the order if every rank needs an event that it lacks; the run is
        negotiated from here on.

        Raises:
            ScheduleError: some ranks do not leave the order.
        """
        scheduler, needed = self._cached.scheduler, self._cached.scheduler.needed
        places = (
            collectives.exchange_via_store(scheduler.place, self._mesh.world, seconds=PATIENCE)
            if self._orders
            else None
        )
        if places is None or self._orders is None:
            raise ScheduleError(
                f"rank {self._mesh.world.rank} needs to {needed} where the schedule of collectives "
                f"has no such event: the model runs its units in another order than in the first "
                f"step (a branch on data, a router, layer drop); pass schedule='negotiated', or "
                f"name a module that holds the whole branch in units="
            )
        events = scheduler.leave_order(max(places))
        if self._orders.give_up(self._run):
            self._warn()
        self.execute(events)

    def _warn(self) -> None:
        """Warns on rank 0, once per run, that its order is negotiated."""
        if self._mesh.world.rank == 0 and self._mesh.world.size > 1:
            warnings.warn(
                f"the {self._run[0]} runs its units in an order that differs from step to step "
                f"(layer drop, a branch), so all ranks negotiate it from now on, which is slower; "
                f"name a module that holds the whole branch in units=, or pass "
                f"schedule='negotiated' to do so from the start",
                stacklevel=2,
            )


# they reduce nothing
_WITHOUT_GATHERS: dict[object, tuple[Event, ...]] = {"forward": (BOUNDARY,), "through": ()}
