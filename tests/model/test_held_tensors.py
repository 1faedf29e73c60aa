"""Code may read a parameter or a buffer through another tensor that shares its memory;
it trains as in a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_own_params import STEPS, Model, batches, config, make, plain_weights, trained
from torch import Tensor, nn
from torch.nn import functional as F

import fzero
from fzero.model.held_tensors import find_held
from fzero.simulation import simulate


class Data(Model):
    """Reads through plain tensors in a list and in an attribute, which follow the
    parameter and have no gradient.
    """

    def set_up(self) -> None:
        self.kept, self.row = [self.a.weight.data], self.a.weight.detach()[1]

    def use(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + F.linear(x, self.kept[0]) + self.row.detach()))


class DataInAClosure(Model):
    def set_up(self) -> None:
        weight, transposed = self.a.weight.data, self.a.weight.data.t()
        self.map = lambda x: x @ transposed + torch.cat([weight, weight])[:4]

    def use(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) + self.map(torch.ones(1, 4)).sum())


class View(Model):
    """A view has a gradient, which in a plain loop is the parameter's."""

    def set_up(self) -> None:
        self.transposed = [self.a.weight.t()]

    def use(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + x @ self.transposed[0]))


class OtherParameter(Model):
    """A Parameter of the same memory that no module has: no optimizer of a plain loop
    updates it.
    """

    def set_up(self) -> None:
        self.kept = [nn.Parameter(self.a.weight.data)]

    def use(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + F.linear(x, self.kept[0])))


class HeldBuffer(Model):
    """Reads and writes a buffer, and a part of it, through other references than the
    module's.
    """

    def set_up(self) -> None:
        self.register_buffer("mean", torch.zeros(4))
        self.kept = [self.mean, self.mean[1:3]]

    def use(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept[0].lerp_(x.mean(0), 0.5)
            self.kept[1].add_(0.25)
        return super().use(x - self.kept[0] - self.kept[1].sum() / 8)


MODELS = [Data, DataInAClosure, View, OtherParameter, HeldBuffer]


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_code_holds_of_a_tensor_is_that_of_the_state(model: type[Model], stage: int) -> None:
    step = fzero.make_train_step(make(model), config(stage), units=["a", "b"])
    expected = plain_weights(model)
    torch.testing.assert_close(trained(step), expected)
    if model is not HeldBuffer:  # each rank has batch statistics of its own
        for by in ("lockstep", "vmap"):
            torch.testing.assert_close(trained(simulate(step, 2, by=by), num_ranks=2), expected)


class WholeData(Data):
    def use(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + F.linear(x, self.kept[0])))


class WholeBuffer(HeldBuffer):
    def use(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept[0].lerp_(x.mean(0), 0.5)
        return Model.use(self, x - self.kept[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("compile", ["step", "block"])
@pytest.mark.parametrize("model", [*MODELS, WholeData, WholeBuffer])
def test_what_code_holds_of_a_tensor_is_that_of_the_state_in_a_graph(
    model: type[Model], compile: Any
) -> None:
    step = fzero.make_train_step(
        make(model), config(3), units=["a", "b"], compile=compile, compile_backend="aot_eager"
    )
    if compile == "step" and model in (Data, DataInAClosure, View, HeldBuffer):
        with pytest.raises(
            ValueError,
            match=r"'(a.weight|mean)': must not be read through a view that was made before",
        ):
            trained(step)
    else:
        torch.testing.assert_close(trained(step), plain_weights(model))


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_code_holds_of_a_tensor_is_that_of_an_engine(model: type[Model], stage: int) -> None:
    engine, *_ = fzero.initialize(
        model=make(model), config=config(stage, train_micro_batch_size_per_gpu=8)
    )
    for x in batches():
        engine.backward(engine(x))
        engine.step()
    found = engine.train_step.gather(engine.state)
    torch.testing.assert_close(found, plain_weights(model))


def test_a_parameter_that_code_holds_is_trained_after_the_module_has_gone_to_meta() -> None:
    def moved(model: type[Model], move: Callable[[Model], object]) -> dict[str, Tensor]:
        module = make(model)
        step = fzero.make_train_step(module, config(0))
        state = step.init()
        move(module)
        for x in batches():
            state, _ = step(state, x)
        return step.gather(state)

    class InAList(Model):
        def set_up(self) -> None:
            self.kept = [self.a.weight]

        def use(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(F.linear(x, self.kept[0], self.a.bias)))

    for model in (InAList, Data):
        found, expected = moved(model, lambda module: module.to("meta")), plain_weights(model)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Flat(Model):
    """Its parameters are parts of one tensor, which the forward uses itself; a second
    one it asks for its shape only.
    """

    def set_up(self) -> None:
        self.flat = torch.randn(8, 4)
        self.a.weight, self.b.weight = nn.Parameter(self.flat[:4]), nn.Parameter(self.flat[4:])

    def use(self, x: Tensor) -> Tensor:
        return super().use(x) * self.flat.norm()


class AsksForTheShape(Flat):
    def use(self, x: Tensor) -> Tensor:
        return Model.use(self, x) * self.flat.shape[0] / self.flat.size(0)


def test_a_tensor_of_which_parameters_are_parts_is_refused_where_the_forward_computes_with_it() -> (
    None
):
    step = fzero.make_train_step(make(Flat), config(0))
    with pytest.raises(
        ValueError,
        match=r"'a.weight': must not be read through a tensor that shares its memory and shows",
    ):
        step(step.init(), batches()[0])
    torch.testing.assert_close(
        trained(fzero.make_train_step(make(AsksForTheShape), config(3))),
        plain_weights(AsksForTheShape),
    )


def test_only_what_shows_elements_of_a_tensor_is_found_and_afterwards_all_are_as_they_were() -> (
    None
):
    model, both = make(Model), torch.randn(8, 4)
    assert find_held(model) == ()
    model.a.weight, model.b.weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])
    column, words = model.b.weight.data[:, 1], model.a.weight.data.view(torch.int32)
    parts = {id(each.tensor()): (each.name, each.is_apart) for each in find_held(model)}
    assert parts[id(column)] == ("b.weight", False) and parts[id(words)] == ("a.weight", True)
    assert parts[id(both)] == ("a.weight", True)
    step = fzero.make_train_step(model, config(0))
    seen = list[type]()
    state, _ = step(step.init(), batches()[0])
    model.b.register_forward_hook(lambda *_: seen.append(type(column)))
    step(state, batches()[1])
    assert type(column) is Tensor and issubclass(seen[0], Tensor) and seen[0] is not Tensor
    assert words.dtype == torch.int32 and len(batches()) == STEPS
