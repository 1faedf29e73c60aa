"""A job changes its stage and number of ranks twice during training, and its losses are
those of an unchanged run.

    python examples/lab/change_stage.py

The state of a step is a value with specs, so a change of stage moves a value from old
specs to new ones: `fzero.reshard(state, old, new)`. Here stage 1 on 2 ranks becomes
stage 3 on 4 and then stage 2 on 3, as if machines joined and left. The global batch is
constant and is split over the current ranks. The only difference from the unchanged run
is rounding: a mean over 2, 3 or 4 ranks adds in another order.
"""

from itertools import pairwise

import torch
from matplotlib.figure import Figure
from setting import config, draw_batch, make_model, parse, save, smooth

import fzero

PHASES = ((1, 2), (3, 4), (2, 3))  # stage, ranks
UNCHANGED = ((0, 1),)
NUM_ROWS = 24
KINDS = ("parameters", "gradients", "optimizer")


def train(
    phases: tuple[tuple[int, int], ...], num_steps: int
) -> tuple[list[float], list[fzero.Plan]]:
    """The loss and the plan of every step."""
    model = make_model()
    ranks, state, losses, plans = None, None, [], []
    for index in range(num_steps):
        stage, world_size = phases[index * len(phases) // num_steps]
        if ranks is None or (ranks.plan.stage, ranks.plan.world_size) != (stage, world_size):
            old, ranks = (
                ranks,
                fzero.simulate(fzero.make_train_step(model, config(stage, lr=0.01)), world_size),
            )
            state = ranks.init() if old is None else fzero.reshard(state, old, ranks)
        state, metrics = ranks(state, draw_batch(index, num_rows=NUM_ROWS, world_size=world_size))
        losses.append(metrics.loss.item())
        plans.append(ranks.plan)
    return losses, plans


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], steps=120)
    losses, plans = train(PHASES, options.steps)
    unchanged, _ = train(UNCHANGED, options.steps)
    differences = [abs(loss - other) for loss, other in zip(losses, unchanged, strict=True)]
    changes = (
        [0]
        + [index for index in range(1, len(plans)) if plans[index] is not plans[index - 1]]
        + [len(plans)]
    )
    figure = Figure(figsize=(9, 6), layout="constrained")
    curve, gap, memory = figure.subplots(3, sharex=True, height_ratios=[4, 2, 3])
    steps = range(1, len(losses) + 1)
    curve.plot(
        *smooth(unchanged, width=5), color="0.75", linewidth=7, label="never changed: one rank"
    )
    curve.plot(*smooth(losses, width=5), color="tab:blue", linewidth=1.5, label="changed twice")
    curve.legend(frameon=False)
    curve.set(ylabel="loss (nats per byte)")
    curve.set_title("Stage and number of ranks change in mid-training", loc="left")
    gap.plot(
        steps, [difference * 1e6 for difference in differences], ".", color="tab:red", markersize=4
    )
    gap.set(
        ylabel="difference\nin millionths",
        ylim=(-0.1 * max(differences) * 1e6, 1.3 * max(differences) * 1e6),
    )
    bottom = torch.zeros(len(plans))
    for kind, color in zip(KINDS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        top = bottom + torch.tensor([plan.bytes_per_rank[kind] for plan in plans]) / 1e6
        memory.fill_between(
            steps, bottom, top, step="mid", color=color, alpha=0.7, linewidth=0, label=kind
        )
        bottom = top
    memory.legend(frameon=False, loc="upper center")
    memory.set(xlabel="step", ylabel="MB of state per rank", ylim=(0, None))
    for start, stop in pairwise(changes):
        plan = plans[start]
        title = f"stage {plan.stage} on {plan.world_size} ranks"
        print(
            f"steps {start + 1} to {stop}: {title}, {sum(plan.bytes_per_rank.values()):,} bytes of "
            f"state per rank"
        )
        memory.annotate(title, ((start + stop) / 2, 0.02), ha="center", va="bottom", fontsize=9)
        for axes in (curve, gap, memory) if start else ():
            axes.axvline(start + 0.5, color="0.3", linestyle="--", linewidth=1)
    for axes in (curve, gap, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest difference from one rank "
        f"{max(differences):.2g}"
    )
    save(figure, options.out, "change_stage.png")


if __name__ == "__main__":
    main()
