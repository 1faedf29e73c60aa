"""`parts_of`, `order_of`: the events of a micro-step unit by unit, from a trace of the
model or from its declaration.

A trace (`fzero.estimation.activation_trace`) has events of single parameters, the same
for every stage; the plan groups the parameters into units. A `UnitEvent` is an event of
a unit, with the work until the next part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from fzero.estimation.activation_trace import ActivationTrace
from fzero.plans.machine_model import MachineModel
from fzero.plans.plan import Plan
from fzero.plans.traffic import ActivationSend
from fzero.plans.unit_orders import Event, early
from fzero.plans.unit_scheduler import UnitScheduler


class UnitEvent(NamedTuple):
    """An event of a unit, and what happens until the next part, as in `TraceEvent`.

    The unit is entered, its gathered parameters are needed again, or gradients of `key`
    are ready; `use`: it needs parameters that every rank holds in full.
    """

    kind: Literal["begin", "fetch", "boundary", "unpack", "use", "grad"]
    unit: str = ""
    key: str = ""
    ends: bool = False  # whether this is the unit's last gradient
    numel: int = 0  # elements of these gradients
    most: int = 0
    now: int = 0
    seconds: float = 0.0  # duration of the work
    waiting: int = 0
    leaves: int = 0
    returns: int = 0
    sends: tuple[ActivationSend, ...] = ()


def parts_of(
    plan: Plan, trace: ActivationTrace | None, machine: MachineModel
) -> tuple[UnitEvent, ...]:
    """The parts of one micro-step, in order; without a trace they have no work, and
    units run in declaration order.
    """
    return tuple(_declared(plan) if trace is None else _traced(plan, trace, machine))


def _declared(plan: Plan) -> Iterator[UnitEvent]:
    yield from (UnitEvent("fetch", unit.name) for unit in plan.units)
    yield UnitEvent("boundary")
    for unit in reversed(plan.units):
        yield UnitEvent("unpack", unit.name)
        trained = [buffer for buffer in unit.buffers if buffer.trainable]
        for buffer in trained:
            yield UnitEvent(
                "grad", unit.name, buffer.key, buffer is trained[-1], buffer.layout.numel
            )


def _traced(plan: Plan, trace: ActivationTrace, machine: MachineModel) -> Iterator[UnitEvent]:
    param_units, events = plan.param_units, trace.events
    last = {
        param_units[m.name][0].name: index for index, m in enumerate(events) if m.kind == "grad"
    }
    before = UnitEvent("begin")
    for index, (event, seconds) in enumerate(zip(events, trace.seconds(machine), strict=True)):
        unit, buffer = param_units.get(event.name, (None, None))
        kind, name, key, ends, numel = event.kind, "", "", False, 0
        if unit is not None and buffer is not None:
            name = unit.name
            if kind == "grad":
                key, ends, numel = (
                    buffer.key,
                    last[name] == index,
                    math.prod(buffer.layout.shape(event.name)),
                )
        is_here = kind == "unpack" and buffer is not None and not buffer.flow.gathers_over
        part = UnitEvent(
            "use" if is_here else kind,
            name,
            key,
            ends,
            numel,
            event.most,
            event.now,
            seconds,
            *event[-3:],
            event.sends,
        )
        # repeated events of one unit become one part
        if before[:3] == part[:3] and not before.ends:
            before = part._replace(
                numel=before.numel + part.numel,
                most=max(before.most, part.most),
                seconds=before.seconds + seconds,
                waiting=max(before.waiting, part.waiting),
                leaves=before.leaves + part.leaves,
                returns=before.returns + part.returns,
                sends=before.sends + part.sends,
            )
        else:
            yield before
            before = part
    yield before


def follow(
    scheduler: UnitScheduler, part: UnitEvent, backward: Sequence[Event] | None, *, is_last: bool
) -> tuple[Event, ...]:
    """The events that a part causes before its work. At the boundary a backward begins,
    which follows the order `backward`.
    """
    if part.kind == "fetch":
        return scheduler.enter(part.unit)
    if part.kind == "unpack":
        return scheduler.need(part.unit)
    if part.kind == "grad":
        return scheduler.collect(part.unit, part.key)
    if part.kind != "boundary":
        return ()
    events = scheduler.boundary()
    scheduler.begin(backward)
    scheduler.begin_backward(is_last=is_last)
    return events


def order_of(plan: Plan, parts: Sequence[UnitEvent]) -> tuple[Event, ...]:
    """The collectives of a micro-step, in the order that a running step records in its
    first and then repeats.
    """
    scheduler = UnitScheduler(plan.unit_rules, is_alone=True)
    scheduler.begin(None)
    for part in parts:
        follow(scheduler, part, None, is_last=True)
        if part.ends:
            scheduler.end_visit(part.unit)
    scheduler.end_backward()
    return early(scheduler.executed, plan.unit_rules.may_start_early)
