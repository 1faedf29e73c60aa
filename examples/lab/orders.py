"""When each rank copies its gradients to the host during the backward: declaration
order against round robin.

    python examples/lab/orders.py

The backward makes gradients from the last parameter to the first. Each rank keeps its
shard of them and copies a fragment to its host as soon as its gradient exists, over a
link of its own. The page compares three layouts:

- one flat buffer in declaration order: a shard is a range of layers, so the ranks copy
  one after the other, and rank 0 starts only near the end of the backward;
- one flat buffer in round robin (DeepSpeed's `round_robin_gradients`): every rank has
  parameters of all depths;
- one flat buffer for each block, as in fzero: every rank has an equal part of every
  block, in either order.

The page uses integers only and makes no tensor. The time of a gradient is the number of
its elements, and reductions take no time. (fzero reduces a block at once, after its
last gradient: up to a block later than here.)
"""

from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from setting import parse, save

from sharding import FlatLayout, Order, declaration, round_robin

WIDTH, DEPTH = 768, 12
BLOCK = {
    "norm_1": (WIDTH,),
    "qkv": (3 * WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "norm_2": (WIDTH,),
    "up": (4 * WIDTH, WIDTH),
    "down": (WIDTH, 4 * WIDTH),
}
SHAPES = {
    f"blocks.{index}.{name}": shape for index in range(DEPTH) for name, shape in BLOCK.items()
}
COPY = 0.8
"""The time of a rank's link for its shard; the unit is one backward."""


class Copy(NamedTuple):
    """The copy of a fragment of one parameter's gradient to the host; the unit of time
    is one backward.
    """

    name: str
    start: float
    stop: float


def block_of(name: str) -> int:
    return int(name.split(".")[1])


def lay_out(names: list[str], order: Order, world_size: int) -> FlatLayout:
    names = order.apply(names)
    return FlatLayout(names, tuple(SHAPES[name] for name in names), world_size)


def ready_times() -> dict[str, float]:
    """The time at which the backward has made the gradient of each parameter."""
    layout = FlatLayout(tuple(SHAPES), tuple(SHAPES.values()), world_size=1)
    return {name: 1 - layout.bounds(name)[0] / layout.numel for name in SHAPES}


def copies(layouts: list[FlatLayout], rank: int) -> Iterator[Copy]:
    """The copies of a rank, first come, first served."""
    ready, free = ready_times(), 0.0
    per_element = COPY / sum(layout.partition.shard_numel for layout in layouts)
    fragments = [fragment for layout in layouts for fragment in layout.fragments(rank)]
    for fragment in sorted(fragments, key=lambda fragment: ready[fragment.name]):
        start = max(free, ready[fragment.name])
        free = start + fragment.numel * per_element
        yield Copy(fragment.name, start, free)


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], ranks=4)
    num_ranks, names = options.ranks, list(SHAPES)
    blocks = [[name for name in names if block_of(name) == index] for index in range(DEPTH)]
    ways = {
        "one buffer, declaration order": [lay_out(names, declaration(len(names)), num_ranks)],
        "one buffer, round robin": [lay_out(names, round_robin(len(names), num_ranks), num_ranks)],
        "a buffer for each block": [
            lay_out(block, declaration(len(block)), num_ranks) for block in blocks
        ],
    }
    figure = Figure(figsize=(10, 1.2 + 0.55 * len(ways) * num_ranks), layout="constrained")
    panels, colors = (
        figure.subplots(len(ways), sharex=True),
        ScalarMappable(Normalize(0, DEPTH - 1), "viridis"),
    )
    for axes, (way, layouts) in zip(panels, ways.items(), strict=True):
        ends = []
        for rank in range(num_ranks):
            lane = list(copies(layouts, rank))
            bars = [(copy.start, copy.stop - copy.start) for copy in lane]
            shades = [colors.to_rgba(block_of(copy.name)) for copy in lane]
            axes.broken_barh(
                bars, (rank - 0.4, 0.8), facecolor=shades, edgecolor="white", linewidth=0.3
            )
            ends.append(lane[-1].stop)
            owned = sorted({block_of(copy.name) for copy in lane})
            print(
                f"{way}: rank {rank} has parts of blocks {owned[0]} to {owned[-1]}, "
                f"copies from {lane[0].start:.2f} to {lane[-1].stop:.2f}"
            )
        print(f"{way}: all is on the hosts at {max(ends):.2f} backwards")
        axes.axvline(1, color="0.3", linestyle="--", linewidth=1)
        axes.axvline(max(ends), color="tab:red", linewidth=1.5)
        axes.set_title(
            f"{way}: all is on the hosts at {max(ends):.2f}",
            loc="left",
            fontsize=10,
            fontweight="bold",
        )
        axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)], fontsize=8)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set(
        xlabel="time in backwards; dashed: the backward ends, red: the last copy does",
        xlim=(0, None),
    )
    figure.colorbar(colors, ax=panels, label="block whose gradient is copied", pad=0.01)
    save(figure, options.out, "orders.png")


if __name__ == "__main__":
    main()
