"""`dry_run`: the bytes that a rank holds over an eager step, and the step's duration,
computed without tensors.

    run = dry_run(plan, trace_activations(model, cfg, batch))
    print(run.description, run.timeline)     # the peak; compute, gathers, reductions and streams, and which waits for which

A dry run executes the events of an eager step's unit scheduler on a trace of the model:
it gathers and releases units, fills and reduces full gradients, and transfers offloaded
state. At every moment it sums the bytes of working buffers and activations, so that the
peak is the peak of the sum. Each move occupies a lane of `fzero.graph.timeline.Lanes`
for its time. The internal memory of collective libraries and the temporaries of single
kernels are not counted.

Without a trace there are no activations, only updates compute, and units run in the
order of their declaration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fzero.common.text_tables import scale_of
from fzero.common.timelines import Timeline, draw_timelines
from fzero.estimation.activation_trace import ActivationTrace
from fzero.estimation.dry_pass import DryPass
from fzero.estimation.dry_update import update
from fzero.estimation.ledger import Device, MemoryLedger, MemorySample
from fzero.estimation.unit_events import order_of, parts_of
from fzero.graph.liveness import Liveness
from fzero.graph.timeline import StepTimeline
from fzero.model.transforms import Size
from fzero.plans.machine_model import MachineModel
from fzero.plans.plan import Plan
from fzero.storage.buffer_sizes import pinned_gaps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class DryRun:
    """One step of one rank.

    Attributes:
        memory: bytes of model state by kind of memory and quantity
            (`Plan.bytes_by_memory`).
        rows: the other bytes in use, sample by sample.
        timeline: the timeline of at most two micro-steps.
        further_seconds: the time of the micro-steps that the timeline leaves out.
        host_pool: bytes of host buffers through which files are read and written, and
            through which the CPU updates state that is on the device.
        host_gaps: bytes of host memory lost to the rounding of pinned allocations.
        host_inputs: the peak of checkpointed inputs in host memory, in bytes.
        device: where the model is.
    """

    memory: dict[str, dict[str, int]]
    rows: tuple[MemorySample, ...] = field(repr=False)
    timeline: StepTimeline = field(repr=False)
    further_seconds: float
    host_pool: int
    host_gaps: int
    host_inputs: int
    device: Device = "cuda"

    @property
    def state(self) -> dict[str, int]:
        """Bytes of model state on the device, by quantity; on the CPU, those in host
        memory count too.
        """
        return _on_device(self.memory, self.device)

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.timeline.seconds + self.further_seconds

    @property
    def peak(self) -> MemorySample:
        """The first sample with the most bytes in use."""
        return max(self.rows, key=lambda row: sum(row.held.values()))

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes on the device at the peak, by purpose."""
        return self.state | self.peak.held

    @property
    def nbytes(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.at_peak.values())

    @property
    def at_rest(self) -> int:
        """Bytes on the device between two steps."""
        return sum(self.state.values()) + self.rows[-1].held.get("kept", 0)

    def most(self, name: str) -> int:
        """The peak bytes of one purpose, such as `gathers`."""
        return max(row.held.get(name, 0) for row in self.rows)

    @property
    def description(self) -> str:
        """The peak in words: its size, when it is, and what it consists of."""
        scale, unit = scale_of(self.nbytes)
        parts = sorted(self.at_peak.items(), key=lambda part: -part[1])
        fractions = [
            f"{nbytes / self.nbytes:.0%} {name}"
            for name, nbytes in parts
            if nbytes >= 0.01 * self.nbytes
        ]
        when = self.peak.label if self.peak.held else "all the time"
        return f"{self.nbytes / scale:.3g} {unit} at the most, {when}: {', '.join(fractions)}"

    def draw(self, title: str = "") -> Figure:
        """A picture of the bytes on the device over the step, with the peak. Needs
        matplotlib (extra `pictures`).
        """
        rows = [self.state | row.held for row in self.rows]
        names, labels = [""] + [row.label for row in self.rows], enumerate(self.rows)
        timeline = Timeline(
            end=len(rows),
            colors=COLORS,
            held={name: [row.get(name, 0) for row in rows] for name in COLORS},
            times=range(len(rows)),
            phases=[(row.label, i) for i, row in labels if row.label != names[i]],
            title=title,
            time="",
            bytes="{unit} on the device",
            peak=self.peak.label,
        )
        return draw_timelines([timeline], needed_by="dry_run(…).draw()")


def dry_run(
    plan: Plan,
    trace: ActivationTrace | None = None,
    *,
    machine: MachineModel | None = None,
    device: Device = "cuda",
    title: str = "",
    viewed: Collection[str] = (),
    sizes: Mapping[str, Size] = {},
) -> DryRun:
    """Runs one step of a plan without tensors.

    Args:
        plan: for any number of ranks.
        trace: the trace of one micro-step, of the same model on the same device.
        machine: the rates of one rank.
        device: where the model is; on the CPU the collectives are gloo's.
        title: the title of the timeline.
        viewed: the parameters of which modules see other values
            (`fzero.model.transforms.ParamView`).
        sizes: the sizes of values whose size is not the parameter's.
    """
    machine = machine or MachineModel()
    parts = parts_of(plan.inner, trace, machine)
    order, num = order_of(plan.inner, parts), min(plan.num_micro_steps, 2)
    kept: Counter[tuple[int, int]] | None = None
    # the second step starts with the pool that the first one filled
    for _ in range(2 if device == "cpu" else 1):
        ledger = MemoryLedger(plan, machine, device, kept)
        kept = ledger.free
        ledger.write()
        passes, ends = DryPass(ledger, viewed, sizes), list[float]()
        with passes.gathered():
            for index in range(num):
                passes.run(parts, order, is_first=index == 0, is_last=index == num - 1)
                ends.append(ledger.lanes.now)
        update(ledger)
    further_seconds, memory = ends[0] * (plan.num_micro_steps - num), plan.bytes_by_memory
    timeline = _timeline(
        ledger, sum(_on_device(memory, device).values()), title or f"stage {plan.stage}"
    )
    inputs = max(part.waiting for part in parts)
    on_cuda = device == "cuda"
    pool, gaps = (
        ledger.streams.host_pool + ledger.streams.on_host * on_cuda,
        pinned_gaps(plan) * on_cuda,
    )
    return DryRun(memory, tuple(ledger.rows), timeline, further_seconds, pool, gaps, inputs, device)


def _on_device(memory: dict[str, dict[str, int]], device: Device) -> dict[str, int]:
    kinds = [
        memory.get(kind, {}) for kind in (("device", "host") if device == "cpu" else ("device",))
    ]
    return {name: sum(held.get(name, 0) for held in kinds) for held in kinds for name in held}


def _timeline(ledger: MemoryLedger, state: int, title: str) -> StepTimeline:
    labels, times, held = zip(*ledger.rows, strict=True)
    gathered = tuple(one.get("gathers", 0) for one in held)
    live = Liveness(labels, tuple(sum(one.values()) for one in held), gathered, gathered, state)
    return StepTimeline(tuple(ledger.lanes.spans), times, live, title)


COLORS = {
    "parameters": "#5b7fa6",
    "gradients": "#c98b5b",
    "master": "#7b6a9b",
    "optimizer": "#b9aec9",
    "comm hooks": "#8c8c8c",
    "kept": "#d9d9d9",
    "gathers": "#8fc1e3",
    "views": "#3f7d8c",
    "reductions": "#f0b27a",
    "arrivals": "#e8927c",
    "streams": "#a3b86c",
    "activations": "#7fb08a",
}
