"""Laws of mixed precision."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fzero.testing.conformance.averages import ADAMW
from fzero.testing.conformance.laws import (
    MIXED,
    TORCH,
    Broken,
    Lab,
    Plain,
    check_bits,
    check_close,
    check_moved,
    check_near,
    law,
)
from fzero.testing.conformance.models import OUTPUTS, Net
from fzero.testing.conformance.norms import halved
from fzero.testing.conformance.training import Batches, Setup

AMP = f"torch.amp.GradScaler, {TORCH}"
FP16 = replace(ADAMW, precision="fp16", scale_power=6)


def overflowing(lab: Lab, index: int) -> Batches:
    """Batches of which one row of the last rank is too large for fp16."""
    batches = lab.batches(index)
    batches[-1][-1][0, 0] = 1e30
    return batches


@law("small updates add up in an fp32 master copy of the weights (§3.1)", MIXED)
def small_updates_add_up(lab: Lab) -> None:
    setup = Setup(Net, sum_of_biases, options=(("lr", 2.0**-12),), precision="bf16")
    trainer = lab.make(setup)
    before = trainer.weights()["outlet.bias"]
    for index in range(8):  # each is far below half of bf16's distance of two weights
        trainer.step(lab.batches(index))
    expected = {"outlet.bias": before - 8 * 2.0**-12}
    check_near(trainer.weights(), expected, "the bias after 8 small updates", rounding=1e-6)


def sum_of_biases(model: nn.Module, batch: Tensor) -> Tensor:
    """Its gradient for the last bias is 1, exactly, in 16 bits too."""
    y: Tensor = model(batch)
    return y.float().sum() / len(batch)


@law("16-bit training follows that in fp32 within its rounding (§4)", MIXED)
def bf16_follows_fp32(lab: Lab) -> None:
    narrow = lab.trained(replace(ADAMW, precision="bf16"), range(5)).weights()
    wide = lab.trained(ADAMW, range(5)).weights()
    # 5 updates of lr 0.01, whose gradients differ by some of bf16's 2**-8
    check_near(narrow, wide, "the weights in fp32", rounding=0.01)
    torch.manual_seed(0)
    check_moved({name: p.detach() for name, p in Net().named_parameters()}, narrow)


@law("losses are scaled so that small gradients stay in fp16's range (§3.2)", MIXED)
def loss_scaling_keeps_small_gradients(lab: Lab) -> None:
    setup = Setup(Net, tiny, options=(("lr", 1e5),), precision="fp16", scale_power=16)
    trainer = lab.make(setup)
    before = trainer.weights()
    trainer.step(lab.batches(0))
    moved = (trainer.weights()["outlet.bias"] - before["outlet.bias"]).abs().max().item()
    check_close(moved, 1e5 * 2.0**-26, "a move of lr times a gradient of 2**-26", rounding=1e-5)


def tiny(model: nn.Module, batch: Tensor) -> Tensor:
    """Its gradient for each last bias is 2**-26; fp16's smallest number is 2**-24."""
    y: Tensor = model(batch)
    return y.float().sum() / len(batch) * 2.0**-26


@law("an update with an overflow on any rank is skipped", AMP)
def overflow_leaves_every_bit(lab: Lab) -> None:
    trainer = lab.trained(FP16, range(2))
    before = trainer.weights()
    trainer.step(overflowing(lab, 2))
    check_bits(trainer.weights(), before, "those before the overflow")


@law("a skipped update leaves no trace in the moments either", AMP)
def training_after_an_overflow(lab: Lab) -> None:
    trainer = lab.make(FP16)
    for index in range(3):
        trainer.step(lab.batches(index))
        if index == 0:
            trainer.step(overflowing(lab, 7))
    expected = lab.trained(FP16, range(3)).weights()
    # the loss scale is another power of two: fp16 rounds subnormal numbers otherwise
    check_near(trainer.weights(), expected, "those of training without it", rounding=2e-4)


@law("the scale is halved by an overflow, and doubles every growth_interval updates", AMP)
def history_of_the_loss_scale(lab: Lab) -> None:
    trainer = lab.make(replace(FP16, scale_window=3))
    found = [64.0]
    for index in range(8):
        trainer.step(overflowing(lab, index) if index == 7 else lab.batches(index))
        found.append(trainer.norm().loss_scale)
    # some count the updates after the first one
    histories = ([64.0] * skew + [64.0] * 3 + [128.0] * 3 + [256.0] * 3 for skew in (0, 1))
    if all(found != [*history[:8], history[7] / 2] for history in histories):
        raise Broken(f"the scales are {found}, must double every 3 updates, and be halved at last")


@law("gradients are unscaled by the scale that their loss was multiplied by", AMP)
def the_scale_does_not_change_the_update(lab: Lab) -> None:
    setup = replace(FP16, scale_window=1, scale_power=4)
    grown = lab.trained(replace(setup, optimizer="SGD", options=(("lr", 0.1),)), range(4))
    still = replace(setup, scale_window=1000, optimizer="SGD", options=(("lr", 0.1),))
    check_near(
        grown.weights(), lab.trained(still, range(4)).weights(), "those of one scale", rounding=2e-3
    )


@law("unscale_ before clipping: the norm is that of the true gradient", AMP)
def clipping_under_a_loss_scale(lab: Lab) -> None:
    setup = replace(FP16, clip=0.05, optimizer="SGD", options=(("lr", 0.5),))
    trainer, plain = lab.make(setup), Plain(setup)
    for index in range(3):
        trainer.step(lab.batches(index))
        plain.step(lab.batches(index))
        check_close(trainer.norm().grad_norm, plain.norms[-1], "the norm", rounding=0.01)
    check_near(trainer.weights(), plain.weights(), "those of clipping in fp32", rounding=2e-3)


@law("a skipped update does not advance the schedule", "deepspeed.ai, FP16 training options")
def overflow_keeps_the_rate(lab: Lab) -> None:
    setup = replace(FP16, loss=sum_of_biases, rates=halved, optimizer="SGD", options=(("lr", 0.1),))
    trainer = lab.make(setup)
    before = trainer.weights()["outlet.bias"]
    for index in range(3):
        trainer.step(overflowing(lab, index) if index == 1 else lab.batches(index))
    check_near(trainer.weights(), {"outlet.bias": before - 0.15}, "the bias after 2 updates")


@law("micro-steps accumulate in fp32", "deepspeed.ai/docs/config-json, data_types.grad_accum_dtype")
def accumulation_in_fp32(lab: Lab) -> None:
    setup = Setup(Net, large_then_small, options=(("lr", 1.0),), precision="bf16", micro_steps=8)
    trainer = lab.make(setup)
    before = trainer.weights()["outlet.bias"]
    batches = lab.batches(0, micro_steps=8)
    for own in batches:
        for micro, batch in enumerate(own):
            batch[:, 0] = 100.0 if micro == 0 else 0.25
    trainer.step(batches)
    # bf16 has 8 bits: added to 100 one by one, each 0.25 would be lost
    expected = {"outlet.bias": before - (100 + 7 * 0.25) / 8}
    check_near(trainer.weights(), expected, "the bias after a sum in fp32", rounding=1e-5)


def large_then_small(model: nn.Module, batch: Tensor) -> Tensor:
    """Its gradient for each last bias is the first feature."""
    y: Tensor = model(batch * 0.0)
    return (y.float() * batch[:, :1]).mean(0)[:OUTPUTS].sum()
