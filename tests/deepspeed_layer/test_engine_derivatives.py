"""Derivatives in a loss that an engine's forward and `backward` get are the plain
loop's, in every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import fzero

Loss = Callable[[Any, Tensor], Tensor]


def penalized(model: Any, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (grad.norm(dim=1) - 1).square().mean()  # type: ignore[no-any-return]


def tangent(model: Any, batch: Tensor) -> Tensor:
    y, dy = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
    found: Tensor = (y - 0.1 * dy).square().mean()
    return found


def slope(model: Any, batch: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda x: model(x).square().sum())(batch).square().mean()
    return found


def curved(model: Any, batch: Tensor) -> Tensor:
    found: Tensor = torch.func.hessian(lambda x: model(x).square().sum())(batch[:1])
    return found.square().mean() + model(batch).square().mean()  # type: ignore[no-any-return]


def both(model: Any, batch: Tensor) -> Tensor:
    return penalized(model, batch) + tangent(model, batch)


LOSSES: list[Loss] = [penalized, tangent, slope, curved, both]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def batches(num_ranks: int) -> list[Tensor]:
    return [
        torch.randn(num_ranks, 4, 3, generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    ]


def plain(loss_of: Loss, num_ranks: int) -> dict[str, Tensor]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(num_ranks):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rows) for rows in x]).mean().backward()
        optimizer.step()
    return model.state_dict()


def trained(loss_of: Loss, stage: int, rank: int, num_ranks: int, direct: bool) -> dict[str, Any]:
    cfg = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = fzero.initialize(model=made(), config=cfg)[0]
    for x in batches(num_ranks):
        loss = loss_of(engine, x[rank])
        if direct:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
    return engine.train_step.gather(engine.state)


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda each: each.__name__)
def test_an_engine_trains_with_derivatives_in_its_loss(loss_of: Loss) -> None:
    expected = plain(loss_of, 1)
    for stage in range(4):
        for direct in (False, True):
            found = trained(loss_of, stage, 0, 1, direct)
            torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)


@pytest.mark.parametrize("num_ranks", [2])
def test_so_it_does_on_real_ranks(ranks: RankPool, num_ranks: int) -> None:
    assert ranks(num_ranks, _differ) == [[]] * num_ranks


def _differ() -> list[str]:
    found = []
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for loss_of in LOSSES:
        expected = dict(plain(loss_of, num_ranks))
        for stage in (2, 3):
            for direct in (False, True):
                own = trained(loss_of, stage, rank, num_ranks, direct)
                try:  # sums over ranks round
                    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
                except AssertionError as error:
                    found.append(f"{loss_of.__name__}, stage {stage}, direct {direct}: {error}")
    return found
