"""1-bit Adam (arXiv:2102.02888): workers send the signs of the momentum, with error
feedback.

    python examples/lab/one_bit_adam.py

After some steps Adam's second moment hardly changes. It is then frozen, and the rest is
SGD with momentum in a fixed metric. That is linear, so a later step can correct an
earlier error. Each worker adds its own gradient to the common momentum and sends
*signs*, with a scale for each block; the worker that sums a part of them does the same.
Both add the error of this step to the values of the next one.

This page defines the codec, in 20 lines. `fzero.comms.compressed` makes a comm hook of
it, `fzero.comms.error_feedback` keeps the error, and `check_hook` checks the laws
of comm hooks. Without feedback, in the third curve, training with the same bits is
slower.

Shape letters: W workers (the leading dimension), P elements of all parameters, B bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops import rearrange
from matplotlib.figure import Figure
from setting import draw_batch, make_model, parse, save, smooth
from torch import Tensor
from torch.nn.functional import pad

import fzero
from fzero.testing import check_hook
from sharding import FlatLayout
from sharding.views import flatten, unflatten

WORKERS, NUM_ROWS, BLOCK = 4, 16, 64
LR, BETA_1, BETA_2 = 0.004, 0.9, 0.97
RANKS = fzero.comms.Stacked(WORKERS)  # all workers in this process
AXIS = RANKS.axis()  # an axis of processes works as well
POWERS = 2 ** torch.arange(8, dtype=torch.uint8)


def one_bit(block: int) -> fzero.comms.Codec:
    """The sign of each element, eight to a byte, times the mean size of its block."""

    def scales_of(x: Tensor) -> Tensor:
        blocks = pad(x.float().abs(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block)).sum(-1)
        counts = (
            pad(torch.ones(x.shape[-1]), (0, -x.shape[-1] % block))
            .unflatten(-1, (-1, block))
            .sum(-1)
        )
        return blocks / counts

    def encode(x: Tensor) -> Tensor:
        bits = rearrange(
            pad(x < 0, (0, -x.shape[-1] % 8)), "... (bytes bit) -> ... bytes bit", bit=8
        )
        signs = (bits * POWERS).sum(-1, dtype=torch.uint8)
        return torch.cat([signs, scales_of(x).contiguous().view(torch.uint8)], dim=-1)

    def decode(code: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if not numel:
            return code.to(dtype)
        length = -(-numel // 8)
        is_negative = (code[..., :length, None] & POWERS).flatten(-2)[..., :numel] != 0
        sizes = (
            code[..., length:]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.float32)
            .repeat_interleave(block, -1)[..., :numel]
        )
        return torch.where(is_negative, -sizes, sizes).to(dtype)

    def bound(x: Tensor) -> Tensor:
        return (
            x.double().abs() - scales_of(x).repeat_interleave(block, -1)[..., : x.shape[-1]]
        ).abs() * (1 + 2**-20)

    return fzero.comms.Codec(
        f"one bit({block})", lambda n: -(-n // 8) + 4 * -(-n // block), encode, decode, bound
    )


def gradients_of(
    batch_W: tuple[Tensor, ...], model: torch.nn.Module, layout: FlatLayout
) -> Callable[[Tensor], Any]:
    """A function from the parameters (P) to the mean loss of all workers and the
    gradient of each (W, P).
    """

    def of_one(params_P: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, unflatten(params_P, layout), batch)
        return loss

    def of_all(params_P: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [
            torch.func.grad_and_value(of_one)(params_P, batch)
            for batch in zip(*batch_W, strict=True)
        ]
        grads, losses = zip(*pairs, strict=True)
        return torch.stack(losses).mean(), torch.stack(grads)

    return of_all


def mean_over(
    hook: fzero.comms.CommHook, x_WP: Tensor, states: tuple[Any, Any]
) -> tuple[Tensor, tuple[Any, Any]]:
    """The mean over workers: each worker sums its shard (reduce-scatter), then all
    gather the shards of the mean.
    """

    def of_one(x_P: Tensor, states: tuple[Any, Any]) -> tuple[Tensor, tuple[Any, Any]]:
        sum_S, of_workers = hook.reduce_scatter(x_P, AXIS, states[0])
        mean_P, of_parts = hook.gather(sum_S / WORKERS, AXIS, states[1])
        return mean_P, (of_workers, of_parts)

    mean_WP, states = RANKS.map(of_one)(x_WP, states)
    return mean_WP[0], states  # the same on every worker


def train(
    num_steps: int, num_exact: int, hook: fzero.comms.CommHook
) -> tuple[list[float], list[float]]:
    """The loss after every step, and the megabytes that a worker has sent; `hook` is
    used from step `num_exact` on.
    """
    model = make_model()
    params = {name: param.detach() for name, param in model.named_parameters()}
    shapes = tuple(tuple(param.shape) for param in params.values())
    layout = FlatLayout(tuple(params), shapes, WORKERS, multiple_of=BLOCK)
    params_P = flatten(params, layout)
    m_P, v_P, losses, sent = torch.zeros_like(params_P), torch.zeros_like(params_P), [], [0.0]
    shard_numel, now = layout.partition.shard_numel, fzero.comms.exact()
    states: tuple[Any, Any] = (None, None)
    for index in range(num_steps):
        if index == num_exact:
            now = hook
            states = (
                hook.init(torch.zeros(WORKERS, params_P.numel())),
                hook.init(torch.zeros(WORKERS, shard_numel)),
            )
            # signs also move elements that hardly ever had a gradient
            v_P = v_P.maximum(v_P.mean() / 10)
        batch_W = draw_batch(index, num_rows=NUM_ROWS, world_size=WORKERS)
        loss, grads_WP = gradients_of(batch_W, model, layout)(params_P)
        m_P, states = mean_over(now, BETA_1 * m_P + (1 - BETA_1) * grads_WP, states)
        if index < num_exact:
            grad_P = grads_WP.mean(0)  # already sent as a part of m_P
            v_P = BETA_2 * v_P + (1 - BETA_2) * grad_P**2
        m_scale, v_scale = 1 - BETA_1 ** (index + 1), 1 - BETA_2 ** min(index + 1, num_exact)
        params_P = params_P - LR * (m_P / m_scale) / ((v_P / v_scale).sqrt() + 1e-8)
        losses.append(loss.item())
        sent.append(sent[-1] + 2 * (WORKERS - 1) * now.nbytes(shard_numel, 4) / 1e6)
    return losses, sent[1:]


def main() -> None:
    options = parse(__doc__.partition("\n\n")[0], steps=200)
    signs = fzero.comms.compressed(one_bit(BLOCK))
    check_hook(signs, max_error=1.0)  # the error of an element is at most the largest element
    print("the codec keeps the laws of collectives")
    num_exact = max(1, options.steps // 4)
    runs: dict[str, Callable[[], tuple[list[float], list[float]]]] = {
        "Adam": partial(train, options.steps, options.steps, fzero.comms.exact()),
        "1-bit Adam": partial(train, options.steps, num_exact, fzero.comms.error_feedback(signs)),
        "1-bit without feedback": partial(train, options.steps, num_exact, signs),
    }
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        losses, sent = run()
        print(
            f"{name}: loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}, {sent[-1]:.2f} MB sent "
            f"by each worker"
        )
        steps, means = smooth(losses, width=10)
        by_step.plot(steps, means, label=name)
        by_bytes.plot([sent[step - 1] for step in steps], means, label=name)
    by_step.axvline(num_exact, color="0.7", linestyle="--", label="from here on one bit")
    by_step.set(xlabel="step", ylabel="training loss (nats per byte), mean of 10 steps")
    by_step.set_title(f"{WORKERS} workers that send signs", loc="left")
    by_step.legend(frameon=False)
    by_bytes.set(xlabel="MB that each worker has sent")
    for axes in (by_step, by_bytes):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, options.out, "one_bit_adam.png")


if __name__ == "__main__":
    main()
