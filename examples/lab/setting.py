"""The common parts of the lab: the demo's model and text, batches for any number of
ranks, and the picture's file.

Shape letters: W ranks (the leading dimension), B rows of a rank's batch, T bytes of a
row.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from einops import rearrange
from matplotlib.figure import Figure
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from gpt import GPT, SIZES
from text import random_batch, read_text

# simulated ranks are on the CPU; a model on meta would be placed on a GPU
os.environ["CUDA_VISIBLE_DEVICES"] = ""
torch.set_num_threads(1)  # more threads would only slow down a model this small
SIZE = SIZES["tiny"]
TRAINING, HELD_OUT = read_text()


def parse(description: str, **numbers: int) -> argparse.Namespace:
    """The options of a page: the folder of its picture, and its numbers with their
    defaults.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("out/lab"), help="folder of the picture")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    return parser.parse_args()


def make_model() -> GPT:
    """The same weights every time."""
    torch.manual_seed(0)
    return GPT(SIZE)


def config(stage: int, lr: float) -> dict:
    """AdamW; stage 3 shards even the small parameters."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"optimizer": {"type": "AdamW", "params": {"lr": lr}}, "zero_optimization": zero}


def draw_batch(step: int, *, num_rows: int, world_size: int) -> tuple[Tensor, ...]:
    """The batch of a step, split over the ranks: any number of ranks together get the
    same rows.

    Returns:
        tokens and targets, each [W, B, T].
    """
    batch = random_batch(
        TRAINING, context=SIZE.context, batch_size=num_rows, seed=0, step=step, rank=0
    )
    return tuple(rearrange(x, "(rank b) t -> rank b t", rank=world_size) for x in batch)


def smooth(losses: list[float], *, width: int) -> tuple[range, Tensor]:
    """The means of `width` neighbours, and the step at which each ends."""
    means = torch.tensor(losses).unfold(0, min(width, len(losses)), 1).mean(-1)
    return range(len(losses) - len(means) + 1, len(losses) + 1), means


def save(figure: Figure, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / name, dpi=110)
    print(f"drawn to {out / name}")
