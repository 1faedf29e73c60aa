"""docs/concepts/derivatives.md: each cell of its table is what a step does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from pages import ROOT
from ranks import RankError, RankPool
from torch import Tensor, nn

import fzero

PAGE = (ROOT / "docs" / "concepts" / "derivatives.md").read_text()
LossFn = Callable[[Any, Tensor], Tensor]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


def penalty_of_inputs(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().mean()


def penalty_of_params(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(grad.square().sum() for grad in grads)


def func_grad(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: model(x).sum())(x).square().mean()


def func_jvp(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().mean()


def func_vmap(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = torch.func.vmap(model)(x).square().mean()
    return found


def func_jacrev(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jacrev(model)(x[0]).square().mean()


def inner_step(model: nn.Module, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(model(x).square().mean(), list(params.values()), create_graph=True)
    moved = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads)}
    found: Tensor = torch.func.functional_call(model, moved, x).square().mean()
    return found


def own_function(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = Square.apply(model(x)).mean()
    return found


WAYS: dict[str, LossFn] = {
    "`autograd.grad` of inputs, `create_graph=True`": penalty_of_inputs,
    "`autograd.grad` of parameters, `create_graph=True`": penalty_of_params,
    "an inner step: `autograd.grad` of parameters, then `functional_call`": inner_step,
    "an `autograd.Function` of one's own": own_function,
    "`torch.func.vmap` over samples": func_vmap,
    "`torch.func.jvp`": func_jvp,
    "`torch.func.grad` of inputs": func_grad,
    "`torch.func.jacrev`": func_jacrev,
}

Simulation = Literal["vmap", "lockstep"]
HOWS: dict[str, tuple[int, dict[str, Any], Simulation | None]] = {
    "stages 0–2": (2, {}, None),
    "stage 3": (3, {}, None),
    '`compile="step"`, stage 3': (3, {"compile": "step", "compile_backend": "aot_eager"}, None),
    '`by="lockstep"`, stage 3': (3, {}, "lockstep"),
    '`by="vmap"`': (3, {}, "vmap"),
}
"""The columns: stage, arguments of the step, and how the two ranks are simulated; None
where they are processes.
"""


def step_of(way: str, stage: int, how: dict[str, Any]) -> fzero.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": zero}
    return fzero.make_train_step(model, cfg, loss_fn=WAYS[way], units=["0", "2"], **how)


def batch_of() -> Tensor:
    """The rows of each rank, the same on all: so their number does not matter."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def trained(way: str, stage: int, how: dict[str, Any]) -> float:
    step = step_of(way, stage, how)
    state = step.init()
    for _ in range(3):
        state, metrics = step(state, batch_of())
    return metrics.loss.item()


def simulated(way: str, stage: int, how: dict[str, Any], by: Simulation) -> float:
    ranks = fzero.simulate(step_of(way, stage, how), 2, by=by)
    state = ranks.init()
    for _ in range(3):
        state, metrics = ranks(state, batch_of().expand(2, 6, 4).clone())
    return float(metrics.loss.flatten()[0])


def outcome(way: str, column: str, expected: float, ranks: RankPool) -> str:
    """`yes` where the loss is that of a single rank, `refused` where the step raises."""
    stage, how, by = HOWS[column]
    try:
        found = simulated(way, stage, how, by) if by else ranks(2, trained, way, stage, how)[0]
    except (RankError, ValueError, RuntimeError):
        return "refused"
    assert abs(found - expected) < 1e-5 * max(abs(expected), 1), (way, column, found, expected)
    return "yes"


def table() -> dict[tuple[str, str], str]:
    """The cells of the page, by way and column."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    head, rows = lines[0], [line for line in lines[1:] if line[0] in WAYS]
    assert head[1:] == list(HOWS)
    return {(row[0], how): cell for row in rows for how, cell in zip(HOWS, row[1:], strict=True)}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: re.sub(r"\W+", "_", way))
def test_a_row_says_what_a_step_does(way: str, ranks: RankPool) -> None:
    expected = trained(way, 0, {})
    shown = table()
    assert {how: outcome(way, how, expected, ranks) for how in HOWS} == {
        how: shown[way, how] for how in HOWS
    }


def test_the_table_has_every_row_and_column() -> None:
    assert len(table()) == len(WAYS) * len(HOWS)
