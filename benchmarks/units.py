"""What does a unit cost? Steps of many tiny units, beside the bare loop, DDP and FSDP2,
in one run.

    python benchmarks/units.py
        1 and 2 ranks, about three minutes on two cores
    python benchmarks/units.py --ranks 1 --units 10,40 --rounds 2
        does it run?

A unit is one `Linear(8, 8)`, so that a step is its fixed costs: the Python of the step
and of autograd, and the latency of collectives. A rank has one thread. All contenders
of one number of units live in the same processes and take turns of a few steps, so that
they meet the same machine. The time is that of rank 0's fastest step, because other
load only adds to it; a line through the times is `fixed ms + ms per unit`. Prints a
table for each number of ranks, and writes `results.json`.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch import Tensor, multiprocessing, nn

from fzero.common import print_report

WIDTH, NUM_ROWS = 8, 4
NUM_WARMUP_STEPS = 3
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}
Step = Callable[[Tensor], object]


def make_model(num_units: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_units)))


def usual_step(model: nn.Module) -> Step:
    """The loop body of everybody but fzero."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def train(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train


def make_bare(num_units: int) -> Step:
    return usual_step(make_model(num_units))


def make_ddp(num_units: int) -> Step:
    return usual_step(
        nn.parallel.DistributedDataParallel(make_model(num_units), gradient_as_bucket_view=True)
    )


def make_fsdp2(num_units: int) -> Step:
    """`fully_shard` of each unit; the parameters are gathered again in the backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(num_units), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return usual_step(model)


def make_fzero(num_units: int, stage: int) -> Step:
    import fzero

    config = {
        "train_micro_batch_size_per_gpu": NUM_ROWS,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    names = [str(index) for index in range(num_units)]
    step = fzero.make_train_step(
        make_model(num_units), config, loss_fn=lambda m, x: m(x).square().mean(), units=names
    )
    state = step.init()

    def train(x: Tensor) -> None:
        nonlocal state
        state, _ = step(state, x)

    return train


CONTENDERS: dict[str, Callable[[int], Step]] = {
    "bare loop": make_bare,
    "DDP": make_ddp,
    "FSDP2": make_fsdp2,
    **{f"fzero stage {stage}": partial(make_fzero, stage=stage) for stage in range(4)},
}


def run_rank(rank: int, arguments: argparse.Namespace, world_size: int, folder: Path) -> None:
    """One rank: measures all contenders with each number of units. Rank 0 writes the ms
    of each step to `times.json`.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    times: dict[str, dict[int, list[float]]] = {name: {} for name in arguments.contenders}
    for num_units in arguments.units:
        steps = {name: CONTENDERS[name](num_units) for name in arguments.contenders}
        x = torch.randn(NUM_ROWS, WIDTH)
        for round_ in range(arguments.rounds + 1):
            for name, step in steps.items():
                dist.barrier()
                for _ in range(arguments.steps_per_round if round_ else NUM_WARMUP_STEPS):
                    start = time.perf_counter()
                    step(x)
                    if round_:
                        times[name].setdefault(num_units, []).append(
                            1e3 * (time.perf_counter() - start)
                        )
        del steps
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def line(points: dict[int, float]) -> tuple[float, float]:
    """Fixed ms and ms per unit: the line through the times, by least squares of
    relative errors.

    >>> line({10: 3.0, 20: 5.0, 40: 9.0})
    (1.0, 0.2)
    """
    weights = {n: 1 / ms**2 for n, ms in points.items()}
    total = sum(weights.values())
    mean_n = sum(weights[n] * n for n in points) / total
    mean_ms = sum(weights[n] * ms for n, ms in points.items()) / total
    spread = sum(weights[n] * (n - mean_n) ** 2 for n in points)
    slope = (
        sum(weights[n] * (n - mean_n) * (ms - mean_ms) for n, ms in points.items()) / spread
        if spread
        else 0.0
    )
    return round(mean_ms - slope * mean_n, 4), round(slope, 4)


def make_table(world_size: int, fastest: dict[str, dict[int, float]], units: list[int]) -> Table:
    """A row per contender."""
    title = (
        f"{world_size} ranks of one thread: ms of the fastest step of n Linear({WIDTH}, {WIDTH})"
    )
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for title in ("contender", *(f"n = {n}" for n in units), "fixed ms", "ms per unit"):
        table.add_column(title, no_wrap=True, justify="left" if title == "contender" else "right")
    for name, points in fastest.items():
        fixed, slope = line(points)
        cells = (*(f"{points[n]:.2f}" for n in units), f"{fixed:.2f}", f"{slope:.3f}")
        table.add_row(name, *cells, style="" if "fzero" in name else "dim")
    return table


def parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    def names(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(CONTENDERS):
            raise argparse.ArgumentTypeError(f"{unknown} must be of {list(CONTENDERS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--units",
        type=numbers,
        default=[25, 100, 400],
        help="numbers of units (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks", type=numbers, default=[1, 2], help="numbers of ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--contenders", type=names, default=list(CONTENDERS), help="with commas (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="turns per contender (default: %(default)s)"
    )
    parser.add_argument(
        "--steps-per-round", type=int, default=5, help="steps per turn (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/units"), help="folder (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[int, dict[str, dict[int, float]]] = {}
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(
                run_rank, (arguments, world_size, Path(folder)), nprocs=world_size
            )
            times = json.loads((Path(folder) / "times.json").read_text())
        results[world_size] = {
            name: {int(n): min(ms) for n, ms in of.items()} for name, of in times.items()
        }
        print_report(make_table(world_size, results[world_size], arguments.units))
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
