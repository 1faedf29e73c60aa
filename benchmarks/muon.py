"""What does whole matrices' work cost? Updates and steps with Muon, on one rank and two.

    python benchmarks/muon.py
        a GPT of 2.7M, some minutes alone on two cores
    python benchmarks/muon.py --size large --rounds 1 --steps-per-round 1
        57M; without instructions for bfloat16 an update takes minutes there

Two ranks with one thread each. The contenders are alive together and take turns in
rounds, so that another load on the machine hits all alike; the best round counts. The
matrices of blocks get Muon, all else AdamW. Three ratios have a goal:

- the update of two ranks over that of one: a rank computes half of the matrices, and
  sends and receives the rest (0.55);
- fzero's step over that of `torch.optim.Muon` under DDP, which computes every matrix on
  every rank (1.10);
- fzero's step in stage 2 over FSDP2, where a rank gathers each momentum and computes
  all of them (0.7).

Writes a table, and OUT/muon.json.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, SIZES as OF_PEERS, Size, make_batch
from rich.table import Table
from torch import Tensor, nn

import fzero
from fzero.common import print_report

Run = Callable[[int], float]
"""The number of a step -> its seconds."""
LR = 1e-3
SIZES = {"tiny": Size(width=192, num_blocks=6, num_heads=6, context=128, num_rows=2)} | OF_PEERS
SHORT = {"one rank": 1, "update": 2, "stage 0": 2, "stage 2": 2, "DDP": 2, "FSDP2": 2}
"""The contenders, and their ranks."""


GOALS = (
    ("update", "one rank", 0.55),
    ("stage 0", "DDP", 1.10),
    ("stage 2", "DDP", 1.10),
    ("stage 2", "FSDP2", 0.70),
)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.startswith("blocks.")


def muon() -> Any:
    return fzero.optim.mixed_muon(takes=is_matrix)


def of_fzero(size: Size, stage: int, *, of_update: bool) -> Run:
    """A whole step of fzero, or the seconds of its update alone."""
    model = GPT(size)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    step = fzero.make_train_step(model, config, transform=muon())
    state = step.init()
    rank = step.rank

    def run(index: int) -> float:
        nonlocal state
        batch = make_batch(size, step=index, rank=rank)
        if not of_update:
            start = time.perf_counter()
            state, metrics = step(state, batch)
            metrics.loss.item()
            return time.perf_counter() - start
        window = step.begin(state)
        loss = step.forward(window, lambda: model(*batch))
        window = step.backward(window, loss)
        dist.barrier()
        start = time.perf_counter()
        state, metrics = step.update(window)
        metrics.loss.item()
        return time.perf_counter() - start

    return run


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon of PyTorch, and AdamW."""
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    matrices = [p for name, p in named if is_matrix(name, tuple(p.shape))]
    others = [p for name, p in named if not is_matrix(name, tuple(p.shape))]
    return [
        torch.optim.Muon(matrices, lr=LR, weight_decay=0.0),
        torch.optim.AdamW(others, lr=LR, fused=True),
    ]


def usual(model: nn.Module, optimizers: list[Any], size: Size) -> Run:
    def run(index: int) -> float:
        batch = make_batch(size, step=index, rank=dist.get_rank())
        start = time.perf_counter()
        loss = model(*batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - start

    return run


def of_ddp(size: Size) -> Run:
    model = nn.parallel.DistributedDataParallel(GPT(size), gradient_as_bucket_view=True)
    return usual(model, optimizers_of(model), size)


class GatheredMuon(torch.optim.Optimizer):
    """Muon over FSDP2's shards as usually written by hand: the momentum is a shard; an
    update gathers it, makes the whole step with PyTorch's own function, and keeps its
    rows.
    """

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state, grad = self.state[param], param.grad
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(grad, 0.05)
                nesterov = grad.lerp(state["momentum"], 0.95)
                whole: Tensor = nn.Parameter(torch.zeros(param.shape))
                whole.grad = nesterov.bfloat16().full_tensor().float()
                alone = torch.optim.Muon(
                    [whole], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False
                )
                alone.step()
                rows = param.to_local()
                first = 0 if dist.get_rank() == 0 else len(whole) - len(rows)
                rows.add_(whole[first : first + len(rows)])


def of_fsdp2(size: Size) -> Run:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = GPT(size), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if is_matrix(name, tuple(p.shape))]
    others = [p for name, p in named if not is_matrix(name, tuple(p.shape))]
    adamw = torch.optim.AdamW(others, lr=LR, fused=True)
    return usual(model, [GatheredMuon(matrices), adamw], size)


MAKERS: dict[str, Callable[[Size], Run]] = {
    "one rank": lambda size: of_fzero(size, 0, of_update=True),
    "update": lambda size: of_fzero(size, 2, of_update=True),
    "stage 0": lambda size: of_fzero(size, 0, of_update=False),
    "stage 2": lambda size: of_fzero(size, 2, of_update=False),
    "DDP": of_ddp,
    "FSDP2": of_fsdp2,
}


def run_rank(name: str, size: str, rank: int, folder: Path, pipe: Connection) -> None:
    """Sends "ready", then answers each number of steps with their seconds; 0 ends it."""
    num_ranks = SHORT[name]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / name), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    run, num_done = MAKERS[name](SIZES[size]), 0
    pipe.send("ready")
    while num_steps := pipe.recv():
        dist.barrier()
        pipe.send([run(num_done + index) for index in range(num_steps)])
        num_done += num_steps
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--contenders", default=",".join(SHORT), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/muon"))
    options = parser.parse_args()
    spawn = get_context("spawn")
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, list[tuple[Any, Connection]]] = {}
        for name in options.contenders.split(","):
            jobs[name] = []
            for rank in range(SHORT[name]):
                ours, theirs = spawn.Pipe()
                arguments = (name, options.size, rank, Path(folder), theirs)
                process = spawn.Process(target=run_rank, args=arguments)
                process.start()
                theirs.close()  # so that the pipe ends with the rank
                jobs[name].append((process, ours))
            for _, pipe in jobs[name]:
                assert pipe.recv() == "ready"
        for round_ in range(options.rounds + 1):
            for name, job in jobs.items():
                num_steps = options.steps_per_round if round_ else 1
                for _, pipe in job:
                    pipe.send(num_steps)
                of_ranks = [pipe.recv() for _, pipe in job]
                if round_:  # the first is the warm-up
                    seconds = statistics.median(map(max, zip(*of_ranks, strict=True)))
                    best[name] = min(best.get(name, seconds), seconds)
        for job in jobs.values():
            for process, pipe in job:
                pipe.send(0)
                process.join()
    ratios = {
        f"{one} / {other}": (best[one] / best[other], goal)
        for one, other, goal in GOALS
        if one in best and other in best
    }
    table = Table("contender", "ms")
    for name, seconds in best.items():
        table.add_row(name, f"{1e3 * seconds:.0f}")
    goals = Table("ratio", "measured", "goal")
    for name, (ratio, goal) in ratios.items():
        goals.add_row(name, f"{ratio:.2f}", f"{goal:.2f}")
    print_report(table)
    print_report(goals)
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"ms": {n: 1e3 * s for n, s in best.items()}, "ratios": ratios}, indent=2)
    (options.out / "muon.json").write_text(text)


if __name__ == "__main__":
    main()
