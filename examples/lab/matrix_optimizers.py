"""AdamW, Muon and SOAP on the demo's text: at equal tokens, and at equal seconds.

    python examples/lab/matrix_optimizers.py [--search 100]

Muon and SOAP look at whole matrices: Muon makes the singular values of a step equal,
SOAP runs Adam in the eigenbasis of each matrix. Both take longer for a step than AdamW;
on a model as small as this one, much longer. The left panel counts steps, of equal
numbers of tokens, the right one seconds of one core. The three take turns step by step,
so that another load on the machine delays all alike.

Each is the optimizer of a step in ZeRO-3 (`fzero.optim.mixed_muon`, `soap`). Embeddings,
norms and the head get AdamW at the same rate in all three. The rates
below are the best of `RATES` by the last 10 training losses of `--search 100`, which
tries all rates with each optimizer, for 100 steps of one seed. So small gaps between
the curves are no ranking.
"""

import time

from matplotlib.figure import Figure
from setting import config, draw_batch, make_model, parse, save, smooth

import fzero

NUM_ROWS = 32


RATES = (0.005, 0.01, 0.02, 0.04, 0.08)


def others(lr: float) -> fzero.Transform:
    """The optimizer of embeddings, norms and the head, whatever the rate of matrices."""
    return fzero.adamw(0.02)


OPTIMIZERS = {
    "AdamW": (0.02, fzero.adamw, "0.45"),
    "Muon": (
        0.04,
        fzero.optim.mixed_muon(adjust_lr_fn="match_rms_adamw", others=others),
        "tab:red",
    ),
    "SOAP": (0.02, fzero.optim.soap(others=others), "tab:blue"),
}
"""The rate, the transform and the colour of each."""


def search(num_steps: int) -> dict[str, float]:
    """The best rate of each; prints the mean of the last 10 losses for every rate."""
    best = {}
    for name in OPTIMIZERS:
        ends = {}
        for rate in RATES:
            losses, _ = train({name: rate}, num_steps)[name]
            ends[rate] = sum(losses[-10:]) / len(losses[-10:])
        best[name] = min(ends, key=ends.__getitem__)
        print(name, *(f"{rate}: {loss:.3f}" for rate, loss in ends.items()), sep="  ")
    return best


def train(rates: dict[str, float], num_steps: int) -> dict[str, tuple[list[float], list[float]]]:
    """By optimizer, the loss of each step, and the seconds until then."""
    steps = {
        name: fzero.make_train_step(
            make_model(), config(stage=3, lr=rate), transform=OPTIMIZERS[name][1]
        )
        for name, rate in rates.items()
    }
    states = {name: step.init() for name, step in steps.items()}
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], [0.0]) for name in steps}
    for index in range(num_steps):
        tokens_WBT, targets_WBT = draw_batch(index, num_rows=NUM_ROWS, world_size=1)
        for name, step in steps.items():
            losses, seconds = found[name]
            start = time.perf_counter()
            states[name], metrics = step(states[name], (tokens_WBT[0], targets_WBT[0]))
            losses.append(metrics.loss.item())
            seconds.append(seconds[-1] + time.perf_counter() - start)
    return {name: (losses, seconds[1:]) for name, (losses, seconds) in found.items()}


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], steps=300, search=0)
    rates = {name: rate for name, (rate, _, _) in OPTIMIZERS.items()}
    runs = train(search(options.search) if options.search else rates, options.steps)
    shortest = min(seconds[-1] for _, seconds in runs.values())
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for name, (losses, seconds) in runs.items():
        color = OPTIMIZERS[name][2]
        ends, means = smooth(losses, width=10)
        in_time = max(i for i, at in enumerate(seconds) if at <= shortest or i == 0)
        at_time = means[max(0, in_time + 1 - ends[0])].item()
        print(
            f"{name}: loss {losses[0]:.3f} -> {means[-1]:.3f} after {len(losses)} steps, "
            f"{at_time:.3f} after {shortest:.2f} s; {1e3 * seconds[-1] / len(losses):.1f} ms a step"
        )
        by_steps.plot(ends, means, color=color, linewidth=2, label=name)
        by_seconds.plot([seconds[end - 1] for end in ends], means, color=color, linewidth=2)
    by_steps.set(xlabel=f"step of {NUM_ROWS} rows", ylabel="loss (nats per byte, mean of 10 steps)")
    by_seconds.set(xlabel="seconds of one core")
    by_seconds.axvline(shortest, color="0.8", linewidth=1)
    by_steps.set_title("Equal tokens", loc="left")
    by_seconds.set_title("Equal seconds", loc="left")
    by_steps.legend(frameon=False)
    for panel in (by_steps, by_seconds):
        panel.spines[["top", "right"]].set_visible(False)
    save(figure, options.out, "matrix_optimizers.png")


if __name__ == "__main__":
    main()
