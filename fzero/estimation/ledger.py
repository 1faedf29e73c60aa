"""`MemoryLedger`: the bytes in use, by purpose, and the busy lanes during a dry run
(`fzero.estimation.dry_run`).

Every flat buffer that is taken is given back. On the CPU a returned buffer stays in a
pool for the next use of its size (`fzero.storage.shard_io.BufferPool`), and counts as
`kept`. A transfer occupies a lane for its bytes at the rate of the `MachineModel`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from fzero.comms.comm_hooks import CommHook
from fzero.comms.records import messages
from fzero.graph.timeline import Lane, Lanes
from fzero.plans.machine_model import MachineModel
from fzero.plans.plan import Plan
from fzero.plans.traffic import ActivationSend, in_bytes
from fzero.storage.buffer_sizes import stream_buffers
from sharding import TensorSpec
from sharding.dtypes import itemsize

Device = Literal["cuda", "cpu"]
"""Where the model is. On the CPU, host memory is the device's memory, and returned
buffers stay in a pool.
"""


PYTHON = {"event": 5, "collective": 15, "update": 12}
"""The Python of a step itself, as so many operators, for each event of a unit,
collective, and update of a flat buffer: measured on a CPU, with small and large units,
as the time of a step beyond its operators, transfers and updates."""


class MemorySample(NamedTuple):
    """The bytes in use besides the model state from `seconds` on, by purpose."""

    label: str
    seconds: float
    held: dict[str, int]


class MemoryLedger:
    """The bytes in use over time. `label` names the running phase; `free` counts pooled
    buffers by (numel, itemsize).
    """

    def __init__(
        self,
        plan: Plan,
        machine: MachineModel,
        device: Device,
        kept: Counter[tuple[int, int]] | None = None,
    ) -> None:
        self.plan, self.machine, self.device = plan, machine, device
        self.lanes = Lanes(overlap=machine.overlap)
        self.streams = stream_buffers(plan)
        self.label, self.rows = "forward", list[MemorySample]()
        self.activations = 0
        self._held: Counter[str] = Counter()
        self.free = Counter(kept)
        self._held["kept"] = sum(num * numel * size for (numel, size), num in self.free.items())

    def write(self, activations: int | None = None) -> None:
        """Appends a sample of the bytes in use; `activations` None keeps the last
        value.
        """
        self.activations = self.activations if activations is None else activations
        held = {name: nbytes for name, nbytes in self._held.items() if nbytes}
        if self.activations:
            held["activations"] = self.activations
        if not self.rows or (self.rows[-1].label, self.rows[-1].held) != (self.label, held):
            self.rows.append(MemorySample(self.label, self.lanes.now, held))

    def take(self, purpose: str, numel: int, dtype: str) -> tuple[str, int, int]:
        """Allocates a flat buffer; pass the result to `give`."""
        size = itemsize(dtype)
        if self.device == "cpu" and self.free[numel, size]:
            self.free[numel, size] -= 1
            self._held["kept"] -= numel * size
        self._held[purpose] += numel * size
        return purpose, numel, size

    def give(self, taken: tuple[str, int, int]) -> None:
        """Frees a flat buffer."""
        purpose, numel, size = taken
        self._held[purpose] -= numel * size
        if self.device == "cpu":
            self.free[numel, size] += 1
            self._held["kept"] += numel * size

    def add(self, purpose: str, nbytes: int) -> None:
        """Allocates memory that is not pooled; frees it if `nbytes` is negative."""
        self._held[purpose] += nbytes

    def nbytes_of(self, spec: TensorSpec) -> int:
        """Bytes of this rank's part of a tensor."""
        return spec.local_nbytes(self.plan.mesh)

    def touch(self, nbytes: int, label: str = "", *, rate: float | None = None) -> None:
        """The device reads and writes `nbytes` of memory, at the rate of memory or at
        another one.
        """
        self.lanes.compute(label or self.label, nbytes / (rate or self.machine.memory))

    def run_python(self, what: str) -> None:
        """The time of Python for one of the kinds of `PYTHON`."""
        self.lanes.compute(self.label, PYTHON[what] * self.machine.operator)

    def send(
        self,
        label: str,
        numel: int,
        axes: Sequence[str],
        dtype: str,
        *,
        hooks: Mapping[str, CommHook] = {},
        after: float = 0.0,
    ) -> float:
        """A collective along each axis in turn, with the bytes of
        `Plan.sent_nbytes_by_axis`. Returns its end time.
        """
        for axis, message in zip(
            axes, messages(numel, map(self.plan.mesh.axis_size, axes)), strict=True
        ):
            if not message.num_others:
                continue
            self.run_python("collective")
            nbytes = in_bytes(message.numel, dtype, hooks.get(axis)) * message.num_others
            seconds = self.machine.latency + nbytes / self.machine.network
            after = self.lanes.start(
                "collective", label, seconds, after=after, nbytes=nbytes, axis=axis
            )
        return after

    def send_activations(self, sends: Sequence[ActivationSend]) -> None:
        """Collectives of activations, for which the model waits."""
        for one in sends:
            self.run_python("collective")
            nbytes, label = in_bytes(one.numel, one.dtype, None), f"{one.collective} of activations"
            seconds = self.machine.latency + nbytes / self.machine.network
            end = self.lanes.start("collective", label, seconds, nbytes=nbytes, axis=one.axis)
            self.lanes.wait(label, end)

    def is_here(self, spec: TensorSpec) -> bool:
        """Whether a tensor lives where the model is."""
        return spec.placement.is_here(self.device)

    def fetch(self, spec: TensorSpec, nbytes: int, label: str) -> float:
        """Copies an offloaded tensor from host memory or a file to the device. Returns
        the end time.
        """
        if self.is_here(spec):
            return 0.0
        end = 0.0
        if spec.placement.in_file:
            end = self.lanes.start("files", label, nbytes / self.machine.disk)
        return (
            end
            if self.device == "cpu"
            else self.lanes.start("host", label, nbytes / self.machine.host, after=end)
        )

    def copy_inputs(self, leaves: int, returns: int) -> None:
        """Copies inputs of checkpointed modules to host memory and back, on the compute
        stream, which waits for them.
        """
        copies: dict[Lane, int] = {"back": leaves, "host": returns}
        for lane, nbytes in copies.items():
            if nbytes:
                self.lanes.wait(
                    "inputs", self.lanes.start(lane, "inputs", nbytes / self.machine.host)
                )

    def write_back(self, spec: TensorSpec, nbytes: int, label: str, *, adds: bool = False) -> float:
        """Copies from the device to where a tensor is offloaded, or adds to it there.
        Returns the end time.
        """
        end = 0.0
        if self.device == "cuda":
            end = self.lanes.start("back", label, nbytes / self.machine.host)
        if spec.placement.in_file:
            end = self.lanes.start(
                "files", label, nbytes * (1 + adds) / self.machine.disk, after=end
            )
        return end
