"""MAML (Finn et al. 2017, arXiv:1703.03400): weights from which one step of gradient
descent learns a task.

    fzero --num_procs 2 examples/derivatives/maml.py

The tasks are sine waves. The loss of a task is that after an inner step, whose gradient
is a part of the graph (`create_graph=True`), so the outer gradient holds a Hessian. A
batch holds tasks; each rank has its own.
"""

from typing import NamedTuple

import runs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

INNER_LR = 0.1


class Batch(NamedTuple):
    """Tasks (N) of K points each, to learn from and to be tested on."""

    x_NK1: Tensor
    y_NK1: Tensor
    x_test_NK1: Tensor
    y_test_NK1: Tensor


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    params = dict(model.named_parameters())
    losses = []
    for x, y, x_test, y_test in zip(*batch, strict=True):
        before = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(before, list(params.values()), create_graph=True)
        moved = {name: p - INNER_LR * g for (name, p), g in zip(params.items(), grads, strict=True)}
        losses.append(F.mse_loss(functional_call(model, moved, (x_test,)), y_test))
    return torch.stack(losses).mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def batches(num: int = 8) -> list[Batch]:
    torch.manual_seed(1)

    def tasks() -> Batch:
        size, phase = torch.rand(4, 1, 1) + 0.5, 3.14 * torch.rand(4, 1, 1)
        x, x_test = 6 * torch.rand(4, 10, 1) - 3, 6 * torch.rand(4, 10, 1) - 3
        return Batch(x, size * (x + phase).sin(), x_test, size * (x_test + phase).sin())

    return [tasks()] * num


RECIPES = {"MAML": lambda: (model(), loss_fn, batches())}

if __name__ == "__main__":
    for name, make in RECIPES.items():
        runs.show(name, make)
