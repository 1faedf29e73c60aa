"""ZeRO++ (arXiv:2306.10209): parameters sent in 8 bits, gradients in 4, and the effect
on the loss.

    python examples/lab/quantised_gathers.py

Left: the error of a gather. A block of elements shares a scale, so smaller blocks have
a smaller error and more scales to send. The parameters are those of the demo's model;
the error is relative to them (root mean squares).

Right: four ranks of ZeRO-3 train through comm hooks; the curves are their losses minus
those of the exact run. Gathers in 8 bits (qwZ) have almost no effect. Reductions in 4
bits (qgZ) do, if the numbers of a block differ much in size; error feedback (LoCo)
corrects much of it.
"""

from typing import Any

import torch
from matplotlib.figure import Figure
from setting import config, draw_batch, make_model, parse, save, smooth

import fzero

RANKS, NUM_ROWS = 4, 16
BLOCKS = (16, 64, 256, 1024, 4096)
REDUCTIONS = fzero.comms.compressed(fzero.comms.quantize(4, 1024))
COMM_HOOKS: dict[str, dict[str, Any]] = {
    "exact": {},
    "8-bit gathers": {"gather_hook": fzero.comms.compressed(fzero.comms.quantize(8, 256))},
    "4-bit reductions": {"reduce_hook": REDUCTIONS},
    "4-bit reductions with feedback": {
        "reduce_hook": fzero.comms.error_feedback(REDUCTIONS, decay=0.8)
    },
    "both": {
        "gather_hook": fzero.comms.compressed(fzero.comms.quantize(8, 256)),
        "reduce_hook": fzero.comms.error_feedback(REDUCTIONS, decay=0.8),
    },
}


def error_of(codec: fzero.comms.Codec, x: torch.Tensor) -> tuple[float, float]:
    """Bytes per element, and the relative error."""
    arrived = codec.decode(codec.encode(x), x.numel(), x.dtype)
    assert ((arrived - x).double().abs() <= codec.bound(x)).all()
    return codec.nbytes(x.numel()) / x.numel(), ((arrived - x).norm() / x.norm()).item()


def train(num_steps: int, **hooks: Any) -> tuple[list[float], int]:
    """The losses, and the bytes that a rank sends in a step."""
    step = fzero.make_train_step(
        make_model(),
        config(stage=3, lr=0.01),
        mesh=fzero.comms.AbstractAxis("data", RANKS),
        **hooks,
    )
    ranks = fzero.simulate(step, by="lockstep")
    state, losses = ranks.init(), []
    for index in range(num_steps):
        state, metrics = ranks(state, draw_batch(index, num_rows=NUM_ROWS, world_size=RANKS))
        losses.append(metrics.loss.item())
    return losses, sum(ranks.plan.sent_nbytes_per_step.values())


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], steps=150)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    errors, curves = figure.subplots(1, 2)
    weights = torch.cat([param.detach().flatten() for param in make_model().parameters()])
    for bits in (8, 4):
        points = [error_of(fzero.comms.quantize(bits, block), weights) for block in BLOCKS]
        for block, (nbytes, error) in zip(BLOCKS, points, strict=True):
            print(
                f"{bits} bits in blocks of {block}: {nbytes:.3f} bytes for an element, error "
                f"{error:.2e}"
            )
            errors.annotate(
                f" {block}", (nbytes, error), textcoords="offset points", xytext=(4, -2), fontsize=7
            )
        errors.plot(*zip(*points, strict=True), "o-", label=f"{bits} bits, by elements of a block")
    for dtype in ("bfloat16", "float16"):
        nbytes, error = error_of(fzero.comms.cast(dtype), weights)
        errors.plot(nbytes, error, "s", label=dtype)
    errors.set(
        yscale="log",
        xlabel="bytes for an element (fp32: 4)",
        ylabel="error of a gather, beside the parameters",
    )
    errors.set_title("Parameters in fewer bits", loc="left")
    errors.legend(frameon=False)
    exact: list[float] = []
    for name, hooks in COMM_HOOKS.items():
        losses, nbytes = train(options.steps, **hooks)
        exact = exact or losses
        print(
            f"{name}: loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}, {nbytes:,} bytes sent in "
            f"a step"
        )
        above = [loss - other for loss, other in zip(losses, exact, strict=True)]
        curves.plot(*smooth(above, width=20), label=f"{name}, {nbytes / 1e3:.0f} kB in a step")
    curves.set(xlabel="step", ylabel="loss above the exact run's (nats per byte), mean of 20 steps")
    curves.set_title(f"ZeRO-3 on {RANKS} ranks", loc="left")
    curves.legend(frameon=False)
    for axes in (errors, curves):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, options.out, "quantised_gathers.png")


if __name__ == "__main__":
    main()
