"""A captured step is the eager one after any change of a Python value that the model or the loss function reads."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from test_compiled import AOT
from torch import Tensor, nn
from training import config, make, vectors

import fzero

FACTOR = 2.0
FACTORS = {"scale": [2.0]}
settings = types.ModuleType("settings")
settings.factor = 2.0  # type: ignore[attr-defined]


def helped(x: Tensor) -> Tensor:
    return x * FACTOR


class Config:
    def __init__(self) -> None:
        self.factor, self.inner = 2.0, types.SimpleNamespace(factor=2.0)


class Reads(nn.Module):
    """Reads a factor from every place that a model reads from."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.0)
        self.factor, self.factors, self.config = 2.0, [2.0], Config()
        self.kept = torch.ones(())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.linear(helped(x)) * self.factor * self.factors[0] * self.config.factor * self.config.inner.factor
        if not self.training:
            x = x + 1
        return nn.functional.mse_loss(self.scaled(x), y)

    def scaled(self, x: Tensor) -> Tensor:
        return self.dropout(x * FACTORS["scale"][0] * settings.factor * self.kept)  # type: ignore[attr-defined]


def times(model: nn.Module, batch: Any, factor: float = 2.0) -> Tensor:
    loss: Tensor = model(*batch)
    return loss * factor


class Times:
    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return times(model, batch, self.factor)


def _set(owner: Any, key: Any, value: Any) -> None:
    owner[key] = value


CHANGES: dict[str, Callable[[Reads, Times], None]] = {
    "an attribute": lambda model, _: setattr(model, "factor", 3.0),
    "an item of a list": lambda model, _: _set(model.factors, 0, 3.0),
    "a configuration": lambda model, _: setattr(model.config, "factor", 3.0),
    "a configuration's own": lambda model, _: setattr(model.config.inner, "factor", 3.0),
    "a global": lambda *_: _set(globals(), "FACTOR", 3.0),
    "an item of a global": lambda *_: _set(FACTORS["scale"], 0, 3.0),
    "an attribute of a module": lambda *_: setattr(settings, "factor", 3.0),
    "a function": lambda *_: _set(globals(), "helped", lambda x: x * 3),
    "the loss function's attribute": lambda _, loss_fn: setattr(loss_fn, "factor", 3.0),
    "the mode": lambda model, _: setattr(model, "training", False),
    "a submodule's probability": lambda model, _: setattr(model.dropout, "p", 0.5),
    "a tensor": lambda model, _: setattr(model, "kept", torch.full((), 3.0)),
    "a tensor in place": lambda model, _: model.kept.fill_(3.0) and None,
    "a tensor's dtype": lambda model, _: setattr(model, "kept", torch.full((), 3.0, dtype=torch.float64)),
    "a hook": lambda model, _: model.linear.register_forward_hook(lambda *of: of[2] * 3) and None,
}


def _losses(change: Callable[[Reads, Times], None] | None, options: dict[str, Any]) -> tuple[list[float], int]:
    """The losses of three steps, and of two after the change; the number of graphs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FACTOR", "helped"):
            patch.setitem(globals(), name, globals()[name])
        patch.setattr(settings, "factor", 2.0)
        patch.setitem(FACTORS, "scale", [2.0])
        loss_fn = Times()
        step = fzero.make_train_step(make(Reads), config(0), loss_fn=loss_fn, **options)
        model, state, losses = step.runtime.recipe.model, step.init(), []
        for index in (0, 1, 2, 0, 1):
            if len(losses) == 3 and change is not None:
                change(model, loss_fn)  # type: ignore[arg-type]
            state, metrics = step(state, vectors(index))
            losses.append(metrics.loss.item())
        return losses, 0 if step.program is None else len(step.program.compiled.graphs)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_the_model_reads_has_the_eager_step_s_effect(change: str) -> None:
    (eager, _), (compiled, num_graphs) = (_losses(CHANGES[change], options) for options in ({}, AOT))
    assert eager == pytest.approx(compiled, rel=1e-6)
    assert num_graphs == (1 if change in ("a tensor", "a tensor in place") else 2)
    unchanged, _ = _losses(None, {})
    assert eager[:3] == unchanged[:3] and abs(eager[3] - unchanged[3]) > 1e-3 * unchanged[3]


def test_settings_of_pytorch_are_read_anew() -> None:
    step = fzero.make_train_step(make(Reads), config(0), **AOT)
    state = step.init()
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16), nullcontext()):
        with context:
            state, _ = step(state, vectors(0))
    assert step.program is not None and len(step.program.compiled.graphs) == 2


def test_what_a_partial_holds_is_read_anew() -> None:
    losses = []
    for factor in (2.0, 3.0):
        step = fzero.make_train_step(make(Reads), config(0), loss_fn=partial(times, factor=factor), **AOT)
        losses.append(step(step.init(), vectors(0))[1].loss.item())
    assert losses[1] == pytest.approx(1.5 * losses[0])
