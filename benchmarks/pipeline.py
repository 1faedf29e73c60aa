"""A pipeline of two equal stages on two processes: its time over the predicted one, beside torch.distributed.pipelining.

    python benchmarks/pipeline.py [--width 512] [--depth 8] [--rounds 5]

The prediction is T₁·(m+1)/(2m), where T₁ is the time of one process for the same m micro-batches: two stages, and a bubble of one
micro-batch. Contenders take turns in one run, and the table shows medians. Each rank has one thread.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fzero
from fzero.pipeline import PipelineModule
from sharding import Mesh

ROWS = 32  # of a micro-batch
MICRO_BATCHES = (1, 2, 4, 8, 16)


def model(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def of_fzero(options: argparse.Namespace, num_micro: int, num_stages: int) -> Callable[[], Any]:
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": num_micro,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 0},
    }  # fmt: skip
    layers = PipelineModule(model(options.width, options.depth), num_stages, loss_fn=nn.functional.mse_loss)
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


def timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - began)


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = fzero.join()
    for num_micro in MICRO_BATCHES:
        contenders = {"fzero": of_fzero(options, num_micro, 2), "torch": of_torch(options, num_micro)}
        alone = of_fzero(options, num_micro, 1) if world.rank == 0 else None
        times: dict[str, list[float]] = {name: [] for name in (*contenders, "alone")}
        for index in range(options.rounds + 2):
            for name, run in contenders.items():
                if run is not None:
                    torch.distributed.barrier()
                    found = timed(run)
                    if index > 1:  # the first steps learn
                        times[name].append(found)
            torch.distributed.barrier()
            if alone is not None:
                found = timed(alone)
                if index > 1:
                    times["alone"].append(found)
        if world.rank == 0:
            found = {name: statistics.median(some) for name, some in times.items() if some}
            print(json.dumps({"micro_batches": num_micro, **found}), flush=True)
    fzero.shutdown()


def main(options: argparse.Namespace) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = []
    for rank in range(2):
        env = os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        ranks.append(
            subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=subprocess.PIPE if rank == 0 else None)
        )
    out, _ = ranks[0].communicate()
    print("ms a step    one process   predicted   fzero   over predicted   torch")
    for row in map(json.loads, out.decode().splitlines()):
        m = row["micro_batches"]
        predicted = row["alone"] * (m + 1) / (2 * m)
        over = row["fzero"] / predicted
        torchs = f"{row['torch']:7.1f}" if "torch" in row else "refuses"
        print(f"m = {m:2}       {row['alone']:11.1f}  {predicted:10.1f} {row['fzero']:7.1f} {over:16.2f}  {torchs}")
    raise SystemExit(any(process.wait() for process in ranks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if fzero.launched() is None:
        main(options)
    rank_main(options)
