"""`MachineModel`: the rates of one rank's hardware, by which timelines, dry runs and the autotuner estimate seconds."""

from __future__ import annotations

from dataclasses import dataclass

from fzero.common.arguments import refuse


@dataclass(frozen=True, slots=True)
class MachineModel:
    """What the model of the machine knows: one rank's rates, per second.

    Args:
        flops: floating point operations.
        memory: bytes read and written.
        network: bytes that a rank sends.
        latency: seconds that every collective takes besides.
        host: bytes between host memory and the device; of plans alone, not of a graph.
        disk: bytes read from files and written to them; of plans alone.
        processor: bytes read and written by the processor, where it updates what lives in files and host memory; of plans alone.
            The default is an eighth of what a node's memory gives.
        flops_fp32: operations on numbers of more than 16 bits; None is `flops`.
        overlap: whether anything moves while the device computes; on a CPU whose cores all compute, nothing does.
    """

    flops: float = 1e14
    memory: float = 1e12
    network: float = 5e10
    latency: float = 1e-5
    host: float = 2e10
    disk: float = 1e9
    processor: float = 5e10
    flops_fp32: float | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "network", "latency", "host", "disk", "processor", "flops_fp32"):
            if not isinstance(getattr(self, name), int | float | None):
                refuse(
                    f"MachineModel: {name}",
                    "a number",
                    getattr(self, name),
                    "pass a rate per second (latency: seconds)",
                )
        if self.latency < 0:
            raise ValueError(f"MachineModel: latency must not be negative, got {self.latency}; it is seconds")
        for name in ("flops", "memory", "network", "host", "disk", "processor", "flops_fp32"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(
                    f"MachineModel: {name} must be positive, got {getattr(self, name)}; it is a rate per second"
                )

    def seconds(self, flops: int, nbytes: int, *, is_wide: bool = False) -> float:
        """Of an operator, whichever takes longer: its operations, or the bytes that it reads and writes."""
        rate = (self.flops_fp32 or self.flops) if is_wide else self.flops
        return max(flops / rate, nbytes / self.memory)
