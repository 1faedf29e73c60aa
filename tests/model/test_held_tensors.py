"""Code may read a parameter or a buffer through another tensor that shares its memory;
it trains as in a plain loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_own_params import STEPS, Model, batches, config, make, plain_weights, trained
from torch import Tensor, nn
from zoo.oddities import ODDITIES

import fzero
from fzero.model.held_tensors import find_held
from fzero.simulation import simulate

HELD = (
    "WeightInAList", "WeightInAClosure", "WeightInAPartial", "DataInAList", "DataInAClosure",
    "WholeDataInAList", "ViewInAList", "OtherParameterInAList", "BufferInAList",
    "WholeBufferInAList",
)  # fmt: skip
"""Rows of the zoo whose code holds a tensor of the model."""
VIEWS = ("DataInAList", "DataInAClosure", "ViewInAList", "BufferInAList")
"""Those that hold a view, which one graph does not follow."""
OPTIONS = {"units": ["inlet", "outlet", "blocks.*"], "loss_fn": lambda model, batch: model(*batch)}


def held(name: str) -> tuple[nn.Module, list[Any]]:
    """A model, and the batches of its steps."""
    torch.manual_seed(0)
    model, batch = ODDITIES[name].make()
    return model, [tuple(x[4 * i : 4 * i + 4] for x in batch) for i in range(STEPS)]


def assert_as_plainly(name: str, found: dict[str, Tensor]) -> None:
    model, each = held(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for batch in each:
        optimizer.zero_grad()
        model(*batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close(found, model.state_dict())


def goes(step: Any, each: list[Any]) -> dict[str, Tensor]:
    state = step.init()
    for batch in each:
        state, _ = step(state, batch)
    weights: Any = step.gather(state)
    return weights


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_code_holds_of_a_tensor_is_that_of_the_state(name: str, stage: int) -> None:
    model, each = held(name)
    step = fzero.make_train_step(model, config(stage), **OPTIONS)
    assert_as_plainly(name, goes(step, each))
    if "Buffer" not in name:  # each rank has batch statistics of its own
        stacked = [tuple(x.unflatten(0, (2, 2)) for x in batch) for batch in each]
        for by in ("lockstep", "vmap"):
            assert_as_plainly(name, goes(simulate(step, 2, by=by), stacked))


@pytest.mark.covering(1)
@pytest.mark.parametrize("compile", ["step", "block"])
@pytest.mark.parametrize("name", HELD)
def test_what_code_holds_of_a_tensor_is_that_of_the_state_in_a_graph(
    name: str, compile: Any
) -> None:
    model, each = held(name)
    how: Any = {"compile": compile, "compile_backend": "aot_eager"}
    step = fzero.make_train_step(model, config(3), **OPTIONS, **how)
    refused = {
        "step": "must not be read through a view that was made before" if name in VIEWS else "",
        "block": "give compiled code the parameter as an argument" if "Weight" in name else "",
    }[compile]
    if refused:
        with pytest.raises(ValueError, match=rf"'(inlet.weight|mean)': .*{refused}"):
            goes(step, each)
    else:
        assert_as_plainly(name, goes(step, each))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_code_holds_of_a_tensor_is_that_of_an_engine(name: str, stage: int) -> None:
    model, each = held(name)
    engine, *_ = fzero.initialize(
        model=model, config=config(stage, train_micro_batch_size_per_gpu=4)
    )
    for batch in each:
        engine.backward(engine(*batch))
        engine.step()
    assert_as_plainly(name, engine.train_step.gather(engine.state))


@pytest.mark.parametrize("name", ["WeightInAList", "WholeDataInAList"])
def test_a_parameter_that_code_holds_is_trained_after_the_module_has_gone_to_meta(
    name: str,
) -> None:
    model, each = held(name)
    step = fzero.make_train_step(model, config(0), loss_fn=OPTIONS["loss_fn"])
    state = step.init()
    model.to("meta")
    for batch in each:
        state, _ = step(state, batch)
    assert_as_plainly(name, step.gather(state))


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
