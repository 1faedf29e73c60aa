"""The law of further names: a forward that keeps a parameter under another attribute
(`self.kept = self.weight`) finds it there in the next one, with the values that it then
has, in every runner.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.nn import functional as F
from training import make

import fzero


class Reads(nn.Module):
    """Its first forward has nothing to read. Each keeps what `kept` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "kept"):
            x = x + F.linear(x, self.kept)
        y: Tensor = self.last(torch.tanh(self.first(x)))
        self.keep()
        return y

    def keep(self) -> None:
        self.kept = self.first.weight


class Once(Reads):
    def keep(self) -> None:
        if not hasattr(self, "kept"):
            self.kept = self.first.weight


class Declared(Reads):
    """`kept` is a parameter that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("kept", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.keep()
        return super().forward(x)


class Alternates(Reads):
    """Another parameter in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.calls = nn.Linear(4, 4), 0

    def keep(self) -> None:
        self.calls += 1
        self.kept = (self.other if self.calls % 2 else self.first).weight


class Deletes(Reads):
    def keep(self) -> None:
        if hasattr(self, "kept"):
            del self.kept
        else:
            self.kept = self.first.weight


class OfTheParent(Reads):
    """The module that keeps a parameter comes before the one that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4))  # type: ignore[assignment]

    def keep(self) -> None:
        self.kept = self.first[0].weight  # type: ignore[index]


class Listed(Reads):
    def keep(self) -> None:
        self.all_kept = [self.first.weight]

    @property
    def kept(self) -> Tensor:
        if "all_kept" not in vars(self):
            raise AttributeError("kept")
        return self.all_kept[0]


KEEPERS = [Reads, Once, Declared, Alternates, Deletes, OfTheParent, Listed]
BATCHES = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(5))


def loss_fn(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def plainly(kind: type[nn.Module]) -> list[float]:
    model, losses = make(kind), list[float]()
    sgd = torch.optim.SGD(model.parameters(), 0.125)
    for x in BATCHES:
        loss = loss_fn(model, x)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses


def config(stage: int) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 0.125}},
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def trained(kind: type[nn.Module], stage: int, runner: str) -> list[float]:
    model, losses = make(kind), list[float]()
    if runner == "engine":
        engine = fzero.initialize(model=model, config=config(stage))[0]
        for x in BATCHES:
            loss = loss_fn(engine, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses
    how: dict[str, Any] = {}
    if runner in ("block", "step"):
        how = {"compile": runner, "compile_backend": "aot_eager"}
    if runner == "block":
        how["units"] = ["last"]
    mesh = fzero.comms.AbstractAxis("data", 2) if runner == "lockstep" else None
    step: Any = fzero.make_train_step(model, config(stage), loss_fn=loss_fn, mesh=mesh, **how)
    if runner == "lockstep":
        step = fzero.simulate(step, 2, by="lockstep")
    state = step.init()
    for x in BATCHES:
        state, metrics = step(state, torch.stack([x, x]) if runner == "lockstep" else x)
        losses.append(metrics.loss.item())
    return losses


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("runner", ["eager", "engine", "lockstep", "block", "step"])
@pytest.mark.parametrize("kind", KEEPERS)
def test_a_parameter_that_a_forward_keeps_is_there_in_the_next_one(
    kind: type[nn.Module], runner: str, stage: int
) -> None:
    if kind is Listed:  # it holds the tensor of its forward, not the module's parameter
        reason = (
            "stores tensors in a list, 'all_kept'"
            if runner == "step"
            else "list .* kept|kept in a list"
        )
        with pytest.raises((ValueError, RuntimeError), match=reason):
            trained(kind, stage, runner)
        return
    assert trained(kind, stage, runner) == pytest.approx(plainly(kind), rel=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_so_it_is_on_two_ranks(ranks: RankPool, stage: int) -> None:
    for runner in ("eager", "engine"):
        for found in ranks(2, trained, Reads, stage, runner):
            assert found == pytest.approx(plainly(Reads), rel=1e-6)


def test_a_further_name_is_the_modules_own_parameter_and_no_entry_of_its_state() -> None:
    model = make(Reads)
    names = list(model.state_dict())
    step = fzero.make_train_step(model, config(3), loss_fn=loss_fn)
    step(step.init(), BATCHES[0])
    assert model.kept is model.first.weight and list(model.state_dict()) == names
    assert copy.deepcopy(model).kept is not model.kept
