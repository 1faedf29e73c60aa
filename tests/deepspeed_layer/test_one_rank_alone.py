"""What one rank may do alone in stages 0 to 2: an evaluation sends nothing, and all
ranks train on afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import assert_close, criterion, data, made, mine, plainly
from ranks import RankPool
from torch import Tensor

import fzero

x = data(50)[0]


def _without_grad(engine: fzero.Engine) -> None:
    with torch.no_grad():
        engine(x)


def _in_inference_mode(engine: fzero.Engine) -> None:
    with torch.inference_mode():
        engine.module(x)


def _with_eval(engine: fzero.Engine) -> None:
    engine.eval()
    with torch.no_grad():
        engine.module(x)
        engine.predict(x)
    engine.train()


def _generates(engine: fzero.Engine) -> None:
    with torch.no_grad():
        for size in (1, 2, 3):
            engine.module.predict(x[:size])


ALONE: dict[str, Callable[[fzero.Engine], Any]] = {
    "forward in no_grad": _without_grad,
    "forward in inference_mode": _in_inference_mode,
    "evaluation with eval()": _with_eval,
    "forward with a graph": lambda engine: criterion(engine(x), data(50)[1]).item(),
    "forwards of several lengths": _generates,
    "a method": lambda engine: engine.module.predict(x),
    "a submodule": lambda engine: engine.module.blocks[0](x),
    "state_dict": lambda engine: {
        name: value.clone() for name, value in engine.module.state_dict().items()
    },
    "parameters": lambda engine: sum(
        param.detach().sum().item() for param in engine.module.parameters()
    ),
    "learning rate": lambda engine: (
        engine.get_lr(),
        [group["lr"] for group in engine.optimizer.param_groups],
    ),  # type: ignore[union-attr]
    "numbers": lambda engine: (
        engine.get_global_grad_norm(),
        engine.loss_scale,
        engine.global_steps,
    ),
    "log": lambda engine: engine.log_line("one"),
}


def _trained(stage: int, what: str, when: str) -> tuple[list[float], dict[str, Tensor]]:
    engine = made(stage)
    norms: list[float] = []

    def alone() -> None:
        if engine.global_rank == engine.world_size - 1:
            ALONE[what](engine)

    for index in range(4):
        if (when == "before" and index == 0) or (when == "between" and index == 2):
            alone()
        batch, y = mine(engine, data(index))
        loss = criterion(engine(batch), y)
        if when == "inside" and index == 2:
            alone()
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
    return norms, engine.module_state_dict()


@pytest.mark.covering(1)
@pytest.mark.parametrize("when", ["before", "between", "inside"])
@pytest.mark.parametrize("what", ALONE)
@pytest.mark.parametrize("stage", range(3))
def test_what_needs_no_other_rank_may_be_done_by_one_alone(
    ranks: RankPool, stage: int, what: str, when: str
) -> None:
    world_size = 3 if when == "before" else 2
    norms, weights = plainly(
        lambda model, index: [criterion(model(data(index)[0]), data(index)[1])], 4
    )
    for found_norms, found in ranks(world_size, _trained, stage, what, when):
        assert found_norms == pytest.approx(norms, rel=2e-4)
        assert_close(found, weights)
