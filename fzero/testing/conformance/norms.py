"""Laws: gradients are clipped by their global norm, which is reported; schedules; groups."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from fzero.testing.conformance.averages import ADAMW, SGD, TOKENS, masked
from fzero.testing.conformance.laws import (
    TORCH,
    Lab,
    Plain,
    check_bits,
    check_close,
    check_near,
    law,
)
from fzero.testing.conformance.models import Net, TiedNet
from fzero.testing.conformance.training import Setup, mse

CLIP = f"torch.nn.utils.clip_grad_norm_, {TORCH}"
RATE = f"torch.optim, How to adjust learning rate, {TORCH}"


def steep(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss whose gradient is far above 1."""
    return 20 * mse(model, batch)


CLIPPED = replace(SGD, loss=steep, clip=0.5)


@law("the norm is computed over all gradients together, as if in one vector", CLIP)
def clipped_by_the_global_norm(lab: Lab) -> None:
    trainer, plain = lab.check_plain(CLIPPED), Plain(CLIPPED)
    plain.step(lab.batches(0))
    assert plain.norms[0] > 5, "the law needs a large gradient"
    del trainer


@law("a gradient below the largest norm is not scaled", CLIP)
def a_small_gradient_is_not_clipped(lab: Lab) -> None:
    lab.check_plain(replace(SGD, clip=1000.0))


def check_norm(lab: Lab, setup: Setup) -> None:
    """Raises unless the norms of three updates are those of the plain loop."""
    trainer, plain = lab.make(setup), Plain(setup)
    for index in range(3):
        batches = lab.batches(index, micro_steps=setup.micro_steps)
        trainer.step(batches)
        plain.step(batches)
        check_close(trainer.norm().grad_norm, plain.norms[-1], f"the norm of update {index}")


@law("the reported norm is that of the mean gradient", CLIP)
def reported_norm(lab: Lab) -> None:
    check_norm(lab, SGD)


@law("the reported norm is that before clipping", CLIP)
def reported_norm_of_a_clipped_gradient(lab: Lab) -> None:
    check_norm(lab, CLIPPED)


@law("the reported norm is that of the accumulated gradient", CLIP)
def reported_norm_of_micro_steps(lab: Lab) -> None:
    check_norm(lab, replace(CLIPPED, micro_steps=2))


@law("a shared parameter has one gradient, which counts once", CLIP)
def reported_norm_of_tied_weights(lab: Lab) -> None:
    check_norm(lab, replace(CLIPPED, model=TiedNet))


@law("the norm is that of the mean over tokens", CLIP)
def reported_norm_of_tokens(lab: Lab) -> None:
    trainer, plain = lab.make(TOKENS), Plain(TOKENS)
    batches = masked(lab, 0, [[4], [1]])
    trainer.step(batches)
    plain.step(batches)
    check_close(trainer.norm().grad_norm, plain.norms[-1], "the norm")


@law("error_if_nonfinite: a gradient that is not finite is an error, or is skipped", CLIP)
def a_nan_on_one_rank_reaches_no_weight(lab: Lab) -> None:
    trainer = lab.trained(CLIPPED, range(2))
    before = trainer.weights()
    batches = lab.batches(2)
    batches[-1][-1][0, 0] = float("nan")
    try:
        trainer.step(batches)
    except (RuntimeError, FloatingPointError):
        return  # every rank: a rank alone would leave the others waiting
    check_bits(trainer.weights(), before, "those before the step")


def sum_of_outputs(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss with the same gradient in every update for the last bias: 1."""
    y: Tensor = model(batch)
    return y.float().sum() / len(batch)


def halved(n: int) -> float:
    return 0.5**n


@law("update n is made with the rate of n updates before it", RATE)
def rate_of_update_n(lab: Lab) -> None:
    setup = Setup(Net, sum_of_outputs, options=(("lr", 0.1),), rates=halved)
    trainer = lab.make(setup)
    before = trainer.weights()["outlet.bias"]
    for index, moved in enumerate((0.1, 0.15, 0.175)):
        trainer.step(lab.batches(index))
        expected = {"outlet.bias": before - moved}
        check_near(trainer.weights(), expected, f"the bias after the rates of {index + 1} updates")


@law("a schedule counts updates, not micro-steps", "deepspeed.ai, Learning Rate Scheduler")
def rate_counts_no_micro_steps(lab: Lab) -> None:
    lab.check_plain(replace(ADAMW, rates=halved, micro_steps=3))


@law("options of a parameter group override those of the optimizer", f"torch.optim, {TORCH}")
def parameter_groups(lab: Lab) -> None:
    groups = (("bias", (("weight_decay", 0.0), ("lr", 0.02))),)
    lab.check_plain(replace(ADAMW, groups=groups))


@law("a schedule multiplies the rate of each group", RATE)
def rates_of_groups(lab: Lab) -> None:
    groups = (("blocks", (("lr", 0.03),)),)
    lab.check_plain(replace(ADAMW, groups=groups, rates=halved))
