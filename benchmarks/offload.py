"""What does an update cost per parameter, by where its state lives? Beside the bare kernel, a copy of memory, and fio.

    python benchmarks/offload.py                          a table and out/offload/offload.json
    python benchmarks/offload.py --path /mnt/nvme --millions 64 --rounds 9
    python benchmarks/offload.py --memory                 how much memory a rank takes, by what it places where

One rank trains a model whose forward and backward are next to nothing, with AdamW in fp32; a step's update is the step less
one that updates nothing. All contenders take turns in rounds: `ns` is the median of the rounds, per parameter, so that another
load on the machine hits all of them. `fio` reads and writes as many bytes at the same time (apt-get install -y fio), `copy`
copies the three tensors that an update reads and writes, `kernel` is PyTorch's fused AdamW on whole tensors, and CPUAdam is
DeepSpeed's where that is installed. On a CPU, host memory is where the state is on the device: the update is the same.

`--memory` trains one rank of each kind in a process of its own, for a model on `meta` of `--millions` parameters in equal blocks,
and tells the most resident memory that it had beyond what it had before `init`, per parameter.
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
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fzero

WIDTH = 1024
Contender = Callable[[], float]
"""Does its work once, and returns the seconds that it took."""


class Light(nn.Module):
    """Weights whose gradient is the number one."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        return sum((block.weight.sum() * x.mean() for block in self.blocks), torch.zeros(()))


def timed(work: Callable[[], Any]) -> Contender:
    def run() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return run


def step_of(num_blocks: int, zero: dict[str, Any], transform: fzero.Transform | None = None) -> Contender:
    """A step of training, the first of which has run."""
    cfg = {"optimizer": {"type": "AdamW"}, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2, **zero}}
    with torch.device("meta"):
        model = Light(num_blocks)
    step = fzero.make_train_step(model, cfg, transform=transform)
    held = [step.init()]
    batch = torch.ones(1)

    def run() -> None:
        held[0], _ = step(held[0], batch)

    run()
    return timed(run)


def kernel_of(numel: int, deepspeed: Any = None) -> Contender:
    """The bare update of one flat tensor."""
    param, grad = torch.zeros(numel), torch.ones(numel)
    if deepspeed is not None:
        weights = nn.Parameter(param)
        weights.grad = grad
        return timed(deepspeed.ops.adam.DeepSpeedCPUAdam([weights], adamw_mode=True).step)
    transform, state = fzero.adamw(1e-3), [fzero.adamw(1e-3).init(param)]

    def run() -> None:
        _, _, state[0] = transform.update(grad, param, state[0])

    return timed(run)


def fio_of(folder: Path, numel: int, args: argparse.Namespace) -> Contender:
    """Reads and writes the two moments, at the same time, by blocks of as many bytes as the steps."""

    def run() -> float:
        command = [
            "fio", "--name=fzero", f"--directory={folder}", "--rw=rw", f"--bs={args.block}", f"--size={16 * numel}",
            "--direct=1", "--ioengine=io_uring", f"--iodepth={args.depth}", "--overwrite=1", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (job,) = json.loads(done.stdout)["jobs"]
        return job["job_runtime"] / 1e3

    return run


def contenders(folder: Path, args: argparse.Namespace, console: Console) -> dict[str, Contender]:
    num_blocks = max(args.millions * 1_000_000 // WIDTH**2, 1)
    numel = num_blocks * WIDTH**2
    nothing = fzero.Transform(lambda param: None, lambda grad, param, state: (grad, param, state), lambda spec: None)
    files = {"device": "nvme", "nvme_path": str(folder)}
    three = torch.zeros(3, numel), torch.zeros(3, numel)
    made = {
        "nothing": step_of(num_blocks, {}, nothing),
        "device": step_of(num_blocks, {}),
        "host": step_of(num_blocks, {"offload_optimizer": {"device": "cpu"}}),
        "nvme": step_of(num_blocks, {"offload_optimizer": files, "sub_group_size": args.sub_group}),
        "kernel": kernel_of(numel),
        "copy": timed(lambda: three[1].copy_(three[0])),
    }
    if shutil.which("fio"):
        made["fio"] = fio_of(folder, numel, args)
    else:
        console.print("fio is not installed, and left out")
    try:
        made["CPUAdam"] = kernel_of(numel, importlib.import_module("deepspeed"))
    except ImportError:
        console.print("DeepSpeed is not installed, and its CPUAdam left out")
    return made


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

    def train(num_blocks: int) -> None:
        with torch.device("meta"):
            model = Light(num_blocks)
        cfg = {"bf16": {"enabled": precision == "bf16"}, "zero_optimization": kinds(folder)[kind]}
        step = fzero.make_train_step(model, cfg)
        state = step.init()
        for _ in range(3):
            state, _ = step(state, torch.ones(1, dtype=torch.bfloat16 if precision == "bf16" else None))

    train(2)  # what is loaded and made once is there
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_resident()
    train(max(args.millions * 1_000_000 // WIDTH**2, 1))
    print(peak_resident() - before)


def peak_resident() -> int:
    """The most bytes of memory that this process has had since it began, or since the peak was set back."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def memory(args: argparse.Namespace, console: Console) -> None:
    """A table of the bytes per parameter, by kind and precision."""
    numel = max(args.millions * 1_000_000 // WIDTH**2, 1) * WIDTH**2
    table = Table(title=f"bytes per parameter, Adam, one rank, {numel / 1e6:.1f}M parameters", title_justify="left")
    for column in ("in files", "fp32", "bf16, fp32 master"):
        table.add_column(column, justify="right" if "p" in column else "left")
    for kind in kinds(""):
        row = []
        for precision in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory(dir=args.path) as folder:
                command = [sys.executable, __file__, "--millions", str(args.millions)]
                command += ["--resident", kind, precision, folder]
                environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                row.append(f"{int(done.stdout) / numel:.2f}")
        table.add_row(kind, *row)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times updates of state that lives in memory and in files.")
    parser.add_argument("--path", type=Path, help="a folder on the disk to measure (default: the temporary one)")
    parser.add_argument("--millions", type=int, default=32, help="of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sub-group", type=int, default=1 << 20, help="elements of a sub-group")
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes of one call to the system")
    parser.add_argument("--depth", type=int, default=8, help="blocks that move at once")
    parser.add_argument("--memory", action="store_true", help="how much memory a rank takes")
    parser.add_argument("--resident", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("out/offload"))
    args = parser.parse_args()
    console = Console(highlight=False)
    if args.resident:
        return resident(args)
    if args.memory:
        return memory(args, console)
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        made = contenders(Path(folder), args, console)
        rounds: list[dict[str, float]] = [{name: run() for name, run in made.items()} for _ in range(args.rounds)]
        del made
    numel = max(args.millions * 1_000_000 // WIDTH**2, 1) * WIDTH**2
    table = Table(title=f"AdamW in fp32, {numel / 1e6:.1f}M parameters", title_justify="left")
    for column in ("", "ns per parameter", "of the kernel"):
        table.add_column(column, justify="right" if column else "left")
    found = {}
    for name in (name for name in rounds[0] if name != "nothing"):
        in_step = name in ("device", "host", "nvme")
        times = [times[name] - (times["nothing"] if in_step else 0.0) for times in rounds]
        shares = [value / times["kernel"] for value, times in zip(times, rounds, strict=True)]
        found[name] = {"ns": statistics.median(times) / numel * 1e9, "of_kernel": statistics.median(shares)}
        table.add_row(name, f"{found[name]['ns']:.2f}", f"{found[name]['of_kernel']:.2f}")
    console.print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "offload.json").write_text(json.dumps({"args": vars(args), "found": found}, default=str, indent=1))


if __name__ == "__main__":
    main()
