"""The memory and traffic of micro-steps, without tensors: what each event of the unit
scheduler does on a ledger.

`fzero.runtime.sequencer` executes the same events on tensors. The methods of `DryPass`
give each its bytes and its time on a lane; the reasons are in `fzero.runtime.gathers`
and `reductions`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import assert_never

from fzero.estimation.ledger import MemoryLedger
from fzero.estimation.unit_events import UnitEvent, follow
from fzero.model.transforms import Size
from fzero.plans.dataflow import GradHome, Holds
from fzero.plans.plan import FlatParamPlan
from fzero.plans.unit_orders import BOUNDARY, Event
from fzero.plans.unit_scheduler import UnitScheduler
from fzero.runtime.param_views import kept_units, seen_numel
from fzero.storage.buffer_sizes import MOST_LEAVING
from sharding.dtypes import itemsize

Taken = tuple[str, int, int]


@dataclass(slots=True)
class _Gather:
    """The gather of a unit in flight, or in use."""

    full: list[Taken]
    shards: int  # bytes of offloaded shards that were copied to the device for it
    end: float


@dataclass(slots=True)
class _Reduction:
    """The reductions of a unit in flight."""

    full: list[Taken] = field(default_factory=list)
    arriving: int = 0  # bytes of receive buffers
    ends: list[tuple[FlatParamPlan, float, GradHome]] = field(default_factory=list)


class DryPass:
    """Runs the micro-steps of one step on a ledger; `scheduler` decides what is
    executed when.

    Args:
        viewed: the names of the parameters of which modules see other values.
        sizes: the sizes of values whose size is not the parameter's.
    """

    def __init__(
        self, ledger: MemoryLedger, viewed: Collection[str] = (), sizes: Mapping[str, Size] = {}
    ) -> None:
        self.ledger, self.plan, self._viewed, self._sizes = ledger, ledger.plan, viewed, sizes
        self._kept = kept_units(self.plan, viewed, sizes) if viewed else frozenset[str]()
        self._seen: dict[str, int] = {}  # bytes of the values of views, by unit
        self.scheduler = UnitScheduler(self.plan.inner.unit_rules, device=ledger.device)
        self._units = {unit.name: unit for unit in self.plan.units}
        self._flats = {buffer.key: buffer for buffer in self.plan.flat_buffers}
        self._gathers: dict[str, _Gather] = {}
        self._prefetched: dict[str, float] = {}  # per key: the time when the shard has arrived
        # per key; None is the gradient's own memory
        self._filling: dict[str, tuple[GradHome, Taken | None]] = {}
        self._in_flight: deque[_Reduction] = deque()
        self._holds: dict[str, Holds] = {buffer.key: "nothing" for buffer in self.plan.flat_buffers}

    def run(
        self, parts: Sequence[UnitEvent], order: Sequence[Event], *, is_first: bool, is_last: bool
    ) -> None:
        """One forward and backward, the first or last of its step; `order` is that of
        its collectives.
        """
        self.is_last, self._leaving = is_last, deque[float]()
        self._holds = dict.fromkeys(self._holds, "nothing" if is_first else "sum")
        scheduler, boundary = self.scheduler, order.index(BOUNDARY) + 1
        scheduler.begin(order[:boundary])
        self.execute(scheduler.begin_forward(is_first=True))
        for part in parts:
            self._follow(part, order[boundary:])
        self.execute(scheduler.end_backward())
        self.ledger.write()
        self.execute(scheduler.finish())
        for unit in list(self._seen) if is_last else ():
            self._forget(unit)
        while self._leaving:
            self.ledger.lanes.wait("write_back", self._leaving.popleft())
        self.ledger.activations = 0
        self.ledger.write()

    def _follow(self, part: UnitEvent, backward: Sequence[Event]) -> None:
        ledger = self.ledger
        if part.unit and part.kind != "boundary":
            ledger.label = (
                f"{'forward' if self.scheduler.in_forward else 'backward'} of {part.unit}"
            )
            ledger.run_python("event")
        self.execute(follow(self.scheduler, part, backward, is_last=self.is_last))
        if part.unit and part.kind in ("fetch", "unpack"):
            self._view(part.unit)
        ledger.write()  # before anything is computed
        ledger.write(part.most)
        ledger.lanes.compute(ledger.label, part.seconds)
        ledger.send_activations(part.sends)
        ledger.copy_inputs(part.leaves, part.returns)
        ledger.activations = part.now
        if part.kind == "grad":
            dtypes = self._flats[part.key].dtypes
            ledger.touch(part.numel * (itemsize(dtypes.param) + itemsize(dtypes.reduce)))
        if part.ends:
            self.execute(self.scheduler.end_visit(part.unit))

    def execute(self, events: Iterable[Event]) -> None:
        """Executes what the scheduler returned."""
        for kind, unit in events:
            match kind:
                case "gather":
                    self._gather(unit)
                case "prefetch_shards":
                    self._prefetch(unit)
                case "wait_gather":
                    self._wait_gather(unit)
                case "release":
                    self._release(unit)
                case "drop_gather":
                    self._wait_gather(unit)
                    self._release(unit)
                case "collect":
                    self._collect(unit)
                case "reduce" | "keep":
                    self._reduce(unit)
                case "end_reduce":
                    self._end_reduce()
                case "boundary":
                    pass
                case "negotiate" | "leave_order" | "end" | "use" | "grad" | "exchange":
                    raise AssertionError(f"a scheduler that follows an order returns no {kind}")
                case _:
                    assert_never(kind)

    # --- gathers ----------------------------------------------------------------------------------

    def _gather(self, name: str) -> None:
        plan, ledger = self.plan, self.ledger
        full, shards, end = list[Taken](), 0, 0.0
        for buffer in (buffer for buffer in self._units[name].buffers if buffer.flow.gathers_over):
            fetched = (
                self._prefetched.pop(buffer.key)
                if buffer.key in self._prefetched
                else self._fetch(buffer)
            )
            shards += 0 if ledger.is_here(buffer.params) else ledger.nbytes_of(buffer.params)
            if buffer.flow.param_numel == buffer.padded_numel:
                end = max(end, fetched)
                continue
            full.append(ledger.take("gathers", buffer.padded_numel, buffer.dtypes.param))
            hooks = plan.comm_hooks.of_gathers(buffer.dtypes.param, trained=buffer.trainable)
            if ledger.device == "cpu":  # this rank copies its own shard into the full buffer
                ledger.touch(2 * ledger.nbytes_of(buffer.params))
            what = buffer.padded_numel, buffer.flow.gathers_over, buffer.dtypes.param
            end = max(end, ledger.send(f"gather {name}", *what, hooks=hooks, after=fetched))
        self._gathers[name] = _Gather(full, shards, end)
        ledger.write()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all units are gathered, where a step gathers once."""
        names = [] if self.plan.inner is self.plan else list(self._units)
        for name in names:
            self._gather(name)
        for name in names:
            self._wait_gather(name)
        yield
        for name in names:
            self._release(name)

    def _prefetch(self, name: str) -> None:
        for buffer in self._units[name].buffers:
            if buffer.flow.gathers_over and buffer.key not in self._prefetched:
                self._prefetched[buffer.key] = self._fetch(buffer)
        self.ledger.write()

    def _fetch(self, buffer: FlatParamPlan) -> float:
        """Starts to load a shard; returns when it is here."""
        nbytes, spec = self.ledger.nbytes_of(buffer.params), buffer.params
        if not self.ledger.is_here(spec):
            self.ledger.add("gathers", nbytes)
        return self.ledger.fetch(spec, nbytes, f"load {buffer.key}")

    def _wait_gather(self, name: str) -> None:
        gather = self._gathers[name]
        self.ledger.lanes.wait(f"gather {name}", gather.end)
        if gather.full:  # otherwise the model computes with the copies of the shards
            self.ledger.add("gathers", -gather.shards)
            gather.shards = 0

    def _view(self, name: str) -> None:
        """Adds the values of the views of a unit's parameters, unless it is there."""
        numels = (
            {} if name in self._seen else seen_numel(self._units[name], self._viewed, self._sizes)
        )
        if numels:
            self._seen[name] = sum(numel * itemsize(dtype) for dtype, numel in numels.items())
            self.ledger.add("views", self._seen[name])

    def _forget(self, name: str) -> None:
        self.ledger.add("views", -self._seen.pop(name, 0))

    def _release(self, name: str) -> None:
        if name not in self._kept:
            self._forget(name)
        gather = self._gathers.pop(name)
        self.ledger.add("gathers", -gather.shards)
        for taken in gather.full:
            self.ledger.give(taken)

    # --- gradients --------------------------------------------------------------------------------

    def _collect(self, key: str) -> None:
        buffer = self._flats[key]
        home = buffer.flow.home(
            self._holds[key], is_last=self.is_last, is_here=self.ledger.is_here(buffer.grads)
        )
        taken = None
        if home.fills != "home":
            taken = self.ledger.take("reductions", buffer.padded_numel, home.dtype)
        self._filling[key] = home, taken
        if home.adds_to_sum:
            nbytes = self.ledger.nbytes_of(buffer.grads)
            self.ledger.lanes.wait(key, self.ledger.fetch(buffer.grads, nbytes, key))

    def _reduce(self, name: str) -> None:
        reduction = _Reduction()
        for buffer in (buffer for buffer in self._units[name].buffers if buffer.trainable):
            home, taken = self._filling.pop(buffer.key)
            self._holds[buffer.key] = home.leaves
            if home.reduces:
                reduction.full += [] if taken is None else [taken]
                reduction.ends.append((buffer, self._start(buffer, home, reduction, taken), home))
                continue
            if taken is not None:
                self.ledger.write_back(
                    buffer.grads, self.ledger.nbytes_of(buffer.grads), buffer.key
                )
                self.ledger.give(taken)
        if reduction.ends:
            self._in_flight.append(reduction)
        self.ledger.write()

    def _start(
        self, buffer: FlatParamPlan, home: GradHome, reduction: _Reduction, taken: Taken | None
    ) -> float:
        """Starts the reduction; returns its end time."""
        plan, ledger, flow = self.plan, self.ledger, buffer.flow
        hooks, dtype, numel = plan.comm_hooks.reduce, flow.send_dtype, flow.reduced_numel
        if taken is None and flow.keep_dtype != dtype:
            reduction.arriving += buffer.padded_numel * itemsize(dtype)  # a copy in `reduce_dtype`
        shard, is_full = buffer.shard_numel * itemsize(dtype), flow.reduces_to == "full"
        end = ledger.send("reduce", buffer.padded_numel, flow.scatters_over, dtype, hooks=hooks)
        # collective of two ranks for both halves, which adds meanwhile
        is_one = plan.world_size == 2 and not hooks
        for axis in flow.sums_over if self.is_last else ():
            for through in (hooks, {})[is_one:]:
                end = ledger.send(
                    "reduce", numel * (1 + is_one), (axis,), dtype, hooks=through, after=end
                )
            numel //= plan.mesh.axis_size(axis)
        if not is_full:
            reduction.arriving += shard * (not home.is_in_place and plan.num_shards > 1)
        if home.adds_late and not (ledger.is_here(buffer.grads) or buffer.grads.placement.in_file):
            nbytes = ledger.nbytes_of(buffer.grads)  # the sum so far, to which the device adds
            reduction.arriving += nbytes
            end = max(end, ledger.fetch(buffer.grads, nbytes, buffer.key))
        if ledger.device == "cpu" and plan.num_shards > 1:
            # Shards are received one by one, the first into the result buffer unless that holds a
            # summand: in stage 1 this rank's own, which the sum overwrites.
            is_summand = is_full or (flow.collects == "full" and flow.keep_dtype == dtype)
            if not (is_full and is_one):
                reduction.arriving += shard * (plan.num_shards - 2 + is_summand)
                ledger.touch(shard * (plan.num_shards + 1))
        ledger.add("arrivals", reduction.arriving)
        return end

    def _end_reduce(self) -> None:
        ledger, reduction = self.ledger, self._in_flight.popleft()
        for buffer, end, home in reduction.ends:
            ledger.lanes.wait(f"reduce {buffer.key}", end)
            nbytes = ledger.nbytes_of(buffer.grads)
            if home.adds_held or home.adds_late:
                ledger.touch(3 * nbytes)
            if not ledger.is_here(buffer.grads):
                while len(self._leaving) >= MOST_LEAVING and buffer.grads.placement.in_file:
                    ledger.lanes.wait(buffer.key, self._leaving.popleft())
                self._leaving.append(
                    ledger.write_back(
                        buffer.grads, nbytes, f"write_back {buffer.key}", adds=home.adds_late
                    )
                )
        ledger.add("arrivals", -reduction.arriving)
        for taken in reduction.full:
            ledger.give(taken)
