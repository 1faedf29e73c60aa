"""DiLoCo (arXiv:2311.08105): K local steps per worker, then one outer step on the mean
difference.

    python examples/lab/local_sgd.py

A train step is a function and a worker's state a value, so one `step` serves all
workers: a worker is an item of a list. Each worker makes K AdamW steps on its own data.
Then the *outer* optimizer, SGD with Nesterov momentum, takes the mean change of the
workers' parameters as a gradient, and all workers continue from the result; each keeps
its AdamW state. Plain data parallelism sends the gradients in every step; this sends
the parameters every K steps.

The outer step works on flat buffers, element by element: if each worker were a ZeRO-3
job, it would work on shards.
"""

import torch
from matplotlib.figure import Figure
from optree import tree_map
from setting import HELD_OUT, SIZE, config, draw_batch, make_model, parse, random_batch, save

import fzero

WORKERS, NUM_ROWS, EVERY = 4, 16, 16
# the paper's 0.9 is for K in the hundreds
INNER_LR, OUTER = 0.01, fzero.sgd(0.7, momentum=0.5, nesterov=True)
Curve = list[tuple[int, float, float]]
"""After every 16 steps: (step, megabytes that each worker has sent, loss on held-out
text).
"""


def megabytes() -> float:
    """The traffic of a worker for one mean over workers, of the gradients or of the
    parameters.
    """
    plan = fzero.plan(make_model(), config(stage=0, lr=INNER_LR), world_size=WORKERS)
    return 4 * sum(plan.sent_per_step.values()) / 1e6


def together(num_steps: int, held_out: tuple[torch.Tensor, ...]) -> Curve:
    """Plain data parallelism: the workers are the ranks of one job."""
    ranks = fzero.simulate(
        fzero.make_train_step(make_model(), config(stage=0, lr=INNER_LR)), WORKERS
    )
    held_out = tuple(x.expand(WORKERS, *x.shape) for x in held_out)
    state, curve = ranks.init(), []
    for index in range(num_steps):
        state, _ = ranks(state, draw_batch(index, num_rows=NUM_ROWS, world_size=WORKERS))
        if (index + 1) % EVERY == 0:
            sent = (index + 1) * megabytes()
            curve.append((index + 1, sent, ranks.evaluate(state, held_out).item()))
    return curve


def apart(num_steps: int, held_out: tuple[torch.Tensor, ...], *, inner_steps: int) -> Curve:
    """Local steps and outer steps."""
    step = fzero.make_train_step(make_model(), config(stage=0, lr=INNER_LR))
    workers = [step.init() for _ in range(WORKERS)]
    start = tree_map(torch.clone, workers[0].params)
    momentum = {key: OUTER.init(buffer) for key, buffer in start.items()}
    curve = []
    for index in range(num_steps):
        tokens_WBT, targets_WBT = draw_batch(index, num_rows=NUM_ROWS, world_size=WORKERS)
        workers = [
            step(*given)[0] for given in zip(workers, zip(tokens_WBT, targets_WBT), strict=True)
        ]
        if (index + 1) % inner_steps == 0:
            way = tree_map(
                lambda old, *new: old - sum(new) / WORKERS,
                start,
                *[worker.params for worker in workers],
            )
            start, momentum = fzero.optimizer_update(OUTER, start, way, momentum)
            workers = [worker._replace(params=tree_map(torch.clone, start)) for worker in workers]
        if (index + 1) % EVERY == 0:
            sent = (index + 1) // inner_steps * megabytes()
            curve.append((index + 1, sent, step.evaluate(workers[0], held_out).item()))
    return curve


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], steps=192)
    if options.steps < EVERY:
        raise SystemExit(
            f"--steps: must be at least {EVERY}, got {options.steps}; the loss is looked at that "
            f"often"
        )
    held_out = random_batch(HELD_OUT, context=SIZE.context, batch_size=64, seed=0, step=0, rank=0)
    curves = {"data parallel": together(options.steps, held_out)}
    for inner_steps in (4, 16):
        curves[f"K = {inner_steps}"] = apart(options.steps, held_out, inner_steps=inner_steps)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_bytes, by_step = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        steps, sent, losses = zip(*curve, strict=True)
        print(
            f"{name}: loss {losses[-1]:.3f} after {steps[-1]} steps, {sent[-1]:.2f} MB sent by "
            f"each worker"
        )
        by_bytes.plot(sent, losses, "o-", label=name)
        by_step.plot(steps, losses, "o-", label=name)
    by_bytes.set(
        xscale="log",
        xlabel="MB that each worker has sent",
        ylabel="loss on held-out text (nats per byte)",
    )
    by_bytes.set_title(f"{WORKERS} workers that talk every K steps", loc="left")
    by_step.set(xlabel="step")
    by_step.legend(frameon=False)
    for axes in (by_bytes, by_step):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, options.out, "local_sgd.png")


if __name__ == "__main__":
    main()
