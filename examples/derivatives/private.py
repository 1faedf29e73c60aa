"""DP-SGD (Abadi et al. 2016, arXiv:1607.00133): the gradient of each sample is clipped,
and noise is added to their sum.

    fzero --num_procs 2 examples/derivatives/private.py

`fzero.per_sample.clip` is a transform of the model; `private` adds the noise once,
after the reduction, the same in all stages. The plain loop takes one sample at a time.
"""

import runs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

Batch = tuple[Tensor, Tensor]
MAX_NORM, NUM = 0.5, 16


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of each sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))


def batches(num: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    xs = torch.randn(num, NUM, 4)
    return [(x, x[:, :3].argmax(1)) for x in xs]


def on_ranks(stage: int, noise: float) -> list[float]:
    """The losses of a training with noise of `noise` times the largest norm."""
    clip = fzero.per_sample.clip(MAX_NORM)
    cfg = runs.config(stage, train_batch_size=NUM)
    step = fzero.make_train_step(model(), cfg, loss_fn=losses_of, transforms=[clip])
    private = fzero.per_sample.private(step, noise=noise, seed=0)
    state, losses = step.init(), []
    for batch in batches():
        state, metrics = private(state, runs.own_rows(batch, step))
        losses.append(metrics.loss.item())
    return losses


def plainly() -> list[float]:
    """Without noise, sample by sample."""
    net, losses = model(), []
    params = list(net.parameters())
    for batch in batches():
        of_each = losses_of(net, batch)
        total = [torch.zeros_like(p) for p in params]
        for loss in of_each:
            grads = torch.autograd.grad(loss, params, retain_graph=True)
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for own, grad in zip(total, grads, strict=True):
                own += grad * min(1.0, MAX_NORM / float(norm + 1e-6))
        for p, grad in zip(params, total, strict=True):
            p.data -= runs.LR * grad / NUM
        losses.append(of_each.mean().item())
    return losses


if __name__ == "__main__":
    print(f"clipped, plain: {runs.ends(plainly())}")
    for stage in (0, 3):
        print(f"clipped, stage {stage}: {runs.ends(on_ranks(stage, 0.0))}")
        print(f"DP-SGD, stage {stage}: {runs.ends(on_ranks(stage, 1.0))}")
