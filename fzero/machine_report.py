"""What is this machine, and how fast is it? Versions and devices, and rates measured in a few seconds (`fzero env`).

Each rate is the best of some repetitions: a ceiling, which other work on the machine only lowers. Gathers are measured
between two processes of this machine, with the axis that jobs use.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.table import Table

from fzero import collectives
from fzero.profiler import matrix_rate

PACKAGES = (
    "fzero",
    "torch",
    "numpy",
    "optree",
    "einops",
    "pydantic",
    "rich",
    "safetensors",
    "transformers",
    "deepspeed",
)
PROGRAMS = ("ssh", "pdsh", "mpirun", "srun")
NBYTES, DISK_NBYTES = 1 << 26, 1 << 28  # of a copy and a gather, and of a file
SECONDS = 0.3  # for each rate


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured, in bytes and floating point operations per second; None where there is nothing to measure."""

    host_copy: float
    """Bytes of host memory copied, each read and written once, with all threads."""
    device_copy: float | None
    """The same on the GPU."""
    to_device: float | None
    """From page-locked host memory to the GPU."""
    gather: float | None
    """Bytes that a rank receives from the other one in an all-gather of two; on gloo, or on NCCL between two GPUs."""
    disk_write: float | None
    """A file written and flushed to the disk."""
    disk_read: float | None
    """The file read again, past the page cache where the system lets it."""
    flops_fp32: float
    """A product of matrices in fp32, on the GPU if there is one; likewise in bf16."""
    flops_bf16: float


@dataclass(frozen=True, slots=True)
class MachineReport:
    """This machine, as `fzero env` prints it."""

    versions: dict[str, str]
    system: dict[str, str]
    devices: tuple[str, ...]
    backends: tuple[str, ...]
    launchers: tuple[str, ...]
    rates: Rates


def best(work: Callable[[], object], *, seconds: float = SECONDS) -> float:
    """The seconds of the fastest of many calls, after one that does not count."""
    work()
    found, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - began)
    return found


def measure_rates(path: Path | str = ".", *, gather: bool = True) -> Rates:
    """Measures what this machine can do, in about five seconds.

    Args:
        path: a folder on the disk that is measured; it must have room for 256 MiB.
        gather: whether two processes are started to measure the gather.

    Raises:
        OSError: the folder cannot be written to.
    """
    has_gpu = torch.cuda.is_available()
    host = torch.ones(NBYTES // 4)
    target = torch.empty_like(host)
    write, read = disk_rates(Path(path))
    return Rates(
        host_copy=NBYTES / best(lambda: target.copy_(host)),
        device_copy=NBYTES / _on_gpu(host.cuda(), host.cuda()) if has_gpu else None,
        to_device=NBYTES / _on_gpu(host.pin_memory(), host.cuda()) if has_gpu else None,
        gather=gather_rate() if gather else None,
        disk_write=write,
        disk_read=read,
        flops_fp32=matrix_rate("cuda" if has_gpu else "cpu", torch.float32),
        flops_bf16=matrix_rate("cuda" if has_gpu else "cpu", torch.bfloat16),
    )


def _on_gpu(source: torch.Tensor, target: torch.Tensor) -> float:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return best(copy)


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes per second written and read, of one file that is removed again."""
    block = os.urandom(1 << 22)  # which no file system packs
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fzero-env-") as file:
        began = time.perf_counter()
        for _ in range(DISK_NBYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with open(file.name, "rb", buffering=0) as again:
            while again.read(len(block)):
                pass
        return DISK_NBYTES / written, DISK_NBYTES / (time.perf_counter() - began)


def gather_rate() -> float | None:
    """Bytes per second that each of two ranks on this machine receives; None where they fail."""
    with tempfile.TemporaryDirectory(prefix="fzero-env-") as folder:
        code = f"from fzero.machine_report import gathering; gathering({folder!r})"
        command = [sys.executable, "-m", "fzero", "run", "--num_procs", "2", "--no_python", sys.executable, "-c", code]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        return float((Path(folder) / "rate").read_text())


def gathering(folder: str) -> None:
    """What the two ranks run. *Collective.*"""
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    axis = collectives.join(device)
    shard = torch.ones(NBYTES // 8, device=torch.device(device, axis.rank) if device == "cuda" else "cpu")
    times = []
    for _ in range(12):
        collectives.stack(torch.zeros(1, device=shard.device), axis)  # both begin together
        began = time.perf_counter()
        collectives.all_gather(shard, axis)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    if axis.rank == 0:
        (Path(folder) / "rate").write_text(str(shard.nbytes / min(times)))
    collectives.shutdown()


def machine_report(path: Path | str = ".") -> MachineReport:
    """All that `fzero env` tells of this machine; see `measure_rates`."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, torch takes {torch.get_num_threads()} threads",
        "memory": f"{memory / 2**30:.1f} GiB",
        "disk": f"{shutil.disk_usage(path).free / 2**30:.1f} GiB free in {Path(path).resolve()}",
        "CUDA": f"{torch.version.cuda}" if torch.version.cuda else "torch is built without",
    }
    return MachineReport(
        versions=versions,
        system=system,
        devices=tuple(f"{one.name}, {one.total_memory / 2**30:.1f} GiB" for one in properties),
        backends=collectives.backends(),
        launchers=tuple(name for name in PROGRAMS if shutil.which(name)),
        rates=measure_rates(path),
    )


NAMES = {
    "host_copy": ("copy in host memory", "GB/s"),
    "device_copy": ("copy on the device", "GB/s"),
    "to_device": ("copy to the device", "GB/s"),
    "gather": ("all-gather, two processes", "GB/s"),
    "disk_write": ("write to disk", "GB/s"),
    "disk_read": ("read from disk", "GB/s"),
    "flops_fp32": ("matrix product, fp32", "Gflop/s"),
    "flops_bf16": ("matrix product, bf16", "Gflop/s"),
}
"""What the table calls each rate, and its unit of 10^9."""


def table(report: MachineReport) -> Table:
    """The report for an issue."""
    made = Table("what", "here", title="fzero env", title_justify="left")
    for name, value in {**report.versions, **report.system}.items():
        made.add_row(name, value)
    made.add_row("devices", "\n".join(report.devices) or "none")
    made.add_row("backends", ", ".join(report.backends))
    made.add_row("launchers", ", ".join(report.launchers) or "none", end_section=True)
    for name, rate in asdict(report.rates).items():
        what, unit = NAMES[name]
        made.add_row(what, "not measured" if rate is None else f"{rate / 1e9:.2f} {unit}")
    return made


def as_json(report: MachineReport) -> str:
    """The report for a program; rates are per second."""
    return json.dumps(asdict(report), indent=2)
