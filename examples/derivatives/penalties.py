"""Gradient penalties of a critic: R1 (Mescheder et al. 2018, arXiv:1801.04406) and
WGAN-GP (Gulrajani et al. 2017, arXiv:1704.00028).

    fzero --num_procs 2 examples/derivatives/penalties.py

The loss holds the gradient of the critic by its input, so its own gradient is a second
derivative: a backward through a backward, in which stage 3 gathers each unit again.
"""

from typing import NamedTuple

import runs
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Batch(NamedTuple):
    real_BD: Tensor
    fake_BD: Tensor
    mix_B1: Tensor  # uniform in [0, 1], for WGAN-GP


def gradient_of_inputs(critic: nn.Module, x_BD: Tensor) -> Tensor:
    """The gradient of each sample's score by its input."""
    x_BD = x_BD.clone().requires_grad_()
    (grad_BD,) = torch.autograd.grad(critic(x_BD).sum(), x_BD, create_graph=True)
    return grad_BD


def r1(critic: nn.Module, batch: Batch) -> Tensor:
    """The logistic loss and γ/2 · E‖∇D(real)‖²."""
    loss = F.softplus(-critic(batch.real_BD)).mean() + F.softplus(critic(batch.fake_BD)).mean()
    return loss + 5.0 * gradient_of_inputs(critic, batch.real_BD).square().sum(1).mean()


def wgan_gp(critic: nn.Module, batch: Batch) -> Tensor:
    """The Wasserstein loss and λ · E(‖∇D(mixed)‖ - 1)²."""
    loss = critic(batch.fake_BD).mean() - critic(batch.real_BD).mean()
    mixed_BD = torch.lerp(batch.real_BD, batch.fake_BD, batch.mix_B1)
    length_B = gradient_of_inputs(critic, mixed_BD).norm(dim=1)
    return loss + 10.0 * (length_B - 1).square().mean()


def critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1)
    )


def batches(num: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    real = torch.tensor([1.0, -1.0])
    return [
        Batch(real + 0.3 * torch.randn(64, 2), torch.randn(64, 2), torch.rand(64, 1))
        for _ in range(num)
    ]


RECIPES = {
    "R1": lambda: (critic(), r1, batches()),
    "WGAN-GP": lambda: (critic(), wgan_gp, batches()),
}

if __name__ == "__main__":
    for name, make in RECIPES.items():
        runs.show(name, make)
