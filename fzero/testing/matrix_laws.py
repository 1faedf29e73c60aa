"""`check_matrix_transform`: the laws of an optimizer of whole matrices, on stacks and in
training steps of all stages.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fzero.common.arguments import check_kind
from fzero.optim.whole_matrices import MatrixOptimizer, check_matrices
from fzero.simulation import simulate
from fzero.step import make_train_step

NUM_STEPS = 3


class _Net(nn.Module):
    """Matrices of several shapes, some of which each shard cuts, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 6)
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        loss: Tensor = (self.layers(x_BD) - x_BD.flip(1)).square().mean()
        return loss


def check_matrix_transform(
    optimizer: MatrixOptimizer, *, name: str = "optimizer", world_sizes: tuple[int, ...] = (2, 3)
) -> None:
    """Raises if an optimizer of whole matrices breaks a law that stages rely on, in the
    cases that it tries.

    On random stacks of three shapes: `specs` describes what `init` makes, `init` depends
    on shapes alone, each matrix of a stack is treated alone, and everything that it
    keeps is in its state. In steps of a small model on ranks in lockstep: all stages
    give the same bits, and finite ones.

    Args:
        optimizer: as `fzero.optim.matrix_transform` makes it.
        name: its name in messages.
        world_sizes: the numbers of ranks that are tried.

    Raises:
        AssertionError: a law is broken; the message has the law and the fix.

    >>> import fzero
    >>> check_matrix_transform(fzero.optim.normuon(), world_sizes=(2,))
    >>> check_matrix_transform(
    ...     fzero.optim.matrix_transform(
    ...         fzero.optim.MatrixTransform(
    ...             lambda x: (), lambda x, s, n: (x / x.norm(), s), lambda spec: ()
    ...         )
    ...     )
    ... )  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: optimizer: update must treat each matrix of a stack alone, ...
    """
    fix = "make one with fzero.optim.matrix_transform"
    check_kind("optimizer", optimizer, MatrixOptimizer, "an optimizer of whole matrices", fix)
    try:
        check_matrices(optimizer.matrix, name=name)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    for world_size in world_sizes:
        first = _trained(optimizer, 0, world_size)
        for stage in (1, 2, 3):
            weights = _trained(optimizer, stage, world_size)
            for key, value in weights.items():
                if not torch.isfinite(value).all():
                    raise AssertionError(
                        f"{name}: weights must stay finite, and {key!r} does not in {NUM_STEPS} "
                        f"updates of stage {stage}; divide by no number that may be 0"
                    )
                if not torch.equal(value, first[key]):
                    far = (value - first[key]).abs().max().item()
                    raise AssertionError(
                        f"{name}: all stages must give the same bits, and {key!r} differs by "
                        f"{far:.1e} between stages 0 and {stage} on {world_size} ranks; compute "
                        f"from the arguments alone"
                    )


def _trained(optimizer: MatrixOptimizer, stage: int, world_size: int) -> dict[str, Tensor]:
    """The weights after a few steps on ranks in lockstep."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batches = _Net(), torch.randn(NUM_STEPS, world_size, 4, 6)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    keys = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    step = simulate(make_train_step(model, keys, transform=optimizer), world_size, by="lockstep")
    state = step.init()
    for batch in batches:
        state, _ = step(state, batch)
    weights: dict[str, Tensor] = step.gather(state)
    return weights
