"""How much longer does a step of simulated ranks take than one rank's step on the same
global batch?

Both run in this process, on as many threads as torch has, and take turns. The simulated
ranks hold a gradient each, so that memory grows with their number; in lockstep each
also has its own copies of the modules.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpt import GPT, VOCAB, Size
from rich.table import Table

import fzero
from fzero.common import print_report

SIZES = {"tiny": Size(96, 3, 3, 64, 1), "small": Size(384, 6, 6, 128, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    size = SIZES[options.size]
    table = Table(
        title=f"{options.size}: seconds per step, medians; {torch.get_num_threads()} threads"
    )
    for column in (
        "stage",
        "ranks",
        "one rank",
        "vmap",
        "lockstep",
        "vmap / one",
        "lockstep / one",
    ):
        table.add_column(column, justify="right")
    for stage in options.stages:
        for num_ranks in options.ranks:
            found = _measure(size, stage, num_ranks, options.steps)
            one = found["one"]
            numbers = [*found.values(), found["vmap"] / one, found["lockstep"] / one]
            table.add_row(str(stage), str(num_ranks), *(f"{number:.3f}" for number in numbers))
    print_report(table)


def _measure(size: Size, stage: int, num_ranks: int, num_steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    cfg = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    alone = fzero.make_train_step(GPT(size), cfg)
    contenders: dict[str, Any] = {
        "one": alone,
        "vmap": fzero.simulate(alone, num_ranks, by="vmap"),
        "lockstep": fzero.simulate(alone, num_ranks, by="lockstep"),
    }
    states = {name: step.init() for name, step in contenders.items()}
    rows = torch.randint(VOCAB, (num_steps + 1, num_ranks, size.num_rows, size.context + 1))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for step_rows in rows:
        stacked = (step_rows[..., :-1], step_rows[..., 1:])
        for name, step in contenders.items():
            batch = tuple(x.flatten(0, 1) for x in stacked) if name == "one" else stacked
            took, (states[name], metrics) = _timed(lambda: step(states[name], batch))  # noqa: B023
            seconds[name].append(took)
            losses[name] = metrics.loss.item()
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
