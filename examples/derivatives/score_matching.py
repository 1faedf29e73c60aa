"""Score matching: a model of ∇ log p, trained in two ways.

    fzero --num_procs 2 examples/derivatives/score_matching.py

Denoising (Vincent 2011): the score of data with noise of deviation σ is known, -ε/σ.
Here the score is the gradient of a scalar energy, so the loss holds a derivative.
Sliced (Song et al. 2019, arXiv:1905.07088): vᵀ ∇s(x) v + ‖s(x)‖²/2 for random v needs no
noise, and is the derivative of that derivative: in forward mode over reverse mode.
"""

from typing import NamedTuple

import runs
import torch
from torch import Tensor, nn

SIGMA = 0.5


class Batch(NamedTuple):
    data_BD: Tensor
    noise_BD: Tensor


def score(energy: nn.Module, x_BD: Tensor) -> Tensor:
    """-∇E(x) for each sample."""
    x_BD = x_BD.clone().requires_grad_()
    (grad_BD,) = torch.autograd.grad(energy(x_BD).sum(), x_BD, create_graph=True)
    return -grad_BD


def denoising(energy: nn.Module, batch: Batch) -> Tensor:
    found = score(energy, batch.data_BD + SIGMA * batch.noise_BD)
    return (SIGMA * found + batch.noise_BD).square().sum(1).mean()


def sliced(energy: nn.Module, batch: Batch) -> Tensor:
    x, v = batch.data_BD.clone().requires_grad_(), batch.noise_BD
    (grad,) = torch.autograd.grad(energy(x).sum(), x, create_graph=True)
    (curved,) = torch.autograd.grad((grad * v).sum(), x, create_graph=True)
    return (-(curved * v).sum(1) + 0.5 * grad.square().sum(1)).mean()


def energy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1)
    )


def batches(num: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    return [Batch(torch.randn(64, 2) + 1, torch.randn(64, 2)) for _ in range(num)]


RECIPES = {
    "denoising score matching": lambda: (energy(), denoising, batches()),
    "sliced score matching": lambda: (energy(), sliced, batches()),
}

if __name__ == "__main__":
    for name, make in RECIPES.items():
        runs.show(name, make)
