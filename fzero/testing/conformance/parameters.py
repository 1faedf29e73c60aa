"""Laws of kinds of parameters and buffers: each is trained as in a plain loop."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fzero.testing.conformance.averages import ADAMW, SGD
from fzero.testing.conformance.laws import (
    DDP,
    TORCH,
    Broken,
    Lab,
    Plain,
    check_bits,
    check_moved,
    check_near,
    law,
)
from fzero.testing.conformance.models import (
    Around,
    Experts,
    Net,
    Normed,
    Repeated,
    TiedNet,
)
from fzero.testing.conformance.training import Setup

MODULE = f"torch.nn.Module, {TORCH}"
FREEZING = f"Autograd mechanics, Setting requires_grad, {TORCH}"
PARAMETER = f"torch.nn.Parameter: a kind of Tensor that is a module parameter, {TORCH}"


def check_kind(lab: Lab, model: type[nn.Module], *moving: str, setup: Setup = SGD) -> None:
    """Raises unless such a model trains as in the plain loop, and these tensors move."""
    torch.manual_seed(0)
    before = {name: p.detach().clone() for name, p in model().named_parameters()}
    after = lab.check_plain(replace(setup, model=model)).weights()
    check_moved(before, after, moving)


@law("two names of one parameter are one parameter, with the sum of both gradients", MODULE)
def tied_weights(lab: Lab) -> None:
    check_kind(lab, TiedNet, "embed.weight")


@law("the same with moments", MODULE)
def tied_weights_with_adamw(lab: Lab) -> None:
    check_kind(lab, TiedNet, "embed.weight", setup=ADAMW)


@law("a module that is called several times collects all its gradients", MODULE)
def a_block_that_is_called_three_times(lab: Lab) -> None:
    check_kind(lab, Repeated, "blocks.0.weight")


class Frozen(Net):
    """A block and a bias are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.outlet.bias.requires_grad_(False)


@law("frozen parameters do not change: no update, no decay", FREEZING)
def frozen_parameters(lab: Lab) -> None:
    check_kind(lab, Frozen, "blocks.1.weight", setup=ADAMW)
    torch.manual_seed(0)
    first = dict(Frozen().named_parameters())
    names = ("blocks.0.weight", "blocks.0.bias", "outlet.bias")
    found = lab.trained(replace(ADAMW, model=Frozen), range(2)).weights()
    check_bits(found, {name: first[name].detach() for name in names}, "the first ones")


@law("parameters are unfrozen in mid-training: a new job loads what the old one saved", FREEZING)
def thawed_parameters(lab: Lab) -> None:
    frozen, thawed = replace(SGD, model=Frozen), SGD
    lab.trained(frozen, range(2)).save(lab.folder / "saved")
    trainer = lab.make(thawed)
    trainer.load(lab.folder / "saved")
    plain = Plain(frozen)
    for index in range(2):
        plain.step(lab.batches(index))
    moments = dict(plain.optimizer.state)
    plain.model.requires_grad_(True)
    plain.setup = thawed
    plain.refresh()
    plain.optimizer.state.update(moments)
    for index in range(2, 4):
        plain.step(lab.batches(index))
    found = lab.trained(thawed, range(2, 4), trainer).weights()
    check_near(found, plain.weights(), "those of a plain loop that unfreezes")


class Unused(Around):
    """A parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__(torch.ones(3))

    def used(self) -> Tensor:
        return self.extra.new_zeros(())


@law("find_unused_parameters: parameters without a gradient are left as they are", DDP)
def unused_parameters(lab: Lab) -> None:
    setup = replace(SGD, some_unused=True)
    check_kind(lab, Unused, "net.inlet.weight", setup=setup)


def rows_of_experts(lab: Lab, index: int) -> list[list[Tensor]]:
    """Of the last rank, half the rows reach the second expert; of others, none."""
    batches = lab.batches(index)
    batches[-1][0][::2, 0] += 20
    return [list(own) for own in batches]


def check_experts(lab: Lab, setup: Setup) -> None:
    trainer, plain = lab.make(setup), Plain(setup)
    for index in range(3):
        trainer.step(rows_of_experts(lab, index))
        plain.step(rows_of_experts(lab, index))
    check_near(trainer.weights(), plain.weights(), "those of the plain loop")


@law("a parameter that one rank does not use has a gradient of zero there", DDP)
def experts_unused_on_some_ranks(lab: Lab) -> None:
    check_experts(lab, replace(SGD, model=Experts, some_unused=True))


@law("the same with moments and clipping", DDP)
def experts_with_adamw_and_clipping(lab: Lab) -> None:
    check_experts(lab, replace(ADAMW, model=Experts, some_unused=True, clip=0.1))


class ZeroSized(Around):
    """A parameter of shape (0, 3)."""

    def __init__(self) -> None:
        super().__init__(torch.ones(0, 3))

    def used(self) -> Tensor:
        return self.extra.sum()


@law("a parameter may have no elements", PARAMETER)
def zero_sized_parameters(lab: Lab) -> None:
    check_kind(lab, ZeroSized)


class Scalar(Around):
    """A 0-d parameter, as a temperature is."""

    def __init__(self) -> None:
        super().__init__(torch.tensor(0.5))

    def used(self) -> Tensor:
        return self.extra.square().mean()


@law("a parameter may have no dimension", PARAMETER)
def zero_dimensional_parameters(lab: Lab) -> None:
    check_kind(lab, Scalar, "extra")


class OneElement(Around):
    """A parameter with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__(torch.tensor([0.5]))

    def used(self) -> Tensor:
        return self.extra.square().mean()


@law("a parameter may have fewer elements than there are ranks", PARAMETER)
def parameters_smaller_than_the_ranks(lab: Lab) -> None:
    check_kind(lab, OneElement, "extra", setup=ADAMW)


class NonContiguous(Around):
    """A transposed parameter."""

    def __init__(self) -> None:
        super().__init__(torch.arange(6.0).reshape(2, 3).t() / 6)

    def used(self) -> Tensor:
        return (self.extra.float() @ self.extra.float().t())[0].sum() / 9


@law("a parameter may have any strides", PARAMETER)
def non_contiguous_parameters(lab: Lab) -> None:
    check_kind(lab, NonContiguous, "extra")


class Complex(Around):
    """A complex parameter, as layers in Fourier space have."""

    def __init__(self) -> None:
        super().__init__(torch.tensor([0.5 + 0.25j, 0.1 - 0.3j, 1j]))

    def used(self) -> Tensor:
        return (self.extra * (1 - 2j)).real.square().mean()


@law(
    "gradients of complex parameters are those of their real and imaginary parts",
    f"Complex numbers, {TORCH}",
)
def complex_parameters(lab: Lab) -> None:
    check_kind(lab, Complex, "extra")


class Double(Around):
    """One parameter of fp64 in a model of fp32."""

    def __init__(self) -> None:
        super().__init__(torch.linspace(0.1, 0.9, 5, dtype=torch.float64))

    def used(self) -> Tensor:
        return self.extra.square().mean()


@law("parameters of one model may have several dtypes", PARAMETER)
def mixed_dtypes(lab: Lab) -> None:
    check_kind(lab, Double, "extra")


@law("buffers that a forward updates stay in sync across ranks (broadcast_buffers)", DDP)
def buffers_equal_on_all_ranks(lab: Lab) -> None:
    # a forward sends them, so those of an evaluation's end are in sync
    trainer = lab.trained(replace(SGD, model=Normed), range(3))
    trainer.step(lab.batches(3), update=False)
    own = {name: x for name, x in trainer.weights().items() if "running" in name}
    if len(own) != 2:
        raise Broken(f"the buffers are {sorted(own)}, must be the mean and the variance")
    torch.save(own, lab.folder / f"{lab.rank}.pt")
    for other in lab.others():
        check_bits(own, torch.load(lab.folder / f"{other}.pt"), f"those of rank {other}")


@law("a buffer is part of the state dict, and is restored", MODULE)
def buffers_in_a_checkpoint(lab: Lab) -> None:
    setup = replace(SGD, model=Normed)
    trainer = lab.trained(setup, range(3))
    trainer.step(lab.batches(3), update=False)
    trainer.save(lab.folder / "saved")
    again = lab.make(setup)
    again.load(lab.folder / "saved")
    means = {name: x for name, x in trainer.weights().items() if "running" in name}
    torch.save(means, lab.folder / f"means_{lab.rank}.pt")
    lab.others()
    found = again.weights()
    saved = [torch.load(path) for path in sorted(lab.folder.glob("means_*.pt"))]
    if not any(all(torch.equal(found[name], x) for name, x in one.items()) for one in saved):
        raise Broken("the loaded buffers are those of no rank that saved")
