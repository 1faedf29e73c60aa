"""`update`: the time of the optimizer update in a dry run, buffer by buffer
(`fzero.runtime.update`, `fzero.storage.stream`).

An update reads and writes its tensors once. On the device it takes their bytes at the
rate of memory; where every rank holds the full parameters, the all-gather overlaps the
update of the next buffer. Offloaded state streams through in sub-groups: one is fetched
while the previous one is updated and the one before that is written back, each on its
lane. The CPU updates state in files or host memory while the device is idle: gradients
and parameters that are on the device cross the host link for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fzero.comms.axes import WORLD
from fzero.estimation.ledger import MemoryLedger
from fzero.graph.timeline import Lane
from fzero.plans.plan import FlatParamPlan
from fzero.storage.buffer_sizes import updated_specs, updates_on_host
from sharding import TensorSpec
from sharding.dtypes import itemsize

# the most sub-groups of one buffer in a dry run; if there are more, several are simulated as one
MOST_SUB_GROUPS = 16


def update(ledger: MemoryLedger) -> None:
    """The norm of the gradients, the updates, and the all-gathers of parameters that
    every rank holds in full.
    """
    plan = ledger.plan
    trained = [buffer for buffer in plan.flat_buffers if buffer.trainable]
    ledger.label = "update"
    for buffer in trained:
        nbytes = buffer.shard_numel * itemsize(buffer.dtypes.grad)
        ledger.touch(nbytes, "norm")  # also if offloaded, before it leaves the device
    if plan.world_size > 1:
        axis = plan.mesh.names[0] if len(plan.mesh.names) == 1 else WORLD
        ledger.lanes.wait(
            "norm", ledger.lanes.start("collective", "norm", ledger.machine.latency, axis=axis)
        )
    ledger.add("streams", ledger.streams.on_device if ledger.device == "cuda" else 0)
    ledger.write()
    ends = [_here(ledger, buffer) for buffer in trained if _is_here(ledger, buffer)]
    offloaded = [buffer for buffer in trained if not _is_here(ledger, buffer)]
    _stream(ledger, offloaded)
    ends += [_join(ledger, buffer) for buffer in offloaded]
    for end in ends:
        ledger.lanes.wait("all_gather_params", end)
    ledger.lanes.settle()
    ledger.write()


def _is_here(ledger: MemoryLedger, buffer: FlatParamPlan) -> bool:
    return all(
        ledger.is_here(spec) for spec in (buffer.params, *updated_specs(buffer, ledger.plan))
    )


def _moved(buffer: FlatParamPlan, specs: list[TensorSpec]) -> int:
    """Bytes read and written per element: all of `specs`, except that the gradient is
    only read; new parameters are written.
    """
    both = sum(2 * itemsize(spec.dtype) for spec in specs)
    return both - itemsize(buffer.dtypes.grad) + itemsize(buffer.dtypes.param) * buffer.has_master


def _here(ledger: MemoryLedger, buffer: FlatParamPlan) -> float:
    nbytes = buffer.flow.updated_numel * _moved(buffer, list(updated_specs(buffer, ledger.plan)))
    ledger.run_python("update")
    ledger.touch(nbytes, f"update {buffer.key}", rate=_rate(ledger, buffer))
    return _join(ledger, buffer)


def _rate(ledger: MemoryLedger, buffer: FlatParamPlan) -> float:
    """The bytes per second of an update on the device."""
    machine = ledger.machine
    return (machine.update if buffer.has_master else machine.update_fp32) or machine.memory


def _join(ledger: MemoryLedger, buffer: FlatParamPlan) -> float:
    flow = buffer.flow
    return ledger.send("all_gather_params", flow.param_numel, flow.joins_over, buffer.dtypes.param)


class _Group(NamedTuple):
    """A sub-group, or several simulated as one: seconds of its update, and on each lane
    of its fetch and write-back.
    """

    label: str
    fetch: dict[Lane, float]
    compute: float
    put: dict[Lane, float]


def _groups(ledger: MemoryLedger, buffer: FlatParamPlan) -> Iterator[_Group]:
    plan, machine = ledger.plan, ledger.machine
    specs, numel = list(updated_specs(buffer, plan)), buffer.flow.updated_numel
    on_host = updates_on_host(buffer, plan)
    num = (
        1
        if buffer.updates_whole
        else max(min(-(-numel // plan.streaming.sub_group_numel), MOST_SUB_GROUPS), 1)
    )
    fetch, put = defaultdict[Lane, float](float), defaultdict[Lane, float](float)
    for index, spec in enumerate((*specs, *([buffer.params] if buffer.has_master else ()))):
        for lane, rate, is_fetch in _moves(ledger, spec, on_host):
            if is_fetch and index < len(specs):  # new parameters are only written
                fetch[lane] += numel / num * itemsize(spec.dtype) / rate
            if not is_fetch and index != 1:  # the gradient does not change
                put[lane] += numel / num * itemsize(spec.dtype) / rate
    rate = machine.processor if on_host and ledger.device == "cuda" else _rate(ledger, buffer)
    compute = numel / num * _moved(buffer, specs) / rate
    for _ in range(num):
        yield _Group(buffer.key, fetch, compute, put)


def _moves(
    ledger: MemoryLedger, spec: TensorSpec, on_host: bool
) -> Iterator[tuple[Lane, float, bool]]:
    """The transfers of a tensor for its update: (lane, rate, whether it is the fetch
    and not the write-back).
    """
    machine = ledger.machine
    if spec.placement.in_file:
        yield from (("files", machine.disk, True), ("files", machine.disk, False))
    elif ledger.is_here(spec) == (on_host and ledger.device == "cuda"):
        yield from (("back", machine.host, on_host), ("host", machine.host, not on_host))


def _stream(ledger: MemoryLedger, buffers: Sequence[FlatParamPlan]) -> None:
    """Fetches, updates and writes back one sub-group after the other."""
    lanes = ledger.lanes
    groups = [group for buffer in buffers for group in _groups(ledger, buffer)]
    fetched = deque[float]()
    for index, group in enumerate(groups):
        for following in groups[
            index + len(fetched) : index + 1 + ledger.plan.streaming.read_ahead
        ]:
            ends = [
                lanes.start(lane, f"fetch {following.label}", time)
                for lane, time in following.fetch.items()
            ]
            fetched.append(max(ends, default=0.0))
        lanes.wait("update", fetched.popleft())
        ledger.run_python("update")
        lanes.compute(f"update {group.label}", group.compute)
        for lane, time in group.put.items():
            lanes.start(lane, f"write_back {group.label}", time)
