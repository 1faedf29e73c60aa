"""The influence of a training sample on the loss of a test sample (Koh and Liang 2017,
arXiv:1703.04730): -∇ℓ(test)ᵀ (G + λ)⁻¹ ∇ℓ(train).

    fzero --num_procs 2 examples/derivatives/influence.py

G is the Gauss–Newton matrix of all training samples (`step.gnvp`), which is positive
semidefinite where the Hessian need not be; λ is a damping. One solution of conjugate
gradients serves all training samples.
"""

import runs
import torch
import torch.nn.functional as F
from linear_algebra import conjugate_gradients, plus
from torch import Tensor, nn

import fzero

Batch = tuple[Tensor, Tensor]
DAMPING = 0.1


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])


def loss_of(z: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(z, batch[1])


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(logits(model, batch), batch)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def samples(num: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 4, generator=draw)
    return x, x[:, :3].argmax(1)


def influences(stage: int, num: int = 4) -> list[float]:
    """The influence of the first training samples on one test sample."""
    step = fzero.make_train_step(model(), runs.config(stage), loss_fn=loss_fn)
    state, space = step.init(), fzero.curvature.space(step)
    train, test = samples(64, 1), samples(1, 2)
    own = runs.own_rows(train, step)

    def damped(v: dict[str, Tensor]) -> dict[str, Tensor]:
        return plus(step.gnvp(state, own, v, outputs=logits, loss=loss_of), DAMPING, v)

    # all ranks have the same sample, so that its gradient is the mean
    of_test = fzero.curvature.gradient(step, state, test)
    solved = conjugate_gradients(damped, space, of_test, num=100)
    rows = [tuple(x[row : row + 1] for x in train) for row in range(num)]
    return [-float(space.dot(solved, fzero.curvature.gradient(step, state, row))) for row in rows]


if __name__ == "__main__":
    for stage in (0, 3):
        print(f"influences, stage {stage}:", *(f"{x:.4f}" for x in influences(stage)))
