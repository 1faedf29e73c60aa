"""How long do layouts and plans of very large models take, and what does the time
depend on?

Integers only: nothing is allocated for the parameters, and no process is started. Three
sweeps start from 10^12 elements in 10^5 parameters on 4096 ranks and vary one of the
three. Timed are the layout of one flat buffer, the fragments in the shards of all
ranks, the transfers to three quarters of the ranks and from the order of declaration to
round robin, `fzero.plan` of a model on `meta` with blocks of twelve parameters, and its
reshard to three quarters of the ranks as one process plans it:
`fzero.resharding.plan_reshard` and the moves of process 0, in stage 3 and in stage 1,
where every rank holds all parameters. Seconds are those of one core's work, and the
best round counts.
Memory is what Python's allocator held at the peak, in a round of its own.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import nn

import fzero
from fzero.common import print_report
from sharding import FlatLayout, Move, NearEqualSplit, plan_transfer, round_robin


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model, on how many ranks."""

    elements: int = 10**12
    tensors: int = 10**5
    ranks: int = 4096


SWEEPS: dict[str, tuple[Size, ...]] = {
    "tensors": tuple(Size(tensors=10**exponent) for exponent in (3, 4, 5)),
    "ranks": tuple(Size(ranks=ranks) for ranks in (64, 256, 1024, 4096)),
    "elements": tuple(Size(elements=10**exponent) for exponent in (9, 10, 11, 12)),
}
"""What varies, and the values."""

MULTIPLE_OF = 32
BLOCK = 12
"""Parameters of a block."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one size took: seconds by what was made, bytes at the peak of it, and how
    long the results are.
    """

    size: Size
    seconds: dict[str, float]
    nbytes: dict[str, int]
    lengths: dict[str, int]


def make_layout(size: Size) -> FlatLayout:
    """Vectors of nearly equal length."""
    names = tuple(f"blocks.{index // BLOCK}.p{index % BLOCK}" for index in range(size.tensors))
    shapes = tuple((numel,) for numel in NearEqualSplit(size.elements, size.tensors).sizes)
    return FlatLayout(names, shapes, size.ranks, multiple_of=MULTIPLE_OF)


def make_model(size: Size) -> nn.Module:
    """The same parameters, without memory."""
    params = [
        torch.empty(numel, device="meta")
        for numel in NearEqualSplit(size.elements, size.tensors).sizes
    ]
    blocks = [
        nn.ParameterList(params[start : start + BLOCK]) for start in range(0, size.tensors, BLOCK)
    ]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})


def works(size: Size) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    old = make_layout(size)
    fewer = replace(old, world_size=max(size.ranks * 3 // 4, 1))
    order = round_robin(size.tensors, size.ranks)
    dealt = replace(old, names=order.apply(old.names), shapes=order.apply(old.shapes))
    model, cfg = make_model(size), config(size)

    def plans(stage: int) -> list[fzero.Plan]:
        numbers = (old.world_size, fewer.world_size)
        return [
            fzero.plan(model, config(replace(size, ranks=w), stage), world_size=w) for w in numbers
        ]

    divided, whole = plans(3), plans(1)
    return {
        "layout": lambda: FlatLayout(old.names, old.shapes, old.world_size, old.multiple_of),
        "fragments of all ranks": lambda: [old.fragments(rank) for rank in range(size.ranks)],
        "transfer to 3/4 of the ranks": lambda: plan_transfer(old, fewer),
        "transfer to round robin": lambda: plan_transfer(old, dealt),
        "fzero.plan, stage 3": lambda: fzero.plan(model, cfg, world_size=size.ranks),
        "reshard plan of one rank, stage 3": lambda: reshard_moves(*divided),
        "reshard plan of one rank, stage 1": lambda: reshard_moves(*whole),
    }


def reshard_moves(old: fzero.Plan, new: fzero.Plan) -> list[tuple[Move, ...]]:
    """What process 0 copies, sends and receives when the state moves: the moves of
    every flow.
    """
    plan = fzero.resharding.plan_reshard(old, new)
    return [tuple(plan.moves(flow, 0)) for round_ in plan.rounds for flow in round_.flows]


def config(size: Size, stage: int = 3) -> fzero.Config:
    zero = {"stage": stage, "stage3_max_live_parameters": 2 * size.elements}
    return fzero.Config.load(
        {"train_batch_size": size.ranks, "bf16": {"enabled": True}, "zero_optimization": zero}
    )


def find(size: Size, rounds: int) -> Found:
    """Times every work, and then runs it once more under a count of the memory."""
    seconds, nbytes, lengths = {}, {}, {}
    for name, work in works(size).items():
        times = []
        for _ in range(rounds):
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
        seconds[name] = min(times)
        tracemalloc.start()
        result = work()
        nbytes[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        lengths[name] = length_of(result)
    return Found(size, seconds, nbytes, lengths)


def length_of(result: Any) -> int:
    """Parameters of a layout, fragments, moves, or units of a plan."""
    if isinstance(result, FlatLayout):
        return len(result.names)
    if isinstance(result, fzero.Plan):
        return len(result.units)
    return sum(map(len, result)) if isinstance(result, list) else len(result)


def draw(sweeps: dict[str, list[Found]]) -> Figure:
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (varied, results) in zip(
        figure.subplots(1, len(sweeps), sharey=True), sweeps.items()
    ):
        for name in results[0].seconds:
            axes.plot(
                [getattr(f.size, varied) for f in results],
                [f.seconds[name] for f in results],
                marker="o",
                label=name,
            )
        axes.axhline(1, color="0.6", linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel=varied, title=f"{varied} vary")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("seconds of one core")
    figure.axes[-1].legend(fontsize="small", loc="lower right")
    figure.suptitle(
        "Layouts and plans: $10^{12}$ elements in $10^5$ parameters on 4096 ranks, one of them "
        "varied"
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="the best of this many counts")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/layouts"),
        help="folder of the picture and the numbers",
    )
    args = parser.parse_args()
    known = {
        size: find(size, args.rounds)
        for size in dict.fromkeys(size for sizes in SWEEPS.values() for size in sizes)
    }
    sweeps = {varied: [known[size] for size in sizes] for varied, sizes in SWEEPS.items()}
    names = list(known[Size()].seconds)
    table = Table(
        title="ms / MB at the peak / parameters, fragments, moves or units", title_justify="left"
    )
    for column in ("elements", "tensors", "ranks", *names):
        table.add_column(column, justify="right")
    for varied, results in sweeps.items():
        table.add_section()
        for found in results:
            size = found.size
            table.add_row(
                *(
                    f"[bold]{value:,}[/]" if key == varied else f"{value:,}"
                    for key, value in asdict(size).items()
                ),
                *(
                    f"{1e3 * found.seconds[n]:.0f} / {found.nbytes[n] / 1e6:.1f} / "
                    f"{found.lengths[n]:,}"
                    for n in names
                ),
            )
    print_report(table)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "layouts.json").write_text(
        json.dumps([asdict(found) for found in known.values()], indent=1)
    )
    draw(sweeps).savefig(args.out / "layouts.png", dpi=110)
    print(f"numbers and picture in {args.out}")


if __name__ == "__main__":
    main()
