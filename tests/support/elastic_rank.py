"""What does a rank of an elastic job do? `elastic_rank.py FOLDER`: trains on any number
of ranks, and goes on from what is saved.

`train` is also what an undisturbed run does, from one number of steps to another.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fzero

NUM_STEPS, EVERY, WIDTH = 24, 3, 8
CONFIG = {
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 12,
        "micro_batch_sizes": [1, 2],
        "version": 0.1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def make_step() -> fzero.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    return fzero.make_train_step(
        model, CONFIG, loss_fn=lambda model, x: (model(x) - x).square().mean()
    )


def samples(number: int, step: fzero.TrainStep) -> Tensor:
    """This rank's part of the global batch of a step, which is the same on every number
    of ranks.
    """
    sizes = fzero.Config.load(CONFIG).batch_sizes(step.world_size)
    assert sizes.train == 12 and sizes.micro is not None
    batch = torch.randn(sizes.train, WIDTH, generator=torch.Generator().manual_seed(number))
    return batch.chunk(step.world_size)[step.rank]


def train(
    folder: Path, stop: int = NUM_STEPS, *, attempt: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    """Trains until step `stop`, from the start or from what is saved in `folder`; the
    weights at the end.
    """
    step = make_step()
    state, number = step.init(), 0
    if (folder / "saved" / "latest").exists():
        state, client, _ = fzero.load(folder / "saved", step=step)
        number = client["number"]
    if step.rank == 0:
        with (folder / "segments").open("a") as file:
            file.write(f"{step.world_size} {number}\n")
    while number < stop:
        state, _ = step(state, samples(number, step))
        number += 1
        if step.rank == 0:
            (folder / "progress.new").write_text(f"{attempt} {number}")
            os.replace(folder / "progress.new", folder / "progress")
        if number % EVERY == 0:
            fzero.save(state, folder / "saved", step=step, client={"number": number}, keep=2)
        time.sleep(seconds)
    return step.gather(state)


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (here / f"rank.{os.environ['RANK']}").write_text(str(os.getpid()))
    weights = train(here, attempt=attempt, seconds=0.02)
    if os.environ["RANK"] == "0":
        torch.save(weights, here / "weights.pt")
