"""A captured step is the eager one after any change of a Python value that the model or the loss function reads."""

from __future__ import annotations

import math
import types
from collections import UserDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy
import pytest
import torch
from test_compiled import AOT, SGD
from torch import Tensor, nn
from training import config, make, vectors

import fzero

FACTOR = 2.0
HELD = torch.ones(16)
FACTORS = {"scale": [2.0]}
settings = types.ModuleType("settings")
settings.factor = 2.0  # type: ignore[attr-defined]


def helped(x: Tensor) -> Tensor:
    return x * FACTOR


class Config:
    def __init__(self) -> None:
        self.factor, self.inner = 2.0, types.SimpleNamespace(factor=2.0)


@dataclass(slots=True)
class Slotted:
    factor: float = 2.0


def by_default(x: Tensor, factors: list[float] = [2.0]) -> Tensor:  # noqa: B006
    return x * factors[0]


class Reads(nn.Module):
    """Reads a factor from every place that a model reads from."""

    of_class = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.slotted, self.array, self.queue = Slotted(), numpy.full(2, 2.0), deque([2.0], maxlen=1)
        self.deep, self.act = [[[[[[2.0]]]]]], nn.Identity()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.0)
        self.factor, self.factors, self.config = 2.0, [2.0], Config()
        self.kept = torch.ones(())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.linear(helped(x)) * self.factor * self.factors[0] * self.config.factor * self.config.inner.factor
        if not self.training:
            x = x + 1
        x = by_default(self.act(x)) * self.of_class * self.slotted.factor * float(self.array[0]) * self.queue[0] / 2**6
        x = x * self.deep[0][0][0][0][0][0] * getattr(self, "absent", 2.0)
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
    "a class's attribute": lambda model, _: setattr(Reads, "of_class", 3.0),
    "a class's method": lambda model, _: setattr(Reads, "scaled", lambda self, x: x * 3),
    "an object's method": lambda model, _: setattr(model, "scaled", lambda x: x * 3),
    "an attribute that was not there": lambda model, _: setattr(model, "absent", 3.0),
    "an attribute in a slot": lambda model, _: setattr(model.slotted, "factor", 3.0),
    "an item of an array": lambda model, _: _set(model.array, 0, 3.0),
    "an item of a queue": lambda model, _: model.queue.append(3.0),
    "a deep item": lambda model, _: _set(model.deep[0][0][0][0][0], 0, 3.0),
    "a default": lambda *_: _set(by_default.__defaults__[0], 0, 3.0),  # type: ignore[index]
    "a submodule": lambda model, _: setattr(model, "act", nn.Tanh()),
    "a hook": lambda model, _: model.linear.register_forward_hook(lambda *of: of[2] * 3) and None,
}


def _losses(change: Callable[[Reads, Times], None] | None, options: dict[str, Any]) -> tuple[list[float], int]:
    """The losses of three steps, and of two after the change; the number of graphs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FACTOR", "helped"):
            patch.setitem(globals(), name, globals()[name])
        patch.setattr(settings, "factor", 2.0)
        patch.setitem(FACTORS, "scale", [2.0])
        patch.setattr(Reads, "of_class", 2.0)
        patch.setattr(Reads, "scaled", Reads.scaled)
        by_default.__defaults__[0][0] = 2.0  # type: ignore[index]
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


class Trainer:
    def __init__(self) -> None:
        self.factor, self.history = 2.0, list[int]()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.times(model(*batch))

    def times(self, loss: Tensor) -> Tensor:
        return loss * self.factor


def test_attributes_that_a_method_reads_are_guarded_and_no_others() -> None:
    trainer = Trainer()
    step = fzero.make_train_step(make(Reads), config(0), loss_fn=trainer.loss, **AOT)
    state = step.init()
    for _ in range(10):
        state, _ = step(state, vectors(0))
        trainer.history.append(1)
    trainer.factor = 4.0
    twice = step.evaluate(state, vectors(0))
    trainer.factor = 2.0
    assert twice == 2 * step.evaluate(state, vectors(0))
    assert step.program is not None and len(step.program.compiled.graphs) == 3


def _wrapped(factor: float) -> tuple[Any, Callable[[float], None]]:
    def inner(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(*batch) * factor
        return loss

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return lambda model, batch: inner(model, batch), change


def test_a_function_in_a_closure_is_followed() -> None:
    loss_fn, change = _wrapped(2.0)
    step = fzero.make_train_step(make(Reads), config(0), loss_fn=loss_fn, **AOT)
    state = step.init()
    once = step.evaluate(state, vectors(0))
    change(4.0)
    assert step.evaluate(state, vectors(0)) == 2 * once


class Making(dict[str, Any]):
    """Makes a new object at each access, like the activations of transformers."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


ACTIVATIONS = Making(tanh=nn.Tanh)


class Activated(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.act = ACTIVATIONS["tanh"]


def test_a_dict_that_makes_its_values_anew_causes_no_capture() -> None:
    step = fzero.make_train_step(make(Activated), config(0), **AOT)
    state = step.init()
    for _ in range(3):
        state, _ = step(state, vectors(0))
    assert step.program is not None and len(step.program.compiled.graphs) == 1


# --- what a forward changes --------------------------------------------------------------------------------------


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.items, self.named, self.space = nn.Linear(16, 16), list[Any](), dict[str, Any](), Config()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.change(self.linear(x)), y)


class Appends(Changing):
    def change(self, x: Tensor) -> Tensor:
        self.items.append(1)
        return x * len(self.items)


class Keeps(Changing):
    def change(self, x: Tensor) -> Tensor:
        before = self.named.get("mean", 0.0)
        self.named["mean"] = x.detach().mean()
        return x + before


class KeepsInObject(Changing):
    def change(self, x: Tensor) -> Tensor:
        self.space.factor = x.detach().mean()  # type: ignore[assignment]
        return x


class KeepsObject(Changing):
    def change(self, x: Tensor) -> Tensor:
        self.output = Config()
        self.output.factor = x.detach().mean()  # type: ignore[assignment]
        return x


@pytest.mark.parametrize("kind", [Appends, Keeps, KeepsInObject, KeepsObject])
def test_contents_that_the_forward_changes_are_refused_and_left_as_they_were(kind: type[Changing]) -> None:
    model = make(kind)
    step = fzero.make_train_step(model, config(0), **AOT)
    state = step.init()
    for _ in range(2):
        with pytest.raises(fzero.CompileError, match=r"(changes the contents of model|stores tensors in a Config)"):
            step(state, vectors(0))
        assert not model.items and not model.named and model.space.factor == 2.0 and not hasattr(model, "output")


@lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size) / size


class Held(Changing):
    """Writes into a global tensor, and reads a cached table."""

    def change(self, x: Tensor) -> Tensor:
        HELD[:3].add_(1.0)
        HELD.mul_(1.5)
        return x * HELD * table(16)


def test_a_tensor_that_the_code_holds_is_written_once_in_a_step_and_a_cache_stays_usable() -> None:
    losses, values = [], []
    for options in ({}, AOT):
        HELD.fill_(1.0)
        table.cache_clear()
        step = fzero.make_train_step(make(Held), config(0, clip=0.0, optimizer=SGD), **options)
        state = step.init()
        for index in range(3):
            state, metrics = step(state, vectors(index, size=12 - index))
            losses.append(metrics.loss.item())
        values.append(HELD.clone())
        assert type(table(16)) is Tensor
    assert losses[:3] == losses[3:] and torch.equal(*values)


class ReadsValue(Changing):
    def change(self, x: Tensor) -> Tensor:
        return x * HELD[0].item()


def test_the_value_of_a_tensor_that_the_code_holds_is_no_constant() -> None:
    step = fzero.make_train_step(make(ReadsValue), config(0), **AOT)
    with pytest.raises(fzero.CompileError, match="needs the values of a tensor"):
        step(step.init(), vectors(0))


# --- batches -----------------------------------------------------------------------------------------------------


def test_a_mapping_is_read_as_a_dict_and_an_object_with_tensors_is_refused() -> None:
    x, y = vectors(0)
    losses = []
    for options in ({}, AOT):
        step = fzero.make_train_step(make(Reads), config(0), **options)
        state = step.init()
        for _ in range(2):
            state, metrics = step(state, UserDict(x=x, y=y))
        losses.append(metrics.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for y_ in (y.numpy(), types.SimpleNamespace(y=y)):
        with pytest.raises(ValueError, match="batch: must be of tensors, numbers and texts"):
            step(state, {"x": x, "y": y_})


class Signed(Changing):
    def forward(self, x: Tensor, zero: float) -> Tensor:
        return self.linear(x).square().mean() * math.copysign(2.0, zero)


def test_floats_are_reported_apart_by_their_bits() -> None:
    step = fzero.make_train_step(make(Signed), config(0), **AOT)
    state, x = step.init(), vectors(0)[0]
    losses = [step.evaluate(state, (x, zero)) for zero in (0.0, -0.0, float("nan"), float("nan"))]
    assert losses[0] == -losses[1]
    assert step.program is not None and len(step.program.compiled.graphs) == 3
