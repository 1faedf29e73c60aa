"""Where does a step's time go? A torch.profiler trace of rank 0 and a table of its
largest parts.

    python benchmarks/profile_step.py --stage 2 --mode step        # eager, block or step

Two ranks of one thread each, after a warm-up. Writes a trace for chrome://tracing or
perfetto to out/profile. The profiler itself takes a few milliseconds of a step.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import make_fzero
from gpt import SIZES, make_batch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from fzero.common import print_report

WORLD_SIZE, NUM_WARMUP_STEPS, NUM_STEPS, NUM_ROWS = 2, 4, 8, 20


def run_rank(rank: int, arguments: argparse.Namespace) -> None:
    import torch._inductor.config

    # so that generated kernels have names in the trace
    torch._inductor.config.cpp.enable_kernel_profile = True
    torch.set_num_threads(1)
    store = dist.FileStore(str(arguments.out / "ranks.store"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    size = SIZES[arguments.size]
    step = make_fzero(size, arguments.stage, arguments.dtype, arguments.mode)
    batches = [make_batch(size, step=i, rank=rank) for i in range(NUM_WARMUP_STEPS + NUM_STEPS)]
    for batch in batches[:NUM_WARMUP_STEPS]:
        step(batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in batches[NUM_WARMUP_STEPS:]:
            step(batch)
    if rank == 0:
        show(profiler, arguments)
    dist.destroy_process_group()


def show(profiler: profile, arguments: argparse.Namespace) -> None:
    path = (
        arguments.out
        / f"{arguments.size}_stage{arguments.stage}_{arguments.mode}_{arguments.dtype}.json"
    )
    profiler.export_chrome_trace(str(path))
    table = Table(
        title=f"{arguments.mode}, stage {arguments.stage}: ms of each part by itself, per step"
    )
    for title in ("ms", "calls", "part"):
        table.add_column(title, justify="left" if title == "part" else "right")
    for event in sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)[
        :NUM_ROWS
    ]:
        ms, calls = event.self_cpu_time_total / 1e3 / NUM_STEPS, event.count / NUM_STEPS
        table.add_row(f"{ms:.2f}", f"{calls:.0f}", event.key[:80])
    print_report(table)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument(
        "--mode", choices=("eager", "block", "step"), default="step", help="what is compiled"
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--out", type=Path, default=Path("out/profile"), help="folder (default: %(default)s)"
    )
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ranks.store").unlink(missing_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    torch.multiprocessing.spawn(run_rank, (arguments,), WORLD_SIZE)


if __name__ == "__main__":
    main()
