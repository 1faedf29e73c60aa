"""Two equal pipeline stages on two processes, beside torch.distributed.pipelining and
DeepSpeed: time over the predicted time.

    python benchmarks/pipeline.py [--width 512] [--depth 8] [--rounds 5] [--micro-batches 2 4 8 16]

The prediction is T₁·(m+1)/(2m), where T₁ is the time of one process for the same m
micro-batches: two stages, and a bubble of one micro-batch. It supposes that two
processes that compute at once are as fast as one alone. So each process also computes
its stage without the other: rank 0 alone (`one stage`), then both at once without a
message (`both at once`). `floor` is the prediction from the latter, (m+1)/m times: what
fzero's pipeline would take if messages and waiting cost nothing.

Contenders take turns in one run; the figures are medians of ms. Each rank has one
thread. `cpu` is processor time of rank 1 for each micro-batch, which other load on the
machine changes less. Prints a table; writes `results.json` and a picture.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from torch import nn

import fzero
from fzero.common import print_report
from fzero.pipeline import PipelineModule
from sharding import Mesh

ROWS = 32  # of a micro-batch
CONTENDERS = ("fzero", "torch", "DeepSpeed")


class Scale(nn.Module):
    """A factor for each column. As first layer it makes the stages equal: all products
    have a gradient for their input.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def model(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(nn.Sequential(Scale(width), *blocks[0]), *blocks[1:])


def of_fzero(
    options: argparse.Namespace, num_micro: int, num_stages: int, depth: int | None = None
) -> Callable[[], Any]:
    """A step of one or two stages; `depth`: the layers of one process that computes for
    itself.
    """
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": num_micro,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 0},
    }  # fmt: skip
    layers = PipelineModule(
        model(options.width, depth or options.depth), num_stages, loss_fn=nn.functional.mse_loss
    )
    x = torch.randn(ROWS * num_micro, options.width)
    if num_stages == 1:
        axis: Any = fzero.comms.ProcessAxis("data", mesh=Mesh.of(pipe=1, data=1))
    else:
        axis = Mesh.of(pipe=num_stages, data=1)
    step = fzero.make_train_step(layers, config, mesh=axis)
    state = [step.init()]

    def run() -> None:
        state[0], _ = step(state[0], (x, x))

    return run


def of_torch(options: argparse.Namespace, num_micro: int) -> Callable[[], Any] | None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    if num_micro < 2:
        return None  # it refuses fewer micro-batches than stages
    rank, half = fzero.join().rank, options.depth // 2
    part = model(options.width, options.depth)[rank * half : (rank + 1) * half]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_micro, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    x = torch.randn(ROWS * num_micro, options.width)

    def run() -> None:
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=x, losses=[])
        optimizer.step()

    return run


def of_deepspeed(options: argparse.Namespace, num_micro: int) -> Callable[[], Any] | None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
        from deepspeed.pipe import PipelineModule as TheirModule
    except ImportError:
        return None
    # would be compiled now, for inference
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", verbose=False)
    layers = TheirModule(
        list(model(options.width, options.depth)), num_stages=2, loss_fn=nn.functional.mse_loss
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": num_micro,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=layers, optimizer=torch.optim.SGD(layers.parameters(), lr=1e-3), config=config
    )
    x = torch.randn(ROWS, options.width)
    batches: Iterator[Any] = repeat((x, x))
    return lambda: engine.train_batch(batches)


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of wall and of processor time."""
    began, used = time.perf_counter(), time.process_time()
    run()
    return 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - used)


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = fzero.join()
    is_first = world.rank == 0
    for num_micro in options.micro_batches:
        half = of_fzero(options, num_micro, 1, options.depth // 2)
        runs = {
            "fzero": of_fzero(options, num_micro, 2), "torch": of_torch(options, num_micro),
            "DeepSpeed": of_deepspeed(options, num_micro) if options.deepspeed else None,
            "both at once": half, "one stage": half if is_first else None,
            "one process": of_fzero(options, num_micro, 1) if is_first else None,
        }  # fmt: skip
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for index in range(options.rounds + 2):
            for name, run in runs.items():
                torch.distributed.barrier()
                if run is not None:
                    found = timed(run)
                    if index > 1:  # the first steps learn
                        times[name].append(found)
        cpu: list[Any] = [None, None]
        own = {
            name: statistics.median(used for _, used in some) / num_micro
            for name, some in times.items()
            if some
        }
        torch.distributed.all_gather_object(cpu, own)
        if is_first:
            wall = {
                name: statistics.median(ms for ms, _ in some)
                for name, some in times.items()
                if some
            }
            row = {
                "micro_batches": num_micro,
                "wall": wall,
                "cpu": {name: cpu[1][name] for name in own if name in cpu[1]},
            }
            print("ROW" + json.dumps(row), flush=True)
    fzero.shutdown()


def make_table(rows: list[dict[str, Any]], width: int) -> Table:
    """A row for each number of micro-batches."""
    title = f"Two stages of width {width}: ms of a step, and over the prediction"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    columns = ("m", "one process", "predicted", "floor", *CONTENDERS)
    for column in (
        *columns,
        *(f"{name} /predicted" for name in ("floor", *CONTENDERS)),
        *(f"{x} cpu" for x in CONTENDERS),
    ):
        table.add_column(column, justify="right")
    for row in rows:
        wall = row["wall"]
        contenders = [wall.get(name) for name in CONTENDERS]
        over = [
            row["floor"] / row["predicted"],
            *(ms and ms / row["predicted"] for ms in contenders),
        ]
        numbers = [wall["one process"], row["predicted"], row["floor"], *contenders]
        cells = [
            *(f"{x:.0f}" if x else "-" for x in numbers),
            *(f"{x:.2f}" if x else "-" for x in over),
        ]
        cells += [f"{row['cpu'][name]:.1f}" if name in row["cpu"] else "-" for name in CONTENDERS]
        table.add_row(str(row["micro_batches"]), *cells)
    return table


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time over prediction by micro-batches, with the floor of the machine."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for name in CONTENDERS:
        points = [
            (row["micro_batches"], row["wall"][name] / row["predicted"])
            for row in rows
            if name in row["wall"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    floors = [(row["micro_batches"], row["floor"] / row["predicted"]) for row in rows]
    axes.plot(
        *zip(*floors, strict=True), "--", color="grey", label="two processes without messages"
    )
    axes.set(
        xscale="log",
        xlabel="micro-batches",
        ylabel="time / predicted",
        xticks=[row["micro_batches"] for row in rows],
    )
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend(frameon=False)
    figure.savefig(path)


def main(options: argparse.Namespace) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        job = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(probe.getsockname()[1]),
            "WORLD_SIZE": "2",
        }
    ranks = []
    for rank in range(2):
        env = (
            os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        )
        ranks.append(
            subprocess.Popen(
                [sys.executable, *sys.argv], env=env, stdout=subprocess.PIPE if rank == 0 else None
            )
        )
    out, _ = ranks[0].communicate()
    rows = [json.loads(line[3:]) for line in out.decode().splitlines() if line.startswith("ROW")]
    for row in rows:
        m = row["micro_batches"]
        row["predicted"] = row["wall"]["one process"] * (m + 1) / (2 * m)
        row["floor"] = row["wall"]["both at once"] * (m + 1) / m
    if rows:
        print_report(make_table(rows, options.width))
        slow = statistics.median(
            row["wall"]["both at once"] / row["wall"]["one stage"] for row in rows
        )
        print(
            f"A stage beside another process, without messages, takes {slow:.2f} times as long as "
            f"alone."
        )
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(rows, indent=1))
        draw(rows, options.out / "pipeline.png")
    raise SystemExit(any(process.wait() for process in ranks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument(
        "--deepspeed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="beside DeepSpeed, if installed",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/pipeline"), help="folder (default: %(default)s)"
    )
    options = parser.parse_args()
    if fzero.launched() is None:
        main(options)
    rank_main(options)
