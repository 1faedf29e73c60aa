"""A captured step is the eager one after any change of a Python value that the model or
the loss function reads.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import numpy
import pytest
import torch
from test_compiled import AOT, SGD
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook
from training import config, make, vectors

import fzero

FACTOR = RATE = 2.0
HELD = torch.ones(16)
FACTORS = {"scale": [2.0]}
settings: Any = types.ModuleType("settings")
settings.factor, settings.inner, settings.other = 2.0, types.ModuleType("inner"), 2.0
settings.inner.factor = 2.0
VARIABLE = ContextVar("VARIABLE", default=2.0)


def helped(x: Tensor) -> Tensor:
    return x * FACTOR


class Config:
    def __init__(self) -> None:
        self.factor, self.inner = 2.0, types.SimpleNamespace(factor=2.0)
        self.dtype = numpy.dtype(object)  # as an array of objects has


@dataclass(slots=True)
class Slotted:
    factor: float = 2.0


class Options(dict[str, float]):
    """Has attributes beside its items; an attribute that is not there is an item."""

    __getattr__ = dict.get


class OfClass:
    """Everything that it reads belongs to classes, or is a global that a method names."""

    factor = 2.0

    @property
    def named(self) -> float:
        return RATE / 2

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        return x * OfClass.factor


class Scale(torch.autograd.Function):
    """Its backward is not the derivative of its forward, and reads an attribute of the
    class.
    """

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * Scale.factor


class Outside(nn.Module):
    """A module that is not of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = nn.Dropout(0.0), types.SimpleNamespace(factor=1.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.config.factor
        return out


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
        self.kept, self.zero, self.hidden = torch.ones(()), 0.0, 2.0
        self.named, self.large, self.bytes = (
            {"a": 2.0, "b": 3.0},
            numpy.full(2**15, 2.0),
            bytearray([2]),
        )
        self.partly, self.outside, self.helper = (
            partial(by_default, factors=[2.0]),
            [Outside()],
            OfClass(),
        )
        self.strong, self.frozen = Config(), frozenset([Config()])
        self.weak, self.options = ref(self.strong), Options(item=2.0)
        self.options.__dict__["own"] = 2.0
        self.tensors, self.objects = [torch.ones(())], numpy.array([Config()])
        self.register_buffer("ones", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = (
            self.linear(helped(x))
            * self.factor
            * self.factors[0]
            * self.config.factor
            * self.config.inner.factor
        )
        if not self.training:
            x = x + 1
        x = (
            by_default(self.act(x))
            * self.of_class
            * self.slotted.factor
            * float(self.array[0])
            * self.queue[0]
            / 2**6
        )
        x = x * self.deep[0][0][0][0][0][0] * getattr(self, "absent", 2.0)
        return nn.functional.mse_loss(self.read(self.scaled(x)), y)

    def read(self, x: Tensor) -> Tensor:
        """Reads from places that no name in the code leads to directly."""
        x = self.partly(self.outside[0](Scale.apply(self.helper.apply(x * self.helper.named))))
        x = x * settings.inner.factor * getattr(settings, "other") * VARIABLE.get() / 2**5  # noqa: B009
        x = (
            x
            * float(self.large[-1])
            * self.bytes[0]
            * self.__dict__["hidden"]
            * math.copysign(1.0, self.zero)
            / 8
        )
        x = x * self.weak().factor * next(iter(self.frozen)).factor / 2**11  # type: ignore[union-attr]
        x = x * self.options.item * self.options.own * self.objects[0].factor / 8
        for tensor in (self.kept, self.linear.weight, self.ones, self.tensors[0]):
            x = x * getattr(tensor, "factor", 2.0) / 2
        for factor in self.named.values():
            x = torch.tanh(x) * factor
        return x * float(os.environ.get("FACTOR", "2.0"))

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
    "a tensor's dtype": lambda model, _: setattr(
        model, "kept", torch.full((), 3.0, dtype=torch.float64)
    ),
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
    "an attribute of a class": lambda *_: setattr(OfClass, "factor", 3.0),
    "a global that a property names": lambda *_: _set(globals(), "RATE", 3.0),
    "an attribute of an autograd.Function": lambda *_: setattr(Scale, "factor", -8.0),
    "a list in a partial": lambda model, _: _set(model.partly.keywords["factors"], 0, 3.0),
    "a module outside of the model": lambda model, _: setattr(
        model.outside[0].config, "factor", 3.0
    ),
    "the mode of a module outside": lambda model, _: setattr(model.outside[0].inner, "p", 1.0),
    "a module in a module": lambda *_: setattr(settings.inner, "factor", 3.0),
    "an attribute by getattr": lambda *_: setattr(settings, "other", 3.0),
    "a context variable": lambda *_: VARIABLE.set(3.0) and None,
    "an item of a large array": lambda model, _: _set(model.large, -1, 3.0),
    "an object behind a weak reference": lambda model, _: setattr(model.strong, "factor", 3.0),
    "an attribute of a dict": lambda model, _: setattr(model.options, "own", 3.0),
    "an item of a dict by __getattr__": lambda model, _: _set(model.options, "item", 3.0),
    "an object in a frozen set": lambda model, _: setattr(next(iter(model.frozen)), "factor", 3.0),
    "a byte": lambda model, _: _set(model.bytes, 0, 3),
    "an attribute by __dict__": lambda model, _: setattr(model, "hidden", 3.0),
    "a zero's sign": lambda model, _: setattr(model, "zero", -0.0),
    "the order of a dict": lambda model, _: _set(model.named, "a", model.named.pop("a")),
    "a variable of the environment": lambda *_: _set(os.environ, "FACTOR", "3.0"),
    "a submodule's class": lambda model, _: setattr(model.act, "__class__", nn.Tanh),
    "the forward of a class of torch": lambda *_: setattr(
        nn.Identity, "forward", lambda self, x: x * 3
    ),
    "a function of torch": lambda *_: setattr(torch, "tanh", torch.sin),
    "an attribute of a tensor": lambda model, _: setattr(model.kept, "factor", 3.0),
    "an attribute of a parameter": lambda model, _: setattr(model.linear.weight, "factor", 3.0),
    "an attribute of a buffer": lambda model, _: setattr(model.ones, "factor", 3.0),
    "an attribute of a tensor in a list": lambda model, _: setattr(model.tensors[0], "factor", 3.0),
    "an object in an array": lambda model, _: setattr(model.objects[0], "factor", 3.0),
    "a hook of all modules": lambda *_: (
        register_module_forward_hook(lambda *of: of[2] * 1.5) and None
    ),
    "a hook": lambda model, _: model.linear.register_forward_hook(lambda *of: of[2] * 3) and None,
}


def _losses(
    change: Callable[[Reads, Times], None] | None, options: dict[str, Any]
) -> tuple[list[float], int]:
    """The losses of three steps, and of two after the change; the number of graphs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FACTOR", "RATE", "helped"):
            patch.setitem(globals(), name, globals()[name])
        for owner, name in (
            (settings, "factor"),
            (settings, "other"),
            (settings.inner, "factor"),
            (OfClass, "factor"),
            (Scale, "factor"),
            (nn.Identity, "forward"),
            (torch, "tanh"),
        ):
            patch.setattr(owner, name, getattr(owner, name))
        patch.setenv("FACTOR", "2.0")
        VARIABLE.set(2.0)
        patch.setattr(torch_module, "_global_forward_hooks", OrderedDict())
        patch.setitem(FACTORS, "scale", [2.0])
        patch.setattr(Reads, "of_class", 2.0)
        patch.setattr(Reads, "scaled", Reads.scaled)
        by_default.__defaults__[0][0] = 2.0  # type: ignore[index]
        loss_fn = Times()
        step = fzero.make_train_step(make(Reads), config(0), loss_fn=loss_fn, **options)
        model, state, losses = step.runtime.spec.model, step.init(), []
        for index in (0, 1, 2, 0, 1):
            if len(losses) == 3 and change is not None:
                change(model, loss_fn)  # type: ignore[arg-type]
            state, metrics = step(state, vectors(index))
            losses.append(metrics.loss.item())
        return losses, 0 if step.program is None else len(step.program.compiled.graphs)


@pytest.mark.sample(12)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_the_model_reads_has_the_eager_step_s_effect(change: str) -> None:
    (eager, _), (compiled, num_graphs) = (
        _losses(CHANGES[change], options) for options in ({}, AOT)
    )
    assert eager == pytest.approx(compiled, rel=1e-6)
    assert num_graphs == (1 if change in ("a tensor", "a tensor in place") else 2)
    unchanged, _ = _losses(None, {})
    assert eager[:3] == unchanged[:3]
    # a backward counts one step later
    assert max(abs(eager[i] - unchanged[i]) for i in (3, 4)) > 1e-3 * unchanged[3]


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
        step = fzero.make_train_step(
            make(Reads), config(0), loss_fn=partial(times, factor=factor), **AOT
        )
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


@dataclass(slots=True)
class SlottedTrainer:
    factor: float

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(*batch) * self.factor
        return loss


def _slotted(factor: float) -> tuple[Any, Callable[[float], None]]:
    trainer = SlottedTrainer(factor)
    return trainer.loss, partial(setattr, trainer, "factor")


@pytest.mark.parametrize("made", [_wrapped, _slotted])
def test_a_closure_and_the_slots_of_a_method_s_object_are_followed(made: Any) -> None:
    loss_fn, change = made(2.0)
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


# --- what a forward changes -----------------------------------------------------------------------


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.items, self.named, self.space = (
            nn.Linear(16, 16),
            list[Any](),
            dict[str, Any](),
            Config(),
        )

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


class KeepsInGlobal(Changing):
    def change(self, x: Tensor) -> Tensor:
        global LAST
        LAST = x.detach().mean()
        return x


class KeepsInClass(Changing):
    def change(self, x: Tensor) -> Tensor:
        OfClass.factor = x.detach().mean()  # type: ignore[assignment]
        return x


class Draws(Changing):
    source: Callable[[], Any] = lambda: random.Random(0)

    def __init__(self) -> None:
        super().__init__()
        self.numbers = type(self).source()

    def change(self, x: Tensor) -> Tensor:
        return x * (
            next(self.numbers) if hasattr(self.numbers, "__next__") else self.numbers.random()
        )


class DrawsOfNumpy(Draws):
    source = lambda: numpy.random.default_rng(0)  # noqa: E731


class Counts(Draws):
    source = lambda: itertools.count(1)  # noqa: E731


class Yields(Draws):
    source = lambda: (float(number) for number in range(9))  # noqa: E731


LAST: Any = None


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "kind",
    [
        Appends,
        Keeps,
        KeepsInObject,
        KeepsObject,
        KeepsInGlobal,
        KeepsInClass,
        Draws,
        DrawsOfNumpy,
        Counts,
        Yields,
    ],
)
def test_contents_that_the_forward_changes_are_refused_and_left_as_they_were(
    kind: type[Changing],
) -> None:
    model = make(kind)
    step = fzero.make_train_step(model, config(0), **AOT)
    state = step.init()
    for _ in range(2):
        with pytest.raises(
            fzero.CompileError,
            match=r"(changes the contents of (model|LAST|OfClass)|stores tensors in a Config)",
        ):
            step(state, vectors(0))
        assert (
            not model.items
            and not model.named
            and model.space.factor == 2.0
            and not hasattr(model, "output")
        )
        assert LAST is None and OfClass.factor == 2.0


class Forgets(Changing):
    """Deletes an attribute, which the next forward finds missing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def change(self, x: Tensor) -> Tensor:
        x = x * getattr(self, "factor", 1.0)
        if hasattr(self, "factor"):
            del self.factor
        return x


def test_an_attribute_that_the_forward_deletes_is_missing_afterwards() -> None:
    losses = []
    for options in ({}, AOT):
        step = fzero.make_train_step(make(Forgets), config(0, clip=0.0, optimizer=SGD), **options)
        state = step.init()
        for index in range(3):
            state, metrics = step(state, vectors(index))
            losses.append(metrics.loss.item())
    assert losses[:3] == losses[3:]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, AOT], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model.linear.weight.register_hook(lambda grad: grad * 2),
            "has a gradient hook",
        ),
        (
            lambda model: model.linear.register_buffer("late", torch.ones(16)),
            "'linear.late' was not there",
        ),
    ],
    ids=["hook", "buffer"],
)
def test_what_a_step_refuses_is_refused_after_a_capture_too(
    options: dict[str, Any], change: Callable[[Any], Any], message: str
) -> None:
    model = make(Signed)
    step = fzero.make_train_step(model, config(0), **options)
    state, _ = step(step.init(), (vectors(0)[0], 1.0))
    change(model)
    with pytest.raises(ValueError, match=message):
        step(state, (vectors(0)[0], 1.0))


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


KEPT = [torch.ops.aten.sinc.default, torch.ops.aten.sinc]


class NamesOperators(Changing):
    """Reads a list of operators, as the policy of a selective checkpoint is, whose
    caches its call fills.
    """

    def change(self, x: Tensor) -> Tensor:
        return KEPT[0](x) * len(KEPT)


def test_the_caches_of_an_operator_that_the_code_names_are_no_contents() -> None:
    KEPT[0]._dispatch_cache.clear()
    step = fzero.make_train_step(make(NamesOperators), config(0, clip=0.0, optimizer=SGD), **AOT)
    state = step.init()
    for index in range(2):
        state, metrics = step(state, vectors(index))
    assert metrics.loss.isfinite()


class ReadsValue(Changing):
    def change(self, x: Tensor) -> Tensor:
        return x * HELD[0].item()


def test_the_value_of_a_tensor_that_the_code_holds_is_no_constant() -> None:
    step = fzero.make_train_step(make(ReadsValue), config(0), **AOT)
    with pytest.raises(fzero.CompileError, match="needs the values of a tensor"):
        step(step.init(), vectors(0))


# --- batches --------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="batch: must be of tensors, numbers and texts"):
        step(state, {"x": x, "y": y, "factor": Times()})


class InOrder(Changing):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = torch.zeros(())
        for x in batch.values():
            hidden = torch.tanh(hidden + self.linear(x))
        return hidden.square().mean()


def test_the_items_of_a_dict_are_read_in_its_order() -> None:
    x, y = vectors(0)
    losses = []
    for options in ({}, AOT):
        step = fzero.make_train_step(
            make(InOrder), config(0), loss_fn=lambda model, batch: model(batch), **options
        )
        state = step.init()
        losses += [step.evaluate(state, batch) for batch in ({"x": x, "y": y}, {"y": y, "x": x})]
    assert losses[:2] == losses[2:] and losses[0] != losses[1]


class Signed(Changing):
    def forward(self, x: Tensor, zero: float) -> Tensor:
        return self.linear(x).square().mean() * math.copysign(2.0, zero)


def test_floats_are_reported_apart_by_their_bits() -> None:
    step = fzero.make_train_step(make(Signed), config(0), **AOT)
    state, x = step.init(), vectors(0)[0]
    losses = [step.evaluate(state, (x, zero)) for zero in (0.0, -0.0, float("nan"), float("nan"))]
    assert losses[0] == -losses[1]
    assert step.program is not None and len(step.program.compiled.graphs) == 3
