"""What does an update cost per parameter, by where its state lives, and how much of
that does the backward hide?

    python benchmarks/offload.py
        tables and out/offload/offload.json
    python benchmarks/offload.py --path /mnt/nvme --millions 64 --rounds 9
    python benchmarks/offload.py --memory
        how much memory a rank takes, by what it places where

1. One rank updates a model whose forward and backward are next to nothing, with AdamW
   in stage 2; in fp32, and in bf16 with an fp32 master. `kernel` is PyTorch's fused
   AdamW on whole tensors (in bf16 with what widens gradients and writes parameters),
   `copy` copies the three tensors that an update reads and writes. CPUAdam is
   DeepSpeed's, where that is installed: in bf16 between a copy of the gradients and one
   of the parameters, for it updates the fp32 master. Neither takes a norm here: both
   libraries do that as gradients come in the backward.
2. fio moves as many bytes as the update in files does, read and written in the same
   proportion at the same time, on the same path by blocks of the same size with as many
   in flight (apt-get install -y fio): the faster of io_uring and threads.
3. The small GPT of the other benchmarks is trained with state in memory and in files.
   What could be hidden is what its bytes (gradients on their way out included) take at
   fio's speed; what was not is by how much the step is longer. Once with the buffers
   that an update needs, once with `--buffers`, which are read into beside the backward.

All take turns in rounds, on one thread, and numbers are medians of the rounds, per
parameter, so that another load on the machine hits all of them. On a CPU, host memory
is where the state is on the device: the update is the same.

`--memory` trains one rank of each kind in a process of its own, for a model on `meta`
of `--millions` parameters in equal blocks, and prints the most resident memory that it
had beyond what it had before `init`, per parameter.
"""

import argparse
import gc
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, SIZES, first_values, make_batch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fzero
from fzero.common import print_report

WIDTH = 768
READ = {"fp32": 12, "bf16": 14}
"""Bytes per parameter that an update with state in files reads: two moments, in bf16
the master, and the gradient.
"""
WRITTEN = {"fp32": 8, "bf16": 12}
GRADIENT = {"fp32": 4, "bf16": 2}
"""Bytes of it that leave in the backward."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Contender = Callable[[], dict[str, float]]
"""Does its work once, and returns the seconds that its parts took."""


class Light(nn.Module):
    """Equal blocks of weights, whose gradient is the number one."""

    def __init__(self, args: argparse.Namespace, num_blocks: int | None = None) -> None:
        super().__init__()
        num_blocks, width = num_blocks or num_blocks_of(args), args.block_numel // WIDTH
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, width, bias=False) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        return sum((block.weight.sum() * x.mean() for block in self.blocks), torch.zeros(()))


def num_blocks_of(args: argparse.Namespace) -> int:
    return max(args.millions * 1_000_000 // args.block_numel, 1)


def timed(work: Callable[[], Any]) -> Contender:
    def run() -> dict[str, float]:
        begin, own = time.perf_counter(), time.thread_time()
        work()
        return {"update": time.perf_counter() - begin, "processor": time.thread_time() - own}

    return run


def step_of(
    make: Callable[[], nn.Module],
    batch: tuple[Tensor, ...],
    zero: dict[str, Any],
    *,
    dtype: str = "fp32",
) -> Contender:
    """A step of training, the first of which has run."""
    cfg = {
        "optimizer": {"type": "AdamW"},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": 2, **zero},
    }
    with torch.device("meta"):
        model = make()
    step = fzero.make_train_step(model, cfg)
    held = [step.init(init_fn=first_values)]

    def run() -> dict[str, float]:
        times = [time.perf_counter()]
        round_ = step.begin(held[0], measures_early=True)  # as in `step(state, batch)`
        loss = step.forward(round_, lambda: model(*batch))
        times.append(time.perf_counter())
        round_ = step.backward(round_, loss)
        times.append(time.perf_counter())
        own = time.thread_time()
        held[0], _ = step.update(round_)
        processor = {"processor": time.thread_time() - own}
        times.append(time.perf_counter())
        parts = [after - before for before, after in pairwise(times)]
        return (
            processor
            | dict(zip(("forward", "backward", "update"), parts, strict=True))
            | {"step": times[-1] - times[0]}
        )

    run()
    return run


def kernel_of(numel: int, dtype: str) -> Contender:
    """The bare update of one flat tensor."""
    master, grad = torch.zeros(numel), torch.ones(numel, dtype=DTYPES[dtype])
    transform = fzero.adamw(1e-3)
    if dtype == "bf16":
        transform = fzero.optim.mixed_precision(
            transform, state_dtype="float32", out=torch.zeros(numel, dtype=torch.bfloat16)
        )
    state = [transform.init(master)]

    def run() -> None:
        _, _, state[0] = transform.update(grad, master, state[0])

    return timed(run)


def cpu_adam_of(numel: int, dtype: str, deepspeed: Any) -> Contender:
    """DeepSpeed's update of one flat tensor, with its master in between where there is
    one.
    """
    master, low, grad = (
        nn.Parameter(torch.zeros(numel)),
        torch.zeros(numel, dtype=DTYPES[dtype]),
        torch.ones(numel),
    )
    low_grad, master.grad = grad.to(DTYPES[dtype]), grad
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam([master], adamw_mode=True)

    def run() -> None:
        if dtype == "bf16":
            grad.copy_(low_grad)
        optimizer.step()
        if dtype == "bf16":
            low.copy_(master.detach())

    return timed(run)


def fio_of(folder: Path, numel: int, dtype: str, args: argparse.Namespace) -> Contender:
    """Reads and writes what an update does, at the same time."""
    nbytes, share = (
        (READ[dtype] + WRITTEN[dtype]) * numel,
        100 * READ[dtype] // (READ[dtype] + WRITTEN[dtype]),
    )

    def once(engine: str) -> float:
        jobs = (
            ["--thread", f"--numjobs={args.depth}"]
            if engine == "psync"
            else [f"--iodepth={args.depth}"]
        )
        size = nbytes // (args.depth if engine == "psync" else 1) // args.block * args.block
        command = [
            "fio",
            "--name=fzero",
            f"--directory={folder}",
            "--rw=rw",
            f"--rwmixread={share}",
            f"--bs={args.block}",
            f"--size={size}",
            "--direct=1",
            f"--ioengine={engine}",
            "--overwrite=1",
            "--randrepeat=0",
            "--group_reporting",
            "--output-format=json",
            *jobs,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (job,) = json.loads(done.stdout)["jobs"]
        return nbytes / (job["read"]["bw_bytes"] + job["write"]["bw_bytes"])

    return lambda: {"update": min(map(once, ("io_uring", "psync")))}


def contenders(folder: Path, args: argparse.Namespace, console: Console) -> dict[str, Contender]:
    numel = num_blocks_of(args) * args.block_numel
    files = {
        "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
        "sub_group_size": args.sub_group,
    }
    three = torch.zeros(3, numel), torch.zeros(3, numel)
    made = {"copy": timed(lambda: three[1].copy_(three[0]))}
    for dtype in DTYPES:
        one, light = (torch.ones(1, dtype=DTYPES[dtype]),), lambda: Light(args)
        made |= {
            f"device {dtype}": step_of(light, one, {}, dtype=dtype),
            f"host {dtype}": step_of(
                light, one, {"offload_optimizer": {"device": "cpu"}}, dtype=dtype
            ),
            f"nvme {dtype}": step_of(light, one, files, dtype=dtype),
            f"kernel {dtype}": kernel_of(numel, dtype),
        }
        if shutil.which("fio"):
            made[f"fio {dtype}"] = fio_of(folder, numel, dtype, args)
        try:
            made[f"CPUAdam {dtype}"] = cpu_adam_of(
                numel, dtype, importlib.import_module("deepspeed")
            )
        except ImportError:
            console.print("DeepSpeed is not installed, and its CPUAdam left out")
    size = SIZES["small"]
    many = {
        **files,
        "offload_optimizer": {**files["offload_optimizer"], "buffer_count": args.buffers},
    }
    for name, zero in (("device", {}), ("nvme", files), ("buffers", many)):
        made[f"GPT {name}"] = step_of(lambda: GPT(size), make_batch(size, step=0, rank=0), zero)
    if not shutil.which("fio"):
        console.print("fio is not installed, and left out")
    return made


Rounds = list[dict[str, dict[str, float]]]


def median(rounds: Rounds, of: Callable[[dict[str, dict[str, float]]], float]) -> float:
    return statistics.median(of(row) for row in rounds)


def report(rounds: Rounds, numel: int, console: Console) -> dict[str, Any]:
    """Prints what was found, and gives it: nanoseconds per parameter, and ratios of
    each round.
    """
    names, found = list(rounds[0]), {}
    table = Table(
        title=f"AdamW, {numel / 1e6:.1f}M parameters, ns per parameter", title_justify="left"
    )
    for column in ("", "update", "of the kernel", "backward"):
        table.add_column(column, justify="right" if column else "left")
    for name in (name for name in names if not name.startswith("GPT")):
        dtype = name.split()[-1] if name != "copy" else "fp32"
        ns = median(rounds, lambda row, name=name: row[name]["update"]) / numel * 1e9
        share = median(
            rounds,
            lambda row, name=name, d=dtype: row[name]["update"] / row[f"kernel {d}"]["update"],
        )
        found[name] = {"ns": ns, "of kernel": share}
        backward = ""
        if "backward" in rounds[0][name]:
            found[name]["backward"] = (
                median(rounds, lambda row, name=name: row[name]["backward"]) / numel * 1e9
            )
            backward = f"{found[name]['backward']:.2f}"
        table.add_row(name, f"{ns:.2f}", f"{share:.2f}", backward)
    print_report(table)
    for dtype in DTYPES:
        found |= bars(rounds, numel, dtype, console)
    return found | hidden(rounds, numel, console)


def bars(rounds: Rounds, numel: int, dtype: str, console: Console) -> dict[str, float]:
    """How the updates stand beside CPUAdam, fio and the kernel. Other load on the
    machine changes the processor time of a thread less than the time that passes."""

    def of(row: dict[str, dict[str, float]], name: str, part: str = "update") -> float:
        return row[f"{name} {dtype}"][part]

    found = {}
    if f"CPUAdam {dtype}" in rounds[0]:
        for part, how in (("update", ""), ("processor", ", processor time")):
            ratio = lambda row, part=part: of(row, "host", part) / of(row, "CPUAdam", part)  # noqa: E731
            found[f"host / CPUAdam {dtype}{how}"] = median(rounds, ratio)
    if f"fio {dtype}" in rounds[0]:
        floor = lambda row: max(of(row, "fio"), of(row, "kernel"))  # noqa: E731
        found[f"nvme / max(fio, kernel) {dtype}"] = median(
            rounds, lambda row: of(row, "nvme") / floor(row)
        )
        found[f"GB/s of fio {dtype}"] = median(rounds, lambda row: of(row, "fio") / of(row, "nvme"))
        nbytes = (READ[dtype] + WRITTEN[dtype]) * numel / 1e9
        for name in ("nvme", "fio"):
            found[f"{name} GB/s {dtype}"] = median(
                rounds, lambda row, name=name: nbytes / of(row, name)
            )
    for name, value in found.items():
        console.print(f"{name}: {value:.2f}")
    return found


def hidden(rounds: Rounds, numel: int, console: Console) -> dict[str, float]:
    """How much of what state in files costs a GPT does not make its step longer."""
    if "fio fp32" not in rounds[0]:
        return {}
    with torch.device("meta"):
        small = sum(param.numel() for param in GPT(SIZES["small"]).parameters())
    share = (
        (READ["fp32"] + WRITTEN["fp32"] + GRADIENT["fp32"])
        / (READ["fp32"] + WRITTEN["fp32"])
        * small
        / numel
    )

    def alone(row: dict[str, dict[str, float]]) -> float:
        return row["fio fp32"]["update"] * share

    def longer(row: dict[str, dict[str, float]], name: str, part: str) -> float:
        return row[f"GPT {name}"][part] - row["GPT device"][part]

    found = {
        "step in memory, ms": 1e3 * median(rounds, lambda row: row["GPT device"]["step"]),
        "moving alone, ms": 1e3 * median(rounds, alone),
    }
    for name in ("nvme", "buffers"):
        for part in ("step", "backward", "update"):
            found[f"{name}: {part} longer by, ms"] = 1e3 * median(
                rounds, lambda row, n=name, p=part: longer(row, n, p)
            )
        found[f"{name}: hidden"] = median(
            rounds, lambda row, n=name: 1 - longer(row, n, "step") / alone(row)
        )
    for name, value in found.items():
        console.print(f"GPT of {small / 1e6:.1f}M parameters, {name}: {value:.2f}")
    return found


def kinds(folder: str) -> dict[str, dict[str, Any]]:
    """What is measured: keys of `zero_optimization`."""
    files = {"device": "nvme", "nvme_path": folder}
    of_params = {"offload_param": files | {"max_in_cpu": 0}}
    return {
        "device": {"stage": 3},
        "offload_optimizer": {"stage": 3, "offload_optimizer": files},
        "offload_param": {"stage": 3, **of_params},
        "both": {"stage": 3, "offload_optimizer": files, **of_params},
    }


def resident(args: argparse.Namespace) -> None:
    """Prints the bytes that training takes beyond what this process has already."""
    kind, precision, folder = args.resident

    def train(num_blocks: int | None = None) -> None:
        with torch.device("meta"):
            model = Light(args, num_blocks)
        cfg = {"bf16": {"enabled": precision == "bf16"}, "zero_optimization": kinds(folder)[kind]}
        step = fzero.make_train_step(model, cfg)
        state = step.init()
        for _ in range(3):
            state, _ = step(
                state, torch.ones(1, dtype=torch.bfloat16 if precision == "bf16" else None)
            )

    train(2)  # what is loaded and made once is there
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_resident()
    train()
    print(peak_resident() - before)


def peak_resident() -> int:
    """The most bytes of memory that this process has had since it began, or since the
    peak was set back.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def memory(args: argparse.Namespace, console: Console) -> None:
    """A table of the bytes per parameter, by kind and precision."""
    numel = num_blocks_of(args) * args.block_numel
    table = Table(
        title=f"bytes per parameter, Adam, one rank, {numel / 1e6:.1f}M parameters",
        title_justify="left",
    )
    for column in ("in files", "fp32", "bf16, fp32 master"):
        table.add_column(column, justify="right" if "p" in column else "left")
    for kind in kinds(""):
        row = []
        for precision in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory(dir=args.path) as folder:
                command = [
                    sys.executable,
                    __file__,
                    "--millions",
                    str(args.millions),
                    "--block-numel",
                    str(args.block_numel),
                ]
                command += ["--resident", kind, precision, folder]
                environment = {
                    **os.environ,
                    "MALLOC_ARENA_MAX": "1",
                    "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
                }
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, env=environment
                )
                row.append(f"{int(done.stdout) / numel:.2f}")
        table.add_row(kind, *row)
    print_report(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times updates of state that lives in memory and in files."
    )
    parser.add_argument(
        "--path", type=Path, help="a folder on the disk to measure (default: the temporary one)"
    )
    parser.add_argument("--millions", type=int, default=32, help="of parameters")
    parser.add_argument(
        "--block-numel",
        type=int,
        default=12 * WIDTH**2,
        help="of a flat buffer (default: GPT-2's blocks)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sub-group", type=int, default=1 << 20, help="elements of a sub-group")
    parser.add_argument(
        "--block", type=int, default=1 << 20, help="bytes of one call to the system"
    )
    parser.add_argument("--depth", type=int, default=8, help="blocks that move at once")
    parser.add_argument(
        "--buffers",
        type=int,
        default=48,
        help="of a pool with room for what is read beside the backward",
    )
    parser.add_argument("--memory", action="store_true", help="how much memory a rank takes")
    parser.add_argument("--resident", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("out/offload"))
    args = parser.parse_args()
    console = Console(highlight=False)
    if args.resident:
        return resident(args)
    if args.memory:
        return memory(args, console)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        made = contenders(Path(folder), args, console)
        rounds: Rounds = [{name: run() for name, run in made.items()} for _ in range(args.rounds)]
        del made
    found = report(rounds, num_blocks_of(args) * args.block_numel, console)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "offload.json").write_text(
        json.dumps({"args": vars(args), "found": found, "rounds": rounds}, default=str, indent=1)
    )


if __name__ == "__main__":
    main()
