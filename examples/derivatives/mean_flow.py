"""MeanFlow (Geng et al. 2025, arXiv:2505.13447): a model of the average velocity u of a
flow, whose loss holds a derivative by time.

    fzero --num_procs 2 examples/derivatives/mean_flow.py

    u(z, r, t) = v - (t - r) · (v ∂_z u + ∂_t u),    z = (1 - t) x + t ε,  v = ε - x

The bracket is one Jacobian-vector product with the tangent (v, 0, 1): forward mode, so
it costs about one more forward. The target is held fixed.
"""

from typing import NamedTuple

import runs
import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    data_BD: Tensor
    noise_BD: Tensor
    r_B1: Tensor  # 0 ≤ r ≤ t ≤ 1
    t_B1: Tensor


class AverageVelocity(nn.Module):
    """u(z, r, t)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 2)

    def forward(self, z_BD: Tensor, r_B1: Tensor, t_B1: Tensor) -> Tensor:
        h = torch.nn.functional.silu(self.first(torch.cat([z_BD, r_B1, t_B1], dim=1)))
        return self.last(torch.nn.functional.silu(self.middle(h)))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    r, t = batch.r_B1, batch.t_B1
    z = torch.lerp(batch.data_BD, batch.noise_BD, t)
    v = batch.noise_BD - batch.data_BD
    u, du = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = (v - (t - r) * du).detach()
    return (u - target).square().sum(1).mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return AverageVelocity()


def batches(num: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    times = [torch.rand(64, 2).sort(dim=1).values.split(1, dim=1) for _ in range(num)]
    return [Batch(0.3 * torch.randn(64, 2) + 1, torch.randn(64, 2), *pair) for pair in times]


RECIPES = {"MeanFlow": lambda: (model(), loss_fn, batches())}

if __name__ == "__main__":
    for name, make in RECIPES.items():
        runs.show(name, make)
