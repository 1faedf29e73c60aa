"""A small GPT with a curriculum of lengths, and with random layer-token dropping,
beside the plain run at equal counted FLOPs.

    python examples/curriculum.py                     # about two minutes on one core
    python examples/curriculum.py --steps 20 --seeds 2 --times 0

1. The plain run trains `--steps` updates on sequences of 64 bytes; their FLOPs are
  counted by torch's counter.
2. The other two spend the same FLOPs, so they make more updates: one begins with
   sequences of 16 bytes, one lets the two inner layers of four see 16 of the 64
   positions at first. Both see everything from 60 % of the plain run's updates on.
3. Every run is scored on held-out text at the full length; the table has the mean and
  the spread over seeds.
4. The time of a step with S/4, S/2 and S kept tokens in all layers, beside its counted
  FLOPs.

A model of 0.3 million parameters for a few hundred updates says little about large
ones: it shows how the pieces fit together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Block, Size
from matplotlib.figure import Figure
from text import random_batch, read_text, scoring_batches
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fzero
from fzero.data import RandomLTD, fixed_linear, truncated

CONTEXT, BATCH, POINTS = 64, 8, 6
SIZE = Size(context=CONTEXT, width=64, depth=4, num_heads=4, num_trigrams=512)
CONFIG = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}


def flops_of(step: fzero.TrainStep, state: Any, batch: Any) -> tuple[Any, int]:
    """The state after a step, and the step's FLOPs; attention is counted as matrix
    products.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        state, _ = step(state, batch)
    return state, counter.get_total_flops()


class Run:
    """One way to train: a model, what it sees of a batch, and its cost at each update."""

    def __init__(self, kind: str, num_steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        model: nn.Module = GPT(SIZE)
        schedule = fixed_linear(16, CONTEXT, steps=max(1, num_steps * 6 // 10), multiple=16)
        self.cut: Callable[[Any, int], Any] = lambda batch, n: batch
        self.cost: Callable[[int], int] = lambda n: CONTEXT
        if kind == "curriculum":
            self.cut = lambda batch, n: truncated(batch, schedule(n + 1))
            self.cost = lambda n: schedule(n + 1)
        elif kind == "LTD":
            model = RandomLTD(layers=[1, 2], schedule=schedule, seed=seed).wrap(model, Block)
            self.cost = schedule
        self.step = fzero.make_train_step(model, CONFIG, seed=seed)


def trained(
    kind: str, num_steps: int, seed: int, budget: int | None, text: Tensor, held_out: Any
) -> Any:
    """Trains until the FLOPs are spent (None: for `num_steps`). Returns the curve of
    (FLOPs, loss), FLOPs, updates and bytes.
    """
    run = Run(kind, num_steps, seed)
    state, spent, seen, costs = run.step.init(), 0, 0, dict[int, int]()
    curve: list[tuple[int, float]] = []

    def score() -> None:
        losses = [float(run.step.evaluate(state, batch)) for batch in held_out]
        curve.append((spent, statistics.fmean(losses)))

    n = 0
    while (n < num_steps) if budget is None else spent + costs.get(run.cost(n), 0) <= budget:
        batch = run.cut(
            random_batch(text, context=CONTEXT, batch_size=BATCH, seed=seed, step=n, rank=0), n
        )
        if run.cost(n) in costs:
            state, _ = run.step(state, batch)
        else:
            state, costs[run.cost(n)] = flops_of(run.step, state, batch)
        spent, seen, n = spent + costs[run.cost(n)], seen + batch[0].numel(), n + 1
        whole = budget or num_steps * costs[CONTEXT]
        if spent * POINTS // whole > (spent - costs[run.cost(n - 1)]) * POINTS // whole:
            score()
    if curve[-1][0] != spent:
        score()
    return curve, spent, n, seen


def draw(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    """Held-out loss against counted FLOPs: the mean of the seeds, and their range."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for kind, of_seeds in curves.items():
        points = list(zip(*(curve[:POINTS] for curve in of_seeds)))
        x = [statistics.fmean(flops for flops, _ in point) / 1e12 for point in points]
        losses = [[loss for _, loss in point] for point in points]
        (line,) = axes.plot(
            x, [statistics.fmean(point) for point in losses], label=kind, marker="."
        )
        axes.fill_between(
            x, [min(p) for p in losses], [max(p) for p in losses], alpha=0.2, color=line.get_color()
        )
    axes.set(xlabel="counted TFLOPs", ylabel="held-out loss (nats per byte)")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def times(repeats: int) -> list[tuple[int, float, float]]:
    """(kept tokens, time, FLOPs) of a step in which all layers drop tokens, the last
    two as shares of those with all tokens.
    """
    size = Size(context=256, width=256, depth=4, num_heads=4, num_trigrams=16)
    tokens = torch.randint(0, 256, (8, size.context), generator=torch.Generator().manual_seed(0))
    steps = {}
    for kept in (size.context, size.context // 2, size.context // 4):
        torch.manual_seed(0)
        ltd = RandomLTD(
            layers=range(size.depth), schedule=fixed_linear(kept, kept, steps=1, multiple=1)
        )
        step = fzero.make_train_step(ltd.wrap(GPT(size), Block), CONFIG)
        state, flops = flops_of(step, step.init(), (tokens, tokens))
        steps[kept] = [step, state, flops, float("inf")]
    for _ in range(repeats):  # in turns, so that all meet the same load
        for own in steps.values():
            start = time.perf_counter()
            own[1], _ = own[0](own[1], (tokens, tokens))
            own[3] = min(own[3], time.perf_counter() - start)
    _, _, all_flops, all_seconds = steps[size.context]
    return [
        (kept, seconds / all_seconds, flops / all_flops)
        for kept, (_, _, flops, seconds) in steps.items()
    ]


def main(num_steps: int, num_seeds: int, repeats: int, out: Path) -> dict[str, list[float]]:
    """Trains each kind with each seed; returns the losses at the end, by kind."""
    text, others = read_text()
    held_out = scoring_batches(
        others[:4_500], context=CONTEXT, batch_size=64, rank=0, world_size=1
    )[0]
    curves: dict[str, list[Any]] = {"plain": [], "curriculum": [], "LTD": []}
    totals: dict[str, list[tuple[int, int, int]]] = {kind: [] for kind in curves}
    began = time.perf_counter()
    for seed in range(num_seeds):
        budget: int | None = None
        for kind, of_seeds in curves.items():
            curve, spent, updates, seen = trained(kind, num_steps, seed, budget, text, held_out)
            budget = budget or spent
            of_seeds.append(curve)
            totals[kind].append((spent, updates, seen))
    losses = {kind: [curve[-1][1] for curve in of_seeds] for kind, of_seeds in curves.items()}
    print(f"{num_seeds} seeds, {time.perf_counter() - began:.0f} s")
    print(f"{'':12} loss ± deviation   TFLOPs  updates     bytes")
    for kind, found in losses.items():
        spent, updates, seen = totals[kind][0]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(
            f"{kind:12} {statistics.fmean(found):6.4f} ± {spread:.4f} {spent / 1e12:10.3f} "
            f"{updates:8d} {seen:9,d}"
        )
    draw(curves, out / "curriculum.png")
    if repeats:
        print("\nkept tokens  time  counted FLOPs, as shares of a step with all tokens")
        for kept, took, counted in times(repeats):
            print(f"{kept:11d} {took:5.2f} {counted:14.2f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120, help="updates of the plain run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--times",
        type=int,
        default=5,
        help="repeated steps of the time measurement; 0 measures none",
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    main(given.steps, given.seeds, given.times, given.out)
