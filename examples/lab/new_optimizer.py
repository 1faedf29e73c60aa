"""An optimizer of your own under ZeRO-3: three pure functions, in 15 lines.

    python examples/lab/new_optimizer.py

*Accord* keeps two running means of each gradient element, of its value and of its size.
Their ratio lies between -1 and 1: the agreement of recent gradients about the sign. The
step is the learning rate times this ratio. Both means start from zero with the same
factor, so they need no bias correction. If all gradients agree, the step is a sign, as
in Lion; if they do not, it is small, as in Adam.

The optimizer does not know whether it gets a full buffer or a shard: it is elementwise.
`check_transform` checks this, and the other laws that the stages rely on, on random
layouts and numbers.
"""

from typing import NamedTuple

from matplotlib.figure import Figure
from setting import config, draw_batch, make_model, parse, save, smooth
from torch import Tensor, zeros_like

import fzero
from fzero.testing import check_transform
from sharding import TensorSpec

RANKS, NUM_ROWS = 8, 32


class AccordState(NamedTuple):
    """Tensors as long as the parameter; in `specs`, their specs."""

    mean: Tensor
    size: Tensor


def accord(
    lr: float | Tensor, *, beta: float = 0.9, weight_decay: float = 0.01, eps: float = 1e-12
) -> fzero.Transform:
    def init(param: Tensor) -> AccordState:
        return AccordState(zeros_like(param), zeros_like(param))

    def update(
        grad: Tensor, param: Tensor, state: AccordState
    ) -> tuple[Tensor, Tensor, AccordState]:
        mean, size = state.mean.lerp_(grad, 1 - beta), state.size.lerp_(grad.abs(), 1 - beta)
        param.mul_(1 - lr * weight_decay).sub_(lr * mean / (size + eps))
        return grad, param, AccordState(mean, size)

    def specs(param: TensorSpec) -> AccordState:
        return AccordState(param, param)  # both are sharded like the parameter

    return fzero.Transform(init, update, specs)


def train(step: fzero.TrainStep, num_steps: int) -> tuple[list[float], int]:
    """The losses under ZeRO-3, and the bytes of optimizer state that each rank holds."""
    ranks = fzero.simulate(step, RANKS)
    state, losses = ranks.init(), []
    for index in range(num_steps):
        state, metrics = ranks(state, draw_batch(index, num_rows=NUM_ROWS, world_size=RANKS))
        losses.append(metrics.loss.item())
    return losses, ranks.plan.bytes_per_rank["optimizer"]


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], steps=100)
    check_transform(accord, name="accord", compile="step", max_examples=3)
    print("accord keeps the laws of a transform")
    runs = {
        "AdamW, lr 0.01": fzero.make_train_step(make_model(), config(stage=3, lr=0.01)),
        "Accord, lr 0.01": fzero.make_train_step(
            make_model(), config(stage=3, lr=0.01), transform=accord
        ),
    }
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes, lead = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    curves = []
    for color, (name, step) in zip(("0.45", "tab:red"), runs.items(), strict=True):
        losses, nbytes = train(step, options.steps)
        print(
            f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {nbytes:,} bytes of optimizer "
            f"state per rank"
        )
        axes.plot(range(1, len(losses) + 1), losses, color=color, alpha=0.25)
        steps, means = smooth(losses, width=10)
        curves.append(means)
        axes.plot(steps, means, color=color, linewidth=2, label=f"{name} (mean of 10 steps)")
    lead.axhline(0, color="0.45", linewidth=2)
    lead.plot(steps, curves[1] - curves[0], color="tab:red", linewidth=2)
    lead.set(xlabel="step", ylabel="Accord - AdamW")
    axes.set(ylabel="loss (nats per byte)")
    axes.set_title(f"An optimizer in 15 lines, under ZeRO-3 on {RANKS} simulated ranks", loc="left")
    axes.legend(frameon=False)
    for panel in (axes, lead):
        panel.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    save(figure, options.out, "new_optimizer.png")


if __name__ == "__main__":
    main()
