"""`MachineModel`: the rates of one rank's hardware, by which timelines, dry runs and
the autotuner estimate seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from fzero.common.arguments import refuse

OperatorKind = Literal["", "attention", "pointwise"]
"""Operators with rates of their own: fused attention, and functions of each element; ""
is a product, a sum or a copy.
"""


@dataclass(frozen=True, slots=True)
class MachineModel:
    """A simple model of one rank's hardware, as rates per second.

    Args:
        flops: floating point operations.
        memory: bytes read and written.
        network: bytes that a rank sends.
        latency: fixed seconds per collective.
        host: bytes between host memory and the device; used by dry runs only, not for
            graphs.
        disk: bytes read from files and written to them; used by dry runs only.
        processor: bytes that the CPU reads and writes to update offloaded state, an
            eighth of a node's; used by dry runs only.
        flops_fp32: operations on numbers of more than 16 bits; None means `flops`.
        attention, attention_fp32: operations of fused attention, slow in 16 bits on a
            CPU; None means `flops`, `flops_fp32`.
        pointwise, pointwise_fp32: bytes that a function of each element reads and
            writes, such as GELU, a norm or a softmax; on a CPU it computes for longer
            than it waits for memory. None means `memory`.
        update, update_fp32: bytes that an optimizer update on the device reads and
            writes, of parameters of 16 bits beside their master, and of others; None
            means `memory`.
        operator: seconds of Python, dispatch and autograd for each operator; 0 on a
            GPU, which works on earlier ones meanwhile.
        overlap: whether collectives overlap compute, and memory the products of an
            operator; on a busy CPU they do not.
    """

    flops: float = 1e14
    memory: float = 1e12
    network: float = 5e10
    latency: float = 1e-5
    host: float = 2e10
    disk: float = 1e9
    processor: float = 5e10
    flops_fp32: float | None = None
    attention: float | None = None
    attention_fp32: float | None = None
    pointwise: float | None = None
    pointwise_fp32: float | None = None
    update: float | None = None
    update_fp32: float | None = None
    operator: float = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in asdict(self).items() if name != "overlap"}
        for name, value in numbers.items():
            if not isinstance(value, int | float | None):
                refuse(
                    f"MachineModel: {name}",
                    "a number",
                    value,
                    "pass a rate per second; of a time, seconds",
                )
        for name in ("latency", "operator"):
            if (seconds := numbers.pop(name)) < 0:
                raise ValueError(
                    f"MachineModel: {name} must not be negative, got {seconds}; it is seconds"
                )
        for name, value in numbers.items():
            if value is not None and value <= 0:
                raise ValueError(
                    f"MachineModel: {name} must be positive, got {value}; it is a rate per second"
                )

    def __str__(self) -> str:
        """The rates in words.

        >>> print(MachineModel())
        100 Tflop/s, memory 1000 GB/s, sends 50 GB/s, to host memory 20 GB/s, files 1 GB/s, updates on the processor 50 GB/s
        """
        wide = f" ({self.flops_fp32 / 1e12:.3g} above 16 bits)" if self.flops_fp32 else ""
        gb = {
            "memory": self.memory,
            "sends": self.network,
            "to host memory": self.host,
            "files": self.disk,
            "updates on the processor": self.processor,
        }
        rates = ", ".join(f"{what} {rate / 1e9:.4g} GB/s" for what, rate in gb.items())
        return f"{self.flops / 1e12:.3g} Tflop/s{wide}, {rates}"

    def seconds(
        self, flops: int, nbytes: int, *, is_wide: bool = False, kind: OperatorKind = ""
    ) -> float:
        """The time of an operator: the larger of its compute time and its memory time,
        or both where they do not overlap.
        """
        rate = (self.flops_fp32 or self.flops) if is_wide else self.flops
        if kind == "attention":
            rate = (self.attention_fp32 if is_wide else self.attention) or rate
        elif kind == "pointwise":
            return nbytes / ((self.pointwise_fp32 if is_wide else self.pointwise) or self.memory)
        return (max if self.overlap else sum)((flops / rate, nbytes / self.memory))
