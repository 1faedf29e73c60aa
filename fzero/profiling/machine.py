"""`MachineReport` (`fzero env`): versions and devices of this machine, and its rates,
measured in a few seconds.

Each rate is the median of several repetitions, because plans are of the usual step.
Gathers are measured between two processes of this machine, over the axis that jobs use.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fzero.common.platforms import platform_here, untested_versions
from fzero.comms import collectives
from fzero.comms.axes import ProcessAxis
from fzero.comms.process_group import backends, join, shutdown
from fzero.plans.machine_model import MachineModel
from fzero.profiling.profiler import (
    attention_rate,
    matrix_rate,
    operator_seconds,
    pointwise_rate,
    update_rate,
    usual,
)
from fzero.storage.file_store import FileStore
from fzero.storage.file_tensor import FileSpec, StoreError
from fzero.storage.host_memory import Pool

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
NBYTES, DISK_NBYTES = 1 << 26, 1 << 28  # of a copy or a gather, and of a file
NUM_COPIES = 40  # some 0.3 seconds
# matrices that are multiplied in turn: a step's weights are not in the cache either
NUM_WEIGHTS = 8


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Measured rates in bytes and floating point operations per second; None if not
    measured.
    """

    host_copy: float
    """Bytes of host memory copied, each read and written once, with all threads."""
    device_copy: float | None
    """The same on the GPU."""
    to_device: float | None
    """From page-locked host memory to the GPU."""
    gather: float | None
    """Bytes that a rank receives in an all-gather of two ranks; on gloo, or on NCCL
    between two GPUs.
    """
    disk_write: float | None
    """A file written and flushed to the disk."""
    disk_read: float | None
    """The file read again, bypassing the page cache where the system allows."""
    flops_fp32: float
    """A matrix product in fp32, on the GPU if there is one."""
    flops_bf16: float
    """A matrix product in bf16."""
    latency: float | None = None
    """Seconds of a collective of one element between two ranks."""
    overlap: bool = True
    """Whether transfers overlap compute; not on a CPU whose cores all compute."""
    attention_fp32: float | None = None
    """The forward and backward of fused attention in fp32."""
    attention_bf16: float | None = None
    """The same in bf16."""
    pointwise_fp32: float | None = None
    """Bytes read and written by GELU and a layer norm in fp32, forward and backward."""
    pointwise_bf16: float | None = None
    """The same in bf16."""
    update_fp32: float | None = None
    """Bytes read and written by an update of AdamW in fp32."""
    update_bf16: float | None = None
    """The same with parameters and gradients in bf16 beside an fp32 master."""
    operator: float | None = None
    """Seconds of an operator beside its work, where the CPU computes."""

    @property
    def machine(self) -> MachineModel:
        """The rates of dry runs; `MachineModel`'s defaults where none was measured."""
        default = MachineModel()
        copy = self.device_copy or self.host_copy
        disk = (
            2 / (1 / self.disk_read + 1 / self.disk_write)
            if self.disk_read and self.disk_write
            else default.disk
        )
        return MachineModel(
            flops=self.flops_bf16,
            flops_fp32=self.flops_fp32,
            attention=self.attention_bf16,
            attention_fp32=self.attention_fp32,
            pointwise=self.pointwise_bf16,
            pointwise_fp32=self.pointwise_fp32,
            update=self.update_bf16,
            update_fp32=self.update_fp32,
            memory=2 * copy,
            network=self.gather or default.network,
            latency=default.latency if self.latency is None else self.latency,
            host=self.to_device or self.host_copy,
            disk=disk,
            processor=2 * self.host_copy,
            operator=self.operator or default.operator,
            overlap=self.overlap,
        )


@dataclass(frozen=True, slots=True)
class MachineReport:
    """This machine, as `fzero env` prints it."""

    versions: dict[str, str]
    system: dict[str, str]
    devices: tuple[str, ...]
    backends: tuple[str, ...]
    launchers: tuple[str, ...]
    rates: MeasuredRates | None = None


SECONDS = 60.0
"""Of `fzero env`, by default."""
Says = Callable[[str], None]
"""Is called with what is measured next."""


def measure_rates(
    path: Path | str = ".",
    *,
    gather: bool = True,
    num_ranks: int = 1,
    says: Says = lambda what: None,
    seconds: float = SECONDS,
) -> MeasuredRates:
    """Measures the rates of this machine, in about ten seconds.

    Args:
        path: a folder on the measured disk, with room for 256 MiB there and in memory.
        gather: whether to start two processes that measure the gather.
        num_ranks: the number of processes that measure at the same time, like ranks of
            a job on this machine; the result is the mean rate of one of them. With more
            than one, the gather is between all of them, and each has its part of the
            disk, which is measured first.
        says: is called with each thing that is measured, before it is.
        seconds: the time after which no other rate is measured; those that a dry run
            needs always are.

    Raises:
        OSError: the folder cannot be written to, or the disk is too small.
        RuntimeError: ranks could not be started.
    """
    ends = time.monotonic() + seconds
    says("the disk")
    write, read = disk_rates(Path(path))
    if num_ranks > 1:
        says(f"all rates in {num_ranks} processes at once")
        rates = mean_rates(
            [MeasuredRates(**rates) for rates in _run_ranks("rates_of_rank", num_ranks)]
        )
        return replace(rates, disk_write=write / num_ranks, disk_read=read / num_ranks)
    here, rate, latency = _rates_here(_device(1), says, ends), None, None
    if gather and time.monotonic() < ends:
        says(NAMES["gather"][0])
        with suppress(RuntimeError):  # the ranks could not be started
            (rate, latency), _ = _run_ranks("gather_rate", 2)
    return replace(here, gather=rate, latency=latency, disk_write=write, disk_read=read)


def _device(num_ranks: int) -> torch.device:
    """The device of ranks on this machine: a GPU each if there are enough, else the
    CPU.
    """
    return torch.device("cuda" if torch.cuda.device_count() >= num_ranks else "cpu")


def _rates_here(
    device: torch.device, says: Says = lambda what: None, ends: float = float("inf")
) -> MeasuredRates:
    """The rates of this process alone, without the disk; None for the optional ones
    that come after `ends`.
    """
    has_gpu = device.type == "cuda"
    host = torch.ones(NBYTES // 4)
    target = torch.empty_like(host)
    fp32, bf16 = torch.float32, torch.bfloat16
    needed: dict[str, Callable[[], float]] = {
        "host_copy": lambda: (
            NBYTES / usual(lambda: target.copy_(host), host.device, num_calls=NUM_COPIES)
        ),
        "flops_fp32": lambda: matrix_rate(device, fp32, NUM_WEIGHTS),
        "flops_bf16": lambda: matrix_rate(device, bf16, NUM_WEIGHTS),
    }
    optional: dict[str, Callable[[], float] | None] = {
        "device_copy": (lambda: NBYTES / _on_gpu(host.cuda(), host.cuda())) if has_gpu else None,
        "to_device": (lambda: NBYTES / _on_gpu(host.pin_memory(), host.cuda()))
        if has_gpu
        else None,
        "attention_fp32": lambda: attention_rate(device, fp32),
        "attention_bf16": lambda: attention_rate(device, bf16),
        "pointwise_fp32": lambda: pointwise_rate(device, fp32),
        "pointwise_bf16": lambda: pointwise_rate(device, bf16),
        "update_fp32": lambda: update_rate(device, fp32),
        "update_bf16": lambda: update_rate(device, bf16),
        "operator": None if has_gpu else operator_seconds,
    }
    found: dict[str, Any] = {}
    for name, measure in {**needed, **optional}.items():
        if measure is not None and (name in needed or time.monotonic() < ends):
            says(NAMES[name][0])
            found[name] = measure()
    overlap = has_gpu or torch.get_num_threads() < len(os.sched_getaffinity(0))
    rates: dict[str, Any] = {name: found.get(name) for name in (*needed, *optional)}
    return MeasuredRates(**rates, gather=None, disk_write=None, disk_read=None, overlap=overlap)


def _on_gpu(source: torch.Tensor, target: torch.Tensor) -> float:
    return usual(
        lambda: target.copy_(source, non_blocking=True), target.device, num_calls=NUM_COPIES
    )


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes per second written and read in the way of state in files; the files are
    removed afterwards.
    """
    rates, numel, buffer = [], DISK_NBYTES // 4, Pool(1, DISK_NBYTES).take()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fzero-env-") as inside:
        try:
            with FileStore(inside, {"rate": FileSpec(numel, "float32")}) as store:
                for move in (store.write, store.read):
                    times = []
                    for _ in range(3):
                        began = time.perf_counter()
                        move("rate", 0, numel, buffer)()
                        store.fence()
                        times.append(time.perf_counter() - began)
                    rates.append(DISK_NBYTES / statistics.median(times))
        except StoreError as error:
            raise OSError(
                f"a file of {DISK_NBYTES >> 20} MiB must be written and read there, got: {error}"
            ) from error
    return rates[0], rates[1]


def rates_of_rank(axis: ProcessAxis, device: torch.device) -> MeasuredRates:
    """The rates of this rank while the others measure, too, without the disk; takes two
    seconds. *Collective.*
    """
    rate, latency = gather_rate(axis, device)
    busy = int(os.environ.get("LOCAL_WORLD_SIZE", axis.size)) * torch.get_num_threads()
    overlap = device.type == "cuda" or busy < len(os.sched_getaffinity(0))
    return replace(_rates_here(device), gather=rate or None, latency=latency, overlap=overlap)


def mean_rates(of_ranks: Sequence[MeasuredRates]) -> MeasuredRates:
    """The mean rates of several ranks that measured at the same time."""

    def mean(name: str) -> float | None:
        numbers = [getattr(rates, name) for rates in of_ranks]
        return None if None in numbers else sum(numbers) / len(numbers)

    means: dict[str, Any] = {
        one.name: mean(one.name) for one in fields(MeasuredRates) if one.name != "overlap"
    }
    return MeasuredRates(**means, overlap=all(rates.overlap for rates in of_ranks))


def _run_ranks(measure: str, num_ranks: int) -> list[Any]:
    """Starts ranks that call this function of the module at the same time; returns what
    each measured, as JSON types.
    """
    with tempfile.TemporaryDirectory(prefix="fzero-env-") as folder:
        code = (
            f"from fzero.profiling import machine; machine.on_rank({folder!r}, machine.{measure})"
        )
        command = [
            sys.executable,
            "-m",
            "fzero",
            "run",
            "--num_procs",
            str(num_ranks),
            "--no_python",
            sys.executable,
        ]
        try:
            subprocess.run([*command, "-c", code], check=True, capture_output=True, timeout=120)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            rule = "processes of this machine must be able to join each other"
            raise RuntimeError(f"num_ranks: {num_ranks} {rule}, got {error}") from error
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)
        ]


def on_rank(folder: str, measure: Callable[[ProcessAxis, torch.device], Any]) -> None:
    """The program of each rank: writes what it measures while the others do.
    *Collective.*
    """
    device = _device(int(os.environ["LOCAL_WORLD_SIZE"]))
    axis = join(device)
    (Path(folder) / f"{axis.rank}.json").write_text(
        json.dumps(measure(axis, device), default=asdict)
    )
    shutdown()


def gather_rate(axis: ProcessAxis, device: torch.device) -> tuple[float, float]:
    """(bytes per second that this rank receives into memory that is kept, seconds for
    one element). *Collective.*
    """
    seconds = []
    for numel in (NBYTES // 8, 1):
        shard, full, times = (
            torch.ones(numel, device=device),
            torch.ones(numel * axis.size, device=device),
            [],
        )
        for _ in range(12):
            # a barrier, so that all ranks start together
            collectives.stack(torch.zeros(1, device=device), axis)
            began = time.perf_counter()
            collectives.start_all_gather(shard, full, axis).wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        seconds.append(statistics.median(times))
    return (NBYTES // 8 * 4) * (axis.size - 1) / seconds[0], seconds[1]


def rates_from(path: Path | str) -> MeasuredRates:
    """The rates in a file that `fzero env --json` has written.

    Raises:
        ValueError: the file has no valid rates.
    """
    try:
        report = json.loads(Path(path).read_text("utf-8"))
        return _checked(MeasuredRates(**report["rates"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--rates {path}: must be the output of `fzero env --json`, got "
            f"{type(error).__name__}: {error}; print it again"
        ) from None


def _checked(rates: MeasuredRates) -> MeasuredRates:
    for field in fields(MeasuredRates):
        value, kind = getattr(rates, field.name), str(field.type)
        is_number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value < float("inf")
        )
        fits = (
            isinstance(value, bool)
            if kind == "bool"
            else is_number or (value is None and "None" in kind)
        )
        if not fits:
            rule = (
                "true or false"
                if kind == "bool"
                else "a positive number" + " or null" * ("None" in kind)
            )
            raise ValueError(f"{field.name} must be {rule}, got {value!r}")
    return rates


def machine_report(path: Path | str = ".", *, num_ranks: int = 1, **how: Any) -> MachineReport:
    """The report of `fzero env`; arguments as for `measure_rates`."""
    return replace(facts(path), rates=measure_rates(path, num_ranks=num_ranks, **how))


def facts(path: Path | str = ".") -> MachineReport:
    """The report without rates, which takes no time.

    Raises:
        OSError: there is no such folder.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    properties = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    here = platform_here(has_gpu=bool(properties))
    untested = untested_versions(torch.__version__, platform.python_version())
    system = {
        "platform": f"{here.name}: {here.status}; {here.note}",
        **({"no test has run on": "; ".join(untested)} if untested else {}),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": (
            f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, torch uses "
            f"{torch.get_num_threads()} threads"
        ),
        "memory": f"{memory / 2**30:.1f} GiB",
        "disk": f"{shutil.disk_usage(path).free / 2**30:.1f} GiB free in {Path(path).resolve()}",
        "CUDA": torch.version.cuda or "torch is built without CUDA",
    }
    return MachineReport(
        versions=versions,
        system=system,
        devices=tuple(f"{one.name}, {one.total_memory / 2**30:.1f} GiB" for one in properties),
        backends=backends(),
        launchers=tuple(name for name in PROGRAMS if shutil.which(name)),
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
    "attention_fp32": ("attention with its backward, fp32", "Gflop/s"),
    "attention_bf16": ("attention with its backward, bf16", "Gflop/s"),
    "pointwise_fp32": ("GELU and layer norm with their backward, fp32", "GB/s"),
    "pointwise_bf16": ("GELU and layer norm with their backward, bf16", "GB/s"),
    "update_fp32": ("update of AdamW, fp32", "GB/s"),
    "update_bf16": ("update of AdamW, bf16 with an fp32 master", "GB/s"),
    "operator": ("operator of a few elements", "μs"),
    "latency": ("collective of one element", "μs"),
    "overlap": ("communication overlaps compute", ""),
}
"""The name of each rate in the table, and its unit: 10^9, except for the latency."""


def table(report: MachineReport) -> Table:
    """The report as a table, to paste into an issue."""
    made = facts_table(report)
    if report.rates is not None:
        made.add_section()
        for row in _rows(report.rates):
            made.add_row(*row)
    return made


def facts_table(report: MachineReport) -> Table:
    """The report without its rates."""
    made = Table("what", "here", title="fzero env", title_justify="left")
    for name, value in {**report.versions, **report.system}.items():
        made.add_row(name, value)
    made.add_row("devices", "\n".join(report.devices) or "none")
    made.add_row("backends", ", ".join(report.backends))
    made.add_row("launchers", ", ".join(report.launchers) or "none")
    return made


def rates_table(rates: MeasuredRates) -> Table:
    """The rates alone."""
    made = Table("what", "rate")
    for row in _rows(rates):
        made.add_row(*row)
    return made


def _rows(rates: MeasuredRates) -> list[tuple[str, str]]:
    found = ((NAMES[name], rate) for name, rate in asdict(rates).items())
    return [
        (what, "not measured" if rate is None else _shown(rate, unit))
        for (what, unit), rate in found
    ]


def _shown(rate: float | bool, unit: str) -> str:
    if isinstance(rate, bool):
        return "yes" if rate else "no"
    return f"{rate * 1e6:.0f} {unit}" if unit == "μs" else f"{rate / 1e9:.2f} {unit}"
