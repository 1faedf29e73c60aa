"""My model does not fit: what does each rung of the ladder save of a rank's memory, and
what does it cost of a step?

    python benchmarks/ladder.py
        a table and out/ladder/ladder.json; about six minutes on two cores
    python benchmarks/ladder.py --size large --path /mnt/nvme
    python benchmarks/ladder.py --dtype bf16

Two ranks with one thread each train the GPT of the other benchmarks with AdamW. Every
rung is a job of its own, which takes turns of a few steps with one job of stage 0 that
is there all the time; the last column is the median of the ratios of a rung's turns to
those of stage 0 beside them. `MB` is the most resident memory that a rank had in a few
steps beyond what it had before the model was made, in a further job, of which glibc
gives memory back at once: that costs time, and else hides what a rung saves.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import ADAMW, forget_peak, peak_resident_mb
from gpt import GPT, SIZES, Size, first_values, make_batch
from rich.progress import track
from rich.table import Table

import fzero
from fzero.common import print_report

WORLD_SIZE = 2


def rungs(path: str) -> dict[str, dict[str, Any]]:
    """By name, the keys of the configuration; each rung is the one before and something
    more.
    """
    files = {"device": "nvme", "nvme_path": path}
    every = {"activation_checkpointing": {"every": 1}}
    return {
        **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
        "checkpointing": {"zero_optimization": {"stage": 3}, **every},
        "offload_optimizer: cpu": {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            **every,
        },
        "offload_optimizer: nvme": {
            "zero_optimization": {"stage": 3, "offload_optimizer": files},
            **every,
        },
        "offload_param: nvme": {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": files,
                "offload_param": {**files, "max_in_cpu": 0},
            },
            **every,
        },
    }


def meet(folder: str, rank: int) -> None:
    """Joins the other rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/meet", WORLD_SIZE), rank=rank, world_size=WORLD_SIZE
    )


def rank_of(
    name: str, size: Size, args: argparse.Namespace, rank: int, folder: str, pipe: Connection
) -> None:
    """One rank of a rung: answers each number of steps with the seconds of each, and
    the most memory; 0 ends it.
    """
    torch.set_num_threads(1)
    meet(folder, rank)
    cfg = {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        **rungs(folder)[name],
    }
    cfg["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": args.sub_group,
    }
    with torch.device("meta"):
        model = GPT(size)
    forget_peak()
    before = peak_resident_mb()
    step = fzero.make_train_step(model, cfg)
    state = step.init(init_fn=first_values)
    pipe.send(None)
    number = 0
    while num_steps := pipe.recv():
        seconds = []
        for _ in range(num_steps):
            batch = make_batch(size, step=number, rank=rank)
            dist.barrier()
            begin = time.perf_counter()
            state, _ = step(state, batch)
            seconds.append(time.perf_counter() - begin)
            number += 1
        pipe.send((seconds, peak_resident_mb() - before))
    del state
    dist.destroy_process_group()


class Job:
    """The ranks of a rung, which sleep between their turns."""

    def __init__(self, name: str, size: Size, args: argparse.Namespace, **environment: str) -> None:
        os.environ |= environment
        self.folder = tempfile.TemporaryDirectory(dir=args.path)
        spawn, self.pipes, self.peak, self.processes = get_context("spawn"), [], 0.0, []
        for rank in range(WORLD_SIZE):
            ours, theirs = spawn.Pipe()
            self.pipes.append(ours)
            given = (name, size, args, rank, self.folder.name, theirs)
            self.processes.append(spawn.Process(target=rank_of, args=given, daemon=True))
            self.processes[-1].start()
            theirs.close()
        for key in environment:
            del os.environ[key]
        for pipe in self.pipes:
            pipe.recv()
        self.turn(2)  # what is learned in the first step costs more

    def turn(self, num_steps: int) -> float:
        """The median seconds of so many steps, each that of the slowest rank."""
        for pipe in self.pipes:
            pipe.send(num_steps)
        reports = [pipe.recv() for pipe in self.pipes]
        self.peak = max(self.peak, *(peak for _, peak in reports))
        return statistics.median(map(max, zip(*(seconds for seconds, _ in reports), strict=True)))

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(0)
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Memory and time of a step on every rung of the ladder."
    )
    parser.add_argument(
        "--path", type=Path, help="a folder on the disk to use (default: the temporary one)"
    )
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each rung")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--sub-group", type=int, default=1 << 20, help="elements of a sub-group")
    parser.add_argument("--out", type=Path, default=Path("out/ladder"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    size = SIZES[args.size]
    base, found = Job("stage 0", size, args), {}
    for name in track(rungs(""), "rungs"):
        lean = Job(name, size, args, MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_=str(1 << 17))
        lean.end()
        job = Job(name, size, args)
        turns = [(job.turn(args.steps), base.turn(args.steps)) for _ in range(args.rounds)]
        found[name] = {
            "MB": lean.peak,
            "seconds": statistics.median(mine for mine, _ in turns),
            "times": statistics.median(mine / other for mine, other in turns),
        }
        job.end()
        text = json.dumps({"args": vars(args), "found": found}, default=str, indent=1)
        (args.out / "ladder.json").write_text(text)  # also of a run that is ended
    base.end()
    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT(size).parameters())
    title = (
        f"GPT of {numel / 1e6:.1f}M parameters, {args.dtype}, {WORLD_SIZE} ranks: most "
        f"memory of a rank, and a step"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "MB", "bytes per parameter", "ms", "times stage 0"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in found.items():
        nbytes = row["MB"] * 2**20 / numel
        table.add_row(
            name,
            f"{row['MB']:.0f}",
            f"{nbytes:.1f}",
            f"{1e3 * row['seconds']:.0f}",
            f"{row['times']:.2f}",
        )
    print_report(table)


if __name__ == "__main__":
    main()
