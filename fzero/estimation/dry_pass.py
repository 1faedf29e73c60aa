"""The memory and traffic of one micro-step, without tensors: the moves of `fzero.runtime.eager.ForwardBackward`.

The methods follow `eager`, `sequencer`, `gathers` and `reductions` of `fzero.runtime` step by step; the reasons are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fzero.estimation.ledger import MemoryLedger, shard_nbytes
from fzero.estimation.unit_events import Part
from fzero.plans.plan import FlatParamPlan, UnitPlan
from fzero.plans.unit_scheduler import Event
from fzero.storage.shard_io import MOST_LEAVING
from sharding.dtypes import itemsize

Taken = tuple[str, int, int]


@dataclass(slots=True)
class _Gather:
    """The gather of a unit in flight."""

    full: list[Taken]
    shards: int
    """Bytes of offloaded shards that were copied to the device for it."""
    end: float


@dataclass(slots=True)
class _Reduction:
    """The reductions of a unit in flight."""

    numel: int
    full: list[Taken]
    arriving: int
    """Bytes of receive buffers."""
    ends: list[tuple[FlatParamPlan, float, bool]] = field(default_factory=list)


class DryPass:
    """Runs micro-steps one after the other on a ledger."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.ledger, self.plan = ledger, ledger.plan
        self._units = {unit.name: unit for unit in self.plan.units}
        self._held: set[str] = set()  # keys of full gradients to which the next one is added

    def run(self, parts: Sequence[Part], order: Sequence[Event], *, is_first: bool, is_last: bool) -> None:
        """One forward and backward.

        Args:
            order: of its collectives.
            is_first, is_last: whether this micro-step is the first or last of its step.
        """
        self.is_first, self.is_last = is_first, is_last
        self._schedule, self._position, self._in_forward = order, 0, True
        self._present, self._live = "", dict[str, list[Taken]]()
        self._gathering: dict[str, _Gather] = {}
        self._prefetched: dict[str, tuple[int, float]] = {}
        self._filling: dict[str, dict[str, Taken | None]] = {}
        self._in_flight: deque[_Reduction] = deque()
        self._ready, self._reduced, self._leaving = set[str](), set[str](), deque[float]()
        self._entered = {part.unit for part in parts if part.kind == "fetch"}
        for part in parts:
            self._follow(part)
        self._finish()

    def _follow(self, part: Part) -> None:
        ledger, unit = self.ledger, self._units.get(part.unit)
        if part.kind == "boundary":
            self._advance_to(part.kind, "")
            self._drop_gathers()
            self._in_forward = False
        if unit is not None:
            ledger.label = f"{'forward' if self._in_forward else 'backward'} of {part.unit}"
        if unit is not None and (part.kind == "unpack" or (part.kind == "fetch" and self._is_asked(part.unit))):
            self._gathered(unit)
            self._present = part.unit if part.kind == "fetch" else self._present
        if unit is not None and part.kind == "grad":
            self._flat_grad(unit, next(b for b in unit.buffers if b.key == part.key))
        ledger.write()  # before anything is computed
        ledger.write(part.most)
        ledger.lanes.compute(ledger.label, part.seconds)
        ledger.copy_inputs(part.leaves, part.returns)
        ledger.activations = part.now
        if part.kind == "grad" and unit is not None:
            buffer = next(b for b in unit.buffers if b.key == part.key)
            ledger.touch(part.numel * (itemsize(buffer.dtypes.param) + itemsize(buffer.dtypes.reduce)))
        if part.ends:
            self._ready.add(part.unit)
            self._reduce_ready()

    def _is_asked(self, unit: str) -> bool:
        return unit != self._present or not self._in_forward

    # --- gathers -------------------------------------------------------------------------------------------------

    def _gathered(self, unit: UnitPlan) -> None:
        self._release_all_but(unit.name)
        if unit.gathered_numel and unit.name not in self._live:
            if unit.name not in self._gathering:
                self._advance_to("gather", unit.name)
            self._live[unit.name] = self._end_gather(unit.name)
        event = self._next
        is_gather = event is not None and event.kind == "gather" and not self._gathering
        if event is not None and is_gather and self.plan.may_start_early(unit.name, event.unit):
            self._issue(event)

    @property
    def _next(self) -> Event | None:
        return self._schedule[self._position] if self._position < len(self._schedule) else None

    def _advance_to(self, kind: str, unit: str) -> None:
        while (event := self._next) is not None:
            if event.kind == "boundary" and kind == "gather" and self._in_forward:
                return
            self._issue(event)
            if event == (kind, unit):
                return

    def _issue(self, event: Event) -> None:
        self._position += 1
        if event.kind == "gather":
            self._start_gather(self._units[event.unit])
        elif event.kind == "reduce":
            self._start_reduce(self._units[event.unit])

    def _start_gather(self, unit: UnitPlan) -> None:
        self._drop_gathers()
        plan, ledger = self.plan, self.ledger
        full, shards, end = list[Taken](), 0, 0.0
        for buffer in unit.buffers:
            if not buffer.flow.gathers_over:
                continue
            fetched = self._fetch(buffer)
            shards += 0 if ledger.is_here(buffer.params) else shard_nbytes(buffer, plan)
            axes = buffer.flow.gathers_over
            if buffer.flow.param_numel == buffer.padded_numel:
                end = max(end, fetched)
                continue
            full.append(ledger.take("gathers", buffer.padded_numel, buffer.dtypes.param))
            hooks = plan.comm_hooks.gather if buffer.trainable else plan.comm_hooks.frozen
            if ledger.device == "cpu":  # this rank copies its own shard into the full buffer
                ledger.touch(2 * shard_nbytes(buffer, plan))
            label = f"gather {unit.name}"
            sent = ledger.send(label, buffer.padded_numel, axes, buffer.dtypes.param, hooks=hooks, after=fetched)
            end = max(end, sent)
        self._gathering[unit.name] = _Gather(full, shards, end)
        following = next((e.unit for e in self._schedule[self._position :] if e.kind == "gather"), None)
        if full and plan.prefetch != 0 and following is not None:
            for buffer in self._units[following].buffers:
                if buffer.flow.gathers_over and buffer.key not in self._prefetched:
                    self._prefetched[buffer.key] = self._start_fetch(buffer)
        ledger.write()

    def _fetch(self, buffer: FlatParamPlan) -> float:
        return (self._prefetched.pop(buffer.key, None) or self._start_fetch(buffer))[1]

    def _start_fetch(self, buffer: FlatParamPlan) -> tuple[int, float]:
        nbytes, spec = shard_nbytes(buffer, self.plan), buffer.params
        if not self.ledger.is_here(spec):
            self.ledger.add("gathers", nbytes)
        return nbytes, self.ledger.fetch(spec, nbytes, f"load {buffer.key}")

    def _end_gather(self, unit: str) -> list[Taken]:
        gather = self._gathering.pop(unit)
        self.ledger.lanes.wait(f"gather {unit}", gather.end)
        if gather.full:
            self.ledger.add("gathers", -gather.shards)
            return gather.full
        return [("gathers", gather.shards, -1)] if gather.shards else []  # the model computes with the copy

    def _drop_gathers(self) -> None:
        for unit in list(self._gathering):
            self._give_back(self._end_gather(unit))

    def _release_all_but(self, unit: str) -> None:
        if self._present != unit:
            self._present = ""
        for name in [name for name in self._live if name != unit]:
            self._give_back(self._live.pop(name))

    def _give_back(self, full: Sequence[Taken]) -> None:
        for taken in full:
            if taken[2] < 0:
                self.ledger.add("gathers", -taken[1])
            else:
                self.ledger.give(taken)

    # --- gradients -----------------------------------------------------------------------------------------------

    def _flat_grad(self, unit: UnitPlan, buffer: FlatParamPlan) -> None:
        filling, flow = self._filling.setdefault(unit.name, {}), buffer.flow
        if buffer.key in filling:
            return
        is_kept = flow.collects == "full" and buffer.key not in self._reduced
        is_kept &= flow.keep_dtype == flow.send_dtype or not (self.is_first and self.is_last)
        if is_kept and self.ledger.is_here(buffer.grads):
            filling[buffer.key] = None
        else:
            dtype = flow.keep_dtype if is_kept else flow.send_dtype
            filling[buffer.key] = self.ledger.take("reductions", buffer.padded_numel, dtype)
        if is_kept and buffer.key in self._held:
            self.ledger.lanes.wait(buffer.key, self.ledger.fetch(buffer.grads, self._grad_nbytes(buffer), buffer.key))

    def _reduce_ready(self) -> None:
        while (event := self._next) is not None and event.kind == "reduce":
            if event.unit not in self._ready and event.unit in self._entered:
                return
            self._issue(event)

    def _start_reduce(self, unit: UnitPlan) -> None:
        trained = [buffer for buffer in unit.buffers if buffer.trainable]
        numel = sum(buffer.padded_numel for buffer in trained)
        while self._in_flight and sum(r.numel for r in self._in_flight) + numel > self.plan.max_reducing:
            self._end_reduce()
        for buffer in trained:
            self._flat_grad(unit, buffer)
        filling = self._filling.pop(unit.name, {})
        reduction = _Reduction(numel, [], 0)
        for buffer in trained:
            taken = filling[buffer.key]
            if not buffer.flow.reduces(is_last=self.is_last):
                self._held.add(buffer.key)
                if taken is not None:
                    self.ledger.write_back(buffer.grads, self._grad_nbytes(buffer), buffer.key)
                    self.ledger.give(taken)
                continue
            reduction.full += [] if taken is None else [taken]
            reduction.ends.append((buffer, *self._reduce(buffer, reduction, taken)))
            self._reduced.add(buffer.key)
        if reduction.ends:
            self._in_flight.append(reduction)
        self.ledger.write()
        if not all(self.ledger.is_here(buffer.grads) for buffer, *_ in reduction.ends):
            while len(self._in_flight) > (self.plan.world_size > 1):
                self._end_reduce()

    def _reduce(self, buffer: FlatParamPlan, reduction: _Reduction, taken: Taken | None) -> tuple[float, bool]:
        """Starts the reduction; returns its end time, and whether its result is added to earlier micro-steps' gradients."""
        plan, ledger, flow = self.plan, self.ledger, buffer.flow
        hooks, dtype, numel = plan.comm_hooks.reduce, flow.send_dtype, flow.reduced_numel
        if taken is None and flow.keep_dtype != dtype:
            reduction.arriving += buffer.padded_numel * itemsize(dtype)  # a copy in `reduce_dtype`
        shard, is_full = buffer.shard_numel * itemsize(dtype), flow.reduces_to == "full"
        adds = flow.adds(is_first=self.is_first)
        end = ledger.send("reduce_scatter", buffer.padded_numel, flow.scatters_over, dtype, hooks=hooks, label="reduce")
        for axis in flow.sums_over if self.is_last else ():
            for through in (hooks, {}):
                end = ledger.send("all_reduce", numel, (axis,), dtype, hooks=through, after=end, label="reduce")
            numel //= plan.mesh.axis_size(axis)
        if not is_full:
            is_new = adds or flow.keep_dtype != dtype or not ledger.is_here(buffer.grads)
            reduction.arriving += shard * (is_new and plan.num_shards > 1)
        if ledger.device == "cpu" and plan.num_shards > 1:
            # Shards are received one by one, the first into the result buffer unless that holds a summand: in stage 1 this
            # rank's own, which the sum overwrites.
            is_summand = is_full or (flow.collects == "full" and flow.keep_dtype == dtype)
            if not (is_full and plan.world_size == 2):  # gloo has one collective for two ranks
                reduction.arriving += shard * (plan.num_shards - 2 + is_summand)
            ledger.touch(shard * (plan.num_shards + 1))
        ledger.add("arrivals", reduction.arriving)
        return end, adds

    def _end_reduce(self) -> None:
        reduction = self._in_flight.popleft()
        for buffer, end, adds in reduction.ends:
            self.ledger.lanes.wait(f"reduce {buffer.key}", end)
            if adds:
                self.ledger.touch(3 * self._grad_nbytes(buffer))
            if not self.ledger.is_here(buffer.grads):
                while len(self._leaving) >= MOST_LEAVING and buffer.grads.placement.kind == "nvme":
                    self.ledger.lanes.wait(buffer.key, self._leaving.popleft())
                nbytes = self._grad_nbytes(buffer)
                self._leaving.append(
                    self.ledger.write_back(buffer.grads, nbytes, f"write_back {buffer.key}", adds=adds)
                )
        self.ledger.add("arrivals", -reduction.arriving)
        for taken in reduction.full:
            self.ledger.give(taken)

    def _grad_nbytes(self, buffer: FlatParamPlan) -> int:
        return buffer.grads.local_nbytes(self.plan.mesh)

    def _finish(self) -> None:
        self._entered.clear()
        while (event := self._next) is not None:
            self._issue(event)
        self.ledger.write()
        while self._in_flight:
            self._end_reduce()
        while self._leaving:
            self.ledger.lanes.wait("write_back", self._leaving.popleft())
        self._drop_gathers()
        self._release_all_but("")
        self.ledger.activations = 0
        self.ledger.write()
