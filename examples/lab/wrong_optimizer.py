"""A wrong optimizer on 8 ranks: `check_transform` says why, `diff` shows where.

    python examples/lab/wrong_optimizer.py

The optimizer divides the mean of each gradient element by the mean of its size, as in
`new_optimizer.py`. A floor under the size keeps quiet elements from large steps. Here
the floor is the mean size of all elements, at most 1e-4. This mean is where the fault
is: an update sees one shard, and the mean of a shard is another number on each rank.
Nothing raises, and the loss falls.

Each run is recorded: one rank, and 8 ranks under ZeRO-3, with the same 32 rows. Two
runs of a right optimizer differ by rounding.
"""

from typing import NamedTuple

from matplotlib.figure import Figure
from setting import config, draw_batch, make_model, parse, save
from torch import Tensor, tensor, zeros_like

import fzero
from fzero.digests import Difference, diff
from fzero.testing import check_transform
from sharding import TensorSpec

RANKS, NUM_ROWS, MOST = 8, 32, 1e-4


class FlooredState(NamedTuple):
    """Tensors as long as the parameter; in `specs`, their specs."""

    mean: Tensor
    size: Tensor


def of_floor(floor_of):
    """An optimizer whose floor is `floor_of(size)`, as a function of the rate."""

    def floored(lr: float | Tensor, *, beta: float = 0.9) -> fzero.Transform:
        def init(param: Tensor) -> FlooredState:
            return FlooredState(zeros_like(param), zeros_like(param))

        def update(
            grad: Tensor, param: Tensor, state: FlooredState
        ) -> tuple[Tensor, Tensor, FlooredState]:
            mean, size = state.mean.lerp_(grad, 1 - beta), state.size.lerp_(grad.abs(), 1 - beta)
            param.sub_(lr * mean / (size + floor_of(size)))
            return grad, param, FlooredState(mean, size)

        def specs(param: TensorSpec) -> FlooredState:
            return FlooredState(param, param)

        return fzero.Transform(init, update, specs)

    return floored


OPTIMIZERS = {
    "wrong": of_floor(lambda size: size.mean().clamp(1e-12, MOST)),
    "right": of_floor(lambda size: tensor(MOST)),
}


def law_broken_by(optimizer, examples: int) -> str:
    """The law that an optimizer breaks, in words; "" for none."""
    try:
        check_transform(optimizer, name="optimizer", max_examples=examples)
    except AssertionError as error:
        return str(error)
    return ""


def train(optimizer, num_ranks: int, num_steps: int, folder: str) -> list[float]:
    """Trains on some ranks, and records every step; the losses."""
    step = fzero.make_train_step(make_model(), config(stage=3, lr=0.003), transform=optimizer)
    ranks = fzero.simulate(step, num_ranks, by="lockstep")
    recorded, state, losses = fzero.record(ranks, folder), ranks.init(), []
    for index in range(num_steps):
        batch = draw_batch(index, num_rows=NUM_ROWS, world_size=num_ranks)
        state, metrics = recorded(state, batch)
        losses.append(metrics.loss.item())
    return losses


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], steps=6, examples=40)
    found: dict[str, Difference] = {}
    for name, optimizer in OPTIMIZERS.items():
        law = law_broken_by(optimizer, options.examples)
        print(f"the {name} optimizer breaks a law: {law}" if law else f"the {name} one breaks none")
        folders = {num: str(options.out / f"{name} on {num}") for num in (1, RANKS)}
        for num, folder in folders.items():
            losses = train(optimizer, num, options.steps, folder)
            print(f"{name}, ranks {num}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        found[name] = diff(*folders.values())
        print(found[name] if name == "wrong" else found[name].conclusion)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for (name, difference), color in zip(found.items(), ("tab:red", "0.45"), strict=True):
        for quantity, style in {"gradient": ":", "mean": "--", "weight": "-"}.items():
            values = difference.growth()[quantity].values()
            axes.plot(
                difference.steps, values, style, color=color, label=f"{name} optimizer, {quantity}"
            )
    axes.set(yscale="log", xlabel="step", ylabel="relative difference")
    axes.set_title(f"1 rank and {RANKS} ranks, the same rows: where two runs part", loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, options.out, "wrong_optimizer.png")


if __name__ == "__main__":
    main()
