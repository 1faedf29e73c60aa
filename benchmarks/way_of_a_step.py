"""Through how many files and functions does one step run? The interpreter counts them,
for fzero and FSDP2 in one run.

    python benchmarks/way_of_a_step.py
        the table
    python benchmarks/way_of_a_step.py --list
        and fzero's files, with their functions and calls

Two real ranks train a model of five units in stage 3, eagerly. Rank 0 counts every
Python function that its fourth step enters, when orders of collectives have been
learned. A reader of a step goes through as many. Comprehensions and generator
expressions are not counted: a reader meets them in their function, and some Pythons run
them as a function of their own, others do not.
"""

import argparse
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import multiprocessing
from units import NUM_ROWS, WIDTH, make_fsdp2, make_fzero

from fzero.common import print_report

WORLD_SIZE, NUM_UNITS, NUM_WARMUP_STEPS = 2, 5, 3
PACKAGES = {"fzero": ("/fzero/", "/sharding/"), "torch.distributed": ("/torch/distributed/",)}
"""The folders of each package; `all` is every file of Python."""
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


def counted(step: Callable[[Any], object], batch: Any) -> Counter[CodeType]:
    """The calls of each function of Python in one step."""
    calls: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name not in COMPREHENSIONS:
            calls[frame.f_code] += 1

    sys.setprofile(count)
    try:
        step(batch)
    finally:
        sys.setprofile(None)
    return calls


def run_rank(rank: int, folder: str, lists: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    table = Table(title=f"one step of stage 3, {NUM_UNITS} units, {WORLD_SIZE} ranks, eager")
    for title in ("step", "package", "files", "functions", "calls"):
        table.add_column(title, justify="left" if title in ("step", "package") else "right")
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, make in {"fzero": partial(make_fzero, stage=3), "FSDP2": make_fsdp2}.items():
        step = make(NUM_UNITS)
        batch = torch.ones(NUM_ROWS, WIDTH)
        for _ in range(NUM_WARMUP_STEPS):
            step(batch)
        calls = counted(step, batch)
        own = "fzero" if name == "fzero" else "torch.distributed"
        for package in (own, "all"):
            found = {
                code: n
                for code, n in calls.items()
                if any(x in code.co_filename for x in PACKAGES.get(package, ("/",)))
            }
            row = len({code.co_filename for code in found}), len(found), sum(found.values())
            table.add_row(name, package, *map(str, row))
        for code, n in calls.items():
            if name == "fzero" and any(x in code.co_filename for x in PACKAGES[own]):
                files[code.co_filename][code.co_qualname] += n
    if rank == 0:
        print_report(table)
        for path, functions in sorted(files.items()) if lists else ():
            print(f"{path}: {len(functions)} functions, {functions.total()} calls")
            print("   ", ", ".join(f"{name} {n}" for name, n in functions.items()))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--list", action="store_true", help="fzero's files, with their functions and calls"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (folder, options.list), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
