"""A model that does not fit a rank: plan it before a machine exists, then train it in
shards that fit.

    python examples/lab/too_big.py

1. A GPT of 6.6 billion parameters is built on `meta`, where tensors have shapes and no
   memory, and planned for 1 to 64 ranks in each stage. The picture compares the bytes
   of a rank in bf16 with AdamW (an fp32 master and two moments) with a budget of 24 GB.
   Activations are not included.
2. A small model of the same kind is trained under ZeRO-3 on 8 simulated ranks. It
   starts on `meta`, too: `init` fills one unit after the other directly into the ranks'
   shards, so in a job no process ever has the full model.
"""

from dataclasses import replace

import optree
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from setting import GPT, SIZE, config, draw_batch, parse, save

import fzero

LARGE = replace(SIZE, context=2048, width=4096, depth=32, num_heads=32, num_trigrams=2**15)
SMALL = replace(SIZE, depth=8)
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
COLORS = {
    "parameters": "tab:blue",
    "master": "tab:purple",
    "gradients": "tab:orange",
    "optimizer": "tab:green",
}
BUDGET, RANKS, NUM_ROWS = 24e9, 8, 16


def plans(model: GPT, stage: int) -> dict[int, fzero.Plan]:
    """The plans by number of ranks."""
    cfg = {**config(stage, lr=1e-3), "bf16": {"enabled": True}}
    return {world_size: fzero.plan(model, cfg, world_size=world_size) for world_size in WORLD_SIZES}


def draw(axes: Axes, planned: dict[int, fzero.Plan]) -> None:
    """A stacked bar for each number of ranks; bars above the budget are pale."""
    for place, plan in enumerate(planned.values()):
        held, bottom = plan.bytes_per_rank, 0.0
        for kind, color in COLORS.items():
            alpha = 1.0 if sum(held.values()) <= BUDGET else 0.35
            axes.bar(place, held[kind] / 1e9, bottom=bottom, color=color, alpha=alpha)
            bottom += held[kind] / 1e9
    axes.axhline(BUDGET / 1e9, color="0.2", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(planned)), planned)
    axes.set(xlabel="ranks")
    axes.spines[["top", "right"]].set_visible(False)


def train(num_steps: int) -> None:
    """Trains the small model, and prints the bytes of each rank."""
    with torch.device("meta"):
        model = GPT(SMALL)
    ranks = fzero.simulate(fzero.make_train_step(model, config(stage=3, lr=0.01)), RANKS)
    state, losses = ranks.init(), []
    for index in range(num_steps):
        state, metrics = ranks(state, draw_batch(index, num_rows=NUM_ROWS, world_size=RANKS))
        losses.append(metrics.loss.item())
    print(
        f"trained on {RANKS} ranks in stage 3, {num_steps} steps: loss {losses[0]:.3f} -> "
        f"{losses[-1]:.3f}"
    )
    numel, planned = (
        sum(param.numel() for param in model.parameters()),
        sum(ranks.plan.bytes_per_rank.values()),
    )
    print(f"whole, the state would be {16 * numel:,} bytes")
    for rank, own in enumerate(fzero.simulation.unstacked(state, RANKS)):
        held = sum(
            x.nbytes for x in optree.tree_leaves((own.params, own.master, own.grads, own.optimizer))
        )
        print(f"rank {rank} holds {held:,} bytes, planned were {planned:,}")
    unit = max(ranks.plan.units, key=lambda unit: unit.gathered_numel)
    print(
        f"the largest unit, {unit.name}, has {4 * unit.gathered_numel:,} bytes when it is gathered"
    )


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], steps=40)
    with torch.device("meta"):
        large = GPT(LARGE)
    numel = sum(param.numel() for param in large.parameters())
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for stage, axes in enumerate(figure.subplots(1, 4, sharey=True)):
        planned = plans(large, stage)
        fitting = [
            size for size, plan in planned.items() if sum(plan.bytes_per_rank.values()) <= BUDGET
        ]
        fits = f"fits from {fitting[0]} ranks on" if fitting else "fits no number of ranks"
        print(f"{numel:,} parameters in stage {stage}: {fits}")
        draw(axes, planned)
        axes.set_title(f"stage {stage}\n{fits}", loc="left", fontsize=10)
        if stage == 0:
            axes.set(ylabel="GB of state per rank")
    axes.annotate(
        f"{BUDGET / 1e9:g} GB",
        (len(planned) - 0.5, BUDGET / 1e9),
        (0, 3),
        textcoords="offset points",
        ha="right",
    )
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.suptitle(
        f"A GPT of {numel / 1e9:.1f} billion parameters, bf16 and AdamW, before any rank is there"
    )
    save(figure, options.out, "too_big.png")
    train(options.steps)


if __name__ == "__main__":
    main()
