"""In which order does a step enter, need again and complete its units? From a trace of the model, or as they are declared.

A trace (`fzero.estimation.activation_trace`) tells of single parameters, and is the same for every stage; a plan says which
of them are gathered and reduced together. A `Part` is what happens to a unit, with what runs until the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from fzero.estimation.activation_trace import Traced, TraceEvent
from fzero.plans.machine_model import MachineModel
from fzero.plans.plan import Plan
from fzero.plans.unit_scheduler import TURN, Event, early
from sharding import Sharded


class Part(NamedTuple):
    """What happens to a unit, and what runs until the next part.

    Attributes:
        kind: as of a `TraceEvent`: the unit is entered, its gathered parameters are needed again, or gradients of `key` are
            there; `use`: it needs parameters that every rank holds.
        ends: whether that was the unit's last gradient.
        numel: elements of these gradients.
        most, now: bytes of activations until the next part, and when it comes.
        seconds: of what runs.
        waiting, leaves, returns: as of a `TraceEvent`.
    """

    kind: Literal["begin", "fetch", "turn", "unpack", "use", "grad"]
    unit: str = ""
    key: str = ""
    ends: bool = False
    numel: int = 0
    most: int = 0
    now: int = 0
    seconds: float = 0.0
    waiting: int = 0
    leaves: int = 0
    returns: int = 0


def parts_of(plan: Plan, trace: Traced | None, machine: MachineModel) -> tuple[Part, ...]:
    """The parts of one micro-step, in order; without a trace nothing runs, and units come as they are declared."""
    return tuple(_declared(plan) if trace is None else _traced(plan, trace.moments, machine))


def _declared(plan: Plan) -> Iterator[Part]:
    yield from (Part("fetch", unit.name) for unit in plan.units)
    yield Part("turn")
    for unit in reversed(plan.units):
        yield Part("unpack", unit.name)
        trained = [buffer for buffer in unit.buffers if buffer.trainable]
        for buffer in trained:
            yield Part("grad", unit.name, buffer.key, buffer is trained[-1], buffer.layout.numel)


def _traced(plan: Plan, moments: Sequence[TraceEvent], machine: MachineModel) -> Iterator[Part]:
    homes = {name: (unit, b) for unit in plan.units for b in unit.buffers for name in b.layout.names}
    last = {homes[m.name][0].name: index for index, m in enumerate(moments) if m.kind == "grad"}
    before = Part("begin")
    for index, moment in enumerate(moments):
        unit, buffer = homes.get(moment.name, (None, None))
        seconds = sum(machine.seconds(flops, nbytes, is_wide=is_wide) for flops, nbytes, is_wide in moment.work)
        part = Part(
            moment.kind, most=moment.most, now=moment.now, seconds=seconds, waiting=moment.waiting,
            leaves=moment.leaves, returns=moment.returns,
        )  # fmt: skip
        if unit is not None and buffer is not None:
            part = part._replace(unit=unit.name)
            if moment.kind == "unpack" and not isinstance(buffer.row.params, Sharded):
                part = part._replace(kind="use")
            if moment.kind == "grad":
                numel = math.prod(buffer.layout.shape(moment.name))
                part = part._replace(key=buffer.key, ends=last[unit.name] == index, numel=numel)
        if before[:3] == part[:3] and not before.ends:  # nothing happens between them
            before = part._replace(
                most=max(before.most, part.most), now=part.now, seconds=before.seconds + part.seconds, ends=part.ends,
                numel=before.numel + part.numel, waiting=max(before.waiting, part.waiting),
                leaves=before.leaves + part.leaves, returns=before.returns + part.returns,
            )  # fmt: skip
            continue
        yield before
        before = part
    yield before


# --- the order of collectives ------------------------------------------------------------------------------------


def order_of(plan: Plan, parts: Sequence[Part]) -> tuple[Event, ...]:
    """The events of a micro-step, as a running step learns them in its first and follows them from then on."""
    units = {unit.name: unit for unit in plan.units}
    forward, backward, live = list[Event](), list[Event](), ""
    events, reduced = forward, set[str]()
    for part in parts:
        if part.kind == "turn":
            forward, events = events, backward
        elif part.kind in ("fetch", "unpack"):
            if units[part.unit].gathered_numel and live != part.unit:
                events.append(Event("gather", part.unit))
            live = part.unit
        if part.ends:
            events.append(Event("reduce", part.unit))
            reduced.add(part.unit)
    rest = [unit.name for unit in reversed(plan.units) if unit.trainable and unit.name not in reduced]
    backward += [Event("reduce", name) for name in rest]
    return (*forward, TURN, *early(backward, plan.may_start_early))
