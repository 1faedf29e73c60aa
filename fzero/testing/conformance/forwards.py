"""Laws of what a loss may do with a model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fzero.testing.conformance.averages import ADAMW, SGD
from fzero.testing.conformance.laws import (
    DEEPSPEED,
    TORCH,
    Lab,
    Plain,
    check_bits,
    check_close,
    check_near,
    law,
)
from fzero.testing.conformance.models import OUTPUTS, Body, Checkpointed, Dropped, ReEntrant
from fzero.testing.conformance.training import Setup, mse

CHECKPOINT = f"torch.utils.checkpoint, {TORCH}"


def siamese(model: nn.Module, batch: Tensor) -> Tensor:
    """Two forwards in one loss, as contrastive losses have."""
    y, z = model(batch), model(batch.flip(0))
    found: Tensor = mse(model, batch) - 0.1 * (y - z).square().mean()
    return found


@law(
    "a loss may call the model several times", "Hadsell et al., Dimensionality Reduction, CVPR 2006"
)
def several_forwards_in_one_loss(lab: Lab) -> None:
    lab.check_plain(replace(SGD, loss=siamese))


def penalized(model: nn.Module, batch: Tensor) -> Tensor:
    """WGAN-GP's loss: the gradient for the inputs is part of it."""
    x = batch.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    found: Tensor = y.mean() + (grad.norm(dim=1) - 1).square().mean()
    return found


@law("a gradient penalty is differentiated, too (§4)", "Gulrajani et al., arXiv:1704.00028")
def gradient_penalty(lab: Lab) -> None:
    lab.check_plain(replace(SGD, loss=penalized))


def tangent(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss on the model's directional derivative, as MeanFlow has."""
    y, dy, *_ = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
    found: Tensor = (y - 0.1 * dy).square().mean()
    return found


@law(
    "a loss may contain a directional derivative (algorithm 1)",
    "Geng et al., MeanFlow, arXiv:2505.13447",
)
def jvp_in_the_loss(lab: Lab) -> None:
    lab.check_plain(replace(SGD, loss=tangent))


@law("activation checkpointing changes no number (use_reentrant=False)", CHECKPOINT)
def checkpointing(lab: Lab) -> None:
    lab.check_plain(replace(SGD, model=Checkpointed))


@law("activation checkpointing changes no number (use_reentrant=True)", CHECKPOINT)
def checkpointing_with_re_entry(lab: Lab) -> None:
    lab.check_plain(replace(SGD, model=ReEntrant))


@law("the same with micro-steps", CHECKPOINT)
def checkpointing_of_micro_steps(lab: Lab) -> None:
    lab.check_plain(replace(SGD, model=ReEntrant, micro_steps=2))


@law("models of one job are trained each by its own loss", "Goodfellow et al., arXiv:1406.2661")
def two_models(lab: Lab) -> None:
    setups = (SGD, replace(ADAMW, loss=siamese))
    pairs = [(lab.make(setup), Plain(setup)) for setup in setups]
    for index in range(3):
        for trainer, loop in pairs:
            trainer.step(lab.batches(index))
            loop.step(lab.batches(index))
    for trainer, loop in pairs:
        check_near(trainer.weights(), loop.weights(), "those of its own plain loop")


@law("evaluation leaves no trace in training", f"torch.no_grad, torch.nn.Module.eval, {TORCH}")
def evaluation_leaves_no_trace(lab: Lab) -> None:
    setup = replace(ADAMW, model=Dropped)
    trainer = lab.make(setup)
    for index in range(4):
        trainer.step(lab.batches(index))
        trainer.step(lab.batches(9), update=False)
    expected = lab.trained(setup, range(4)).weights()
    check_bits(trainer.weights(), expected, "those of training alone")


@law("evaluation gives the mean loss over ranks, without dropout", f"torch.nn.Module.eval, {TORCH}")
def evaluation_gives_the_mean_loss(lab: Lab) -> None:
    setup = replace(SGD, model=Dropped)
    trainer = lab.make(setup)
    found = trainer.step(lab.batches(9), update=False)
    model = Plain(setup).model.eval()
    losses = [mse(model, batch).item() for own in lab.batches(9) for batch in own]
    check_close(found, sum(losses) / len(losses), "the loss")


def generated(model: nn.Module, batch: Tensor) -> Tensor:
    """Greedy decoding of four tokens: each output is the next input; their sum, weighted
    by place. In training the usual loss.
    """
    if torch.is_grad_enabled():
        return mse(model, batch)
    x, total = batch, torch.zeros(())
    for place in range(1, 5):
        tokens_B = model(x).argmax(1)
        x = torch.roll(x, 1, dims=1) + tokens_B[:, None] / OUTPUTS
        total = total + place * tokens_B.float().mean()
    return total


@law("a model in training generates as its weights say", f"{DEEPSPEED}, ZeRO-3 generation")
def generation(lab: Lab) -> None:
    setup = replace(SGD, loss=generated)
    trainer = lab.trained(setup, range(3))
    found = trainer.step(lab.batches(9), update=False)
    model = Plain(setup, trainer.weights()).model.eval()
    with torch.no_grad():
        own = [generated(model, batch).item() for own in lab.batches(9) for batch in own]
    check_close(found, sum(own) / len(own), "the weighted sum of tokens")


class LayerDrop(Body):
    """Skips its second block where the first feature of the first row says so."""

    def forward(self, x_BF: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x_BF))
        x = torch.tanh(self.blocks[0](x))
        if x_BF[0, 0] < 50:
            x = torch.tanh(self.blocks[1](x))
        y: Tensor = self.outlet(x)
        return y


@law("a block may be skipped in some updates (§3.2)", "Fan et al., LayerDrop, arXiv:1909.11556")
def a_block_that_is_skipped_in_some_updates(lab: Lab) -> None:
    setup = Setup(LayerDrop, some_unused=True)
    trainer, plain = lab.make(setup), Plain(setup)
    for index in range(4):
        batches = lab.batches(index)
        for own in batches:
            own[0][:, 0] += 100 * (index % 2)
        trainer.step(batches)
        plain.step(batches)
    check_near(trainer.weights(), plain.weights(), "those of the plain loop")


@law(
    "rows of one batch may have another size in the next update",
    f"torch.utils.data, drop_last, {TORCH}",
)
def batches_of_several_sizes(lab: Lab) -> None:
    trainer, plain = lab.make(SGD), Plain(SGD)
    for index, rows in enumerate((4, 2, 5)):
        trainer.step(lab.batches(index, rows=rows))
        plain.step(lab.batches(index, rows=rows))
    check_near(trainer.weights(), plain.weights(), "those of the plain loop")


def no_grad_first(model: nn.Module, batch: Tensor) -> Tensor:
    """A teacher's forward without gradients, and the student's with them."""
    with torch.no_grad():
        target = model(batch.flip(0))
    found: Tensor = (model(batch) - target).square().mean() + 0.1 * mse(model, batch)
    return found


@law("a forward without gradients beside one with them", "Grill et al., BYOL, arXiv:2006.07733")
def a_forward_without_gradients(lab: Lab) -> None:
    lab.check_plain(replace(SGD, loss=no_grad_first))
