"""A physics-informed network (Raissi et al. 2019): it solves -u″ = π² sin πx on [0, 1]
with u(0) = u(1) = 0, whose solution is sin πx.

    fzero --num_procs 2 examples/derivatives/physics.py

The loss holds a second derivative by the input, so its gradient is a third one. Each
rank has points of its own.
"""

import math

import runs
import torch
from torch import Tensor, nn


def residual(u: nn.Module, x_B1: Tensor) -> Tensor:
    """u″ + π² sin πx at each point."""
    x_B1 = x_B1.clone().requires_grad_()
    (du_B1,) = torch.autograd.grad(u(x_B1).sum(), x_B1, create_graph=True)
    (ddu_B1,) = torch.autograd.grad(du_B1.sum(), x_B1, create_graph=True)
    return ddu_B1 + math.pi**2 * torch.sin(math.pi * x_B1)


def loss_fn(u: nn.Module, x_B1: Tensor) -> Tensor:
    ends = u(torch.tensor([[0.0], [1.0]]))
    return 0.003 * residual(u, x_B1).square().mean() + ends.square().sum()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def batches(num: int = 40) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.rand(64, 1) for _ in range(num)]


RECIPES = {"physics-informed": lambda: (model(), loss_fn, batches())}

if __name__ == "__main__":
    for name, make in RECIPES.items():
        runs.show(name, make)
