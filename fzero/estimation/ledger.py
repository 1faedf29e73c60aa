"""What is held, and which lane is busy, while a step is followed on paper? The book that `fzero.estimation.dry_run` keeps.

Bytes are entered by what they are for; whoever takes a flat buffer gives it back. On the CPU a buffer that is given back stays
with the process for the next taker of its size (`fzero.storage.shard_io.BufferPool`), and is entered as `kept`. Whatever moves
takes a lane for its bytes at the rate of the `MachineModel`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from fzero.comms.comm_hooks import CommHook
from fzero.graph.timeline import Lane, Lanes
from fzero.plans.machine_model import MachineModel
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.storage.buffer_sizes import stream_buffers
from sharding import TensorSpec
from sharding.dtypes import itemsize

Device = Literal["cuda", "cpu"]
"""Where the model is. On the CPU host memory is the device's, and buffers that are given back stay with the process."""


class MemorySample(NamedTuple):
    """What is held besides the model state from a moment on, in bytes by what it is for."""

    label: str
    seconds: float
    held: dict[str, int]


class MemoryLedger:
    """What is held and when. `label` is what runs now; `free` counts buffers that are kept, by elements and their size."""

    def __init__(
        self, plan: Plan, machine: MachineModel, device: Device, kept: Counter[tuple[int, int]] | None = None
    ) -> None:
        self.plan, self.machine, self.device = plan, machine, device
        self.lanes = Lanes(overlap=machine.overlap)
        self.streams = stream_buffers(plan)
        self.label, self.rows = "forward", list[MemorySample]()
        self.activations = 0
        self._held: Counter[str] = Counter()
        self.free = Counter(kept)
        self._held["kept"] = sum(num * numel * size for (numel, size), num in self.free.items())

    # --- bytes ---------------------------------------------------------------------------------------------------

    def write(self, activations: int | None = None) -> None:
        """Enters what is held now, with so many bytes of activations (None: those of the last entry)."""
        self.activations = self.activations if activations is None else activations
        held = {name: nbytes for name, nbytes in self._held.items() if nbytes}
        if self.activations:
            held["activations"] = self.activations
        if not self.rows or (self.rows[-1].label, self.rows[-1].held) != (self.label, held):
            self.rows.append(MemorySample(self.label, self.lanes.now, held))

    def take(self, purpose: str, numel: int, dtype: str) -> tuple[str, int, int]:
        """A flat buffer, to be given back as it was taken."""
        size = itemsize(dtype)
        if self.device == "cpu" and self.free[numel, size]:
            self.free[numel, size] -= 1
            self._held["kept"] -= numel * size
        self._held[purpose] += numel * size
        return purpose, numel, size

    def give(self, taken: tuple[str, int, int]) -> None:
        """A flat buffer that nobody needs any more."""
        purpose, numel, size = taken
        self._held[purpose] -= numel * size
        if self.device == "cpu":
            self.free[numel, size] += 1
            self._held["kept"] += numel * size

    def add(self, purpose: str, nbytes: int) -> None:
        """Memory that is new and goes back to the system (negative)."""
        self._held[purpose] += nbytes

    # --- time ----------------------------------------------------------------------------------------------------

    def touch(self, nbytes: int, label: str = "") -> None:
        """The device reads and writes memory."""
        self.lanes.compute(label or self.label, nbytes / self.machine.memory)

    def send(
        self, kind: str, numel: int, axes: Sequence[str], dtype: str, *, times: int = 1, hooks: Mapping[str, CommHook] = {},
        after: float = 0.0, label: str = "",
    ) -> float:  # fmt: skip
        """A collective along axes, one after the other, as `Plan.sent_nbytes_by_axis` counts it. Tells when it ends."""
        for axis in axes:
            num_ranks = self.plan.mesh.axis_size(axis)
            if num_ranks == 1:
                continue
            numel //= num_ranks
            hook = hooks.get(axis)
            nbytes = numel * itemsize(dtype) if hook is None else hook.nbytes(numel, itemsize(dtype))
            nbytes *= times * (num_ranks - 1)
            seconds = self.machine.latency + nbytes / self.machine.network
            after = self.lanes.start("collective", label or kind, seconds, after=after, nbytes=nbytes, axis=axis)
        return after

    def is_here(self, spec: TensorSpec) -> bool:
        """Whether a tensor lives where the model is."""
        return spec.placement.kind == "device" or (spec.placement.kind == "host" and self.device == "cpu")

    def bring(self, spec: TensorSpec, nbytes: int, label: str) -> float:
        """Copies to the device what lives in host memory or a file. Tells when it is there."""
        if self.is_here(spec):
            return 0.0
        end = 0.0
        if spec.placement.kind == "nvme":
            end = self.lanes.start("files", label, nbytes / self.machine.disk)
        return end if self.device == "cpu" else self.lanes.start("host", label, nbytes / self.machine.host, after=end)

    def copy_inputs(self, leaves: int, returns: int) -> None:
        """Copies inputs of checkpointed modules to host memory and back; what is computed waits, for they are on its stream."""
        copies: tuple[tuple[Lane, int], ...] = (("back", leaves), ("host", returns))
        for lane, nbytes in copies:
            if nbytes:
                self.lanes.wait("inputs", self.lanes.start(lane, "inputs", nbytes / self.machine.host))

    def carry(self, spec: TensorSpec, nbytes: int, label: str, *, adds: bool = False) -> float:
        """Copies from the device to where something lives, or adds to what is there. Tells when it has arrived."""
        end = 0.0
        if self.device == "cuda":
            end = self.lanes.start("back", label, nbytes / self.machine.host)
        if spec.placement.kind == "nvme":
            end = self.lanes.start("files", label, nbytes * (1 + adds) / self.machine.disk, after=end)
        return end


def shard_nbytes(buffer: FlatParamPlan, plan: Plan) -> int:
    """Bytes of this rank's shard of parameters."""
    return buffer.params.local_nbytes(plan.mesh)
