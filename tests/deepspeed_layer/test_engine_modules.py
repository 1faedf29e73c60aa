"""Several engines in one script, and what a script does to its module while an engine
holds it.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import assert_close, mine, settings
from ranks import RankPool
from torch import Tensor, nn
from training import make

import fzero
import fzero.deepspeed as deepspeed

NUM_STEPS = 3


def _generator() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))


class Judge(nn.Module):
    """Runs a part of itself again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(deepspeed.checkpointing.checkpoint(lambda x: torch.tanh(self.mid(x)), x))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _engine(stage: int, model: nn.Module) -> fzero.Engine:
    return fzero.initialize(model=model, config=settings(stage, gradient_clipping=0.0))[0]


def _samples(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(12, 5, generator=generator), torch.randn(12, 6, generator=generator)


def _scores(scores: Tensor, value: float) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, value))


# --- losses that go through two engines -----------------------------------------------------------


def _adversaries(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator, judge = make(_generator), make(Judge)
    engine_g, engine_j = _engine(stage, generator), _engine(stage, judge)
    for index in range(NUM_STEPS):
        noise, real = mine(engine_g, _samples(index))
        engine_j.backward(_scores(engine_j(real), 1))
        fake = engine_g(noise)
        engine_j.backward(_scores(engine_j(fake.detach()), 0))
        engine_j.step()
        judge.requires_grad_(False)  # as scripts do to save its gradients
        engine_g.backward(_scores(engine_j(fake), 1))
        engine_g.step()
        judge.requires_grad_(True)
    return engine_g.module_state_dict(), engine_j.module_state_dict()


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_loss_through_another_engine_trains_its_own_alone(ranks: RankPool, stage: int) -> None:
    generator, judge = make(_generator), make(Judge)
    own_g, own_j = _adamw(generator), _adamw(judge)
    for index in range(NUM_STEPS):
        noise, real = _samples(index)
        fake = generator(noise)
        own_j.zero_grad()
        (_scores(judge(real), 1) + _scores(judge(fake.detach()), 0)).backward()
        own_j.step()
        own_g.zero_grad()
        _scores(judge(fake), 1).backward()
        own_g.step()
    for found_g, found_j in ranks(2, _adversaries, stage):
        assert_close(found_g, generator.state_dict())
        assert_close(found_j, judge.state_dict())


def _jointly(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    first, second = _engine(stage, make(_generator)), _engine(stage, make(Judge))
    for index in range(NUM_STEPS):
        loss = second(first(mine(first, _samples(index))[0])).square().mean()
        first.backward(loss, retain_graph=True)
        second.backward(loss)
        first.step()
        second.step()
    return first.module_state_dict(), second.module_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_of_two_engines_trains_both_when_it_goes_backward_in_each(
    ranks: RankPool, stage: int
) -> None:
    first, second = make(_generator), make(Judge)
    both = [_adamw(first), _adamw(second)]
    for index in range(NUM_STEPS):
        second(first(_samples(index)[0])).square().mean().backward()
        for own in both:
            own.step()
            own.zero_grad()
    for found in ranks(2, _jointly, stage):
        assert_close(found[0], first.state_dict())
        assert_close(found[1], second.state_dict())


def _three_jointly() -> list[list[dict[str, Tensor]]]:
    found = []
    for stage in (2, 3):
        engines = [
            _engine(
                stage,
                make(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), seed),
            )
            for seed in range(3)
        ]
        for index in range(2):
            first, second, third = engines
            loss = third(second(first(mine(first, _samples(index))[0]))).square().mean()
            first.backward(loss, retain_graph=True)
            second.backward(loss, retain_graph=True)
            third.backward(loss)
            for engine in engines:
                engine.step()
        # after a forward of its own another order
        third.backward(third(_samples(9)[0]).square().mean())
        third.step()
        found.append([engine.module_state_dict() for engine in engines])
    return found


def test_three_engines_train_of_one_loss_alike_in_stages_2_and_3(ranks: RankPool) -> None:
    for whole, divided in ranks(2, _three_jointly):
        for expected, weights in zip(whole, divided, strict=True):
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


# --- the module -----------------------------------------------------------------------------------


def _pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_a_copy_of_the_module_is_one_by_itself(copied: Callable[[Any], Any]) -> None:
    engine = _engine(2, make(_generator))
    x = _samples(0)[0]
    twin, expected = copied(engine.module), engine(x).detach()
    torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert not twin(x).any()
    twin(x).sum().backward()
    assert twin[2].bias.grad is not None
    torch.testing.assert_close(engine(x).detach(), expected, rtol=0, atol=0)
    assert inspect.signature(engine.module.forward) == inspect.signature(nn.Sequential().forward)


def _halved(x: Tensor) -> Tensor:
    return x / 2


def test_a_copy_keeps_a_forward_that_stood_in_place_of_its_class() -> None:
    model = make(_generator)
    model.__dict__["forward"] = _halved
    twin = copy.deepcopy(_engine(2, model).module)
    assert twin(torch.ones(2)).tolist() == [0.5, 0.5]


def _loads(module: nn.Module) -> None:
    module.load_state_dict({name: value * 0 for name, value in module.state_dict().items()})


def _writes(module: nn.Module) -> None:
    with torch.no_grad():
        module[0].weight.zero_()


def _replaces(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(torch.zeros(8, 5))


def _adds_a_buffer(module: nn.Module) -> None:
    module[0].register_buffer("late", torch.zeros(1))


def _adds_a_layer(module: nn.Module) -> None:
    module.append(nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_loads, "parameter '0.weight': must not be written to directly, .* modifier_rank"),
        (_writes, "parameter '0.weight': must not be written to directly, .* modifier_rank"),
        (lambda module: module.double(), "parameter '0.weight': must remain a view of the state"),
        (_replaces, "parameter '0.weight': must be the one that was passed to initialize"),
        (_adds_a_buffer, "buffer '0.late': must be there when the step is made"),
        (
            _adds_a_layer,
            "parameter '3.weight': must be the one that was passed to initialize, and it or its "
            "module",
        ),
    ],
)
def test_a_change_of_the_module_that_training_would_lose_is_an_error(
    change: Callable[[Any], Any], message: str
) -> None:
    model = make(_generator)
    engine = fzero.initialize(model=model, config=settings(2, bf16={"enabled": True}))[0]
    x = _samples(0)[0].bfloat16()

    def train() -> None:
        engine.backward(engine(x).float().square().mean())
        engine.step()

    train()
    train()
    change(model)
    with pytest.raises(ValueError, match=message):
        train()


def test_what_is_written_where_there_is_no_master_counts() -> None:
    """Those are the weights themselves."""
    engine, plain = _engine(1, make(_generator)), make(_generator)
    own = _adamw(plain)
    x = _samples(0)[0]
    for model in (engine.module, plain):
        _loads(model)
    for _ in range(2):
        engine.backward(engine(x).sub(1).square().mean())
        engine.step()
        plain(x).sub(1).square().mean().backward()
        own.step()
        own.zero_grad()
    assert_close(engine.module_state_dict(), plain.state_dict())


def _alone_when_gathered(stage: int) -> tuple[bool, int]:
    engine = _engine(stage, make(_generator))
    x = _samples(0)[0]
    expected = engine(x).detach()
    with engine.gathered():
        same = all(
            torch.equal(run(x), expected)
            for run in (engine, engine.module)
            for _ in range(engine.global_rank + 1)
        )
    return same, engine.micro_steps


@pytest.mark.parametrize("stage", [2, 3])
def test_inside_gathered_an_engine_runs_on_each_rank_as_it_likes(
    ranks: RankPool, stage: int
) -> None:
    assert ranks(2, _alone_when_gathered, stage) == [(True, 0)] * 2


def _penalised(stage: int) -> dict[str, Tensor]:
    engine = _engine(stage, make(_generator))
    for index in range(NUM_STEPS):
        engine.backward(_with_penalty(engine, mine(engine, _samples(index)[0])))
        engine.step()
    return engine.module_state_dict()


def _with_penalty(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + grad.square().sum(1).mean()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_penalty_of_gradients_trains_in_every_stage(ranks: RankPool, stage: int) -> None:
    plain = make(_generator)
    own = _adamw(plain)
    for index in range(NUM_STEPS):
        own.zero_grad()
        _with_penalty(plain, _samples(index)[0]).backward()
        own.step()
    for found in ranks(2, _penalised, stage):
        assert_close(found, plain.state_dict())


# --- parts of the module that the script calls by themselves --------------------------------------


class Pair(nn.Module):
    """Two encoders and an auxiliary head; its forward runs them, or a part by name."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = nn.Linear(5, 4), nn.Linear(6, 4), nn.Linear(4, 2)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.image(x))

    def penalty(self) -> Tensor:
        return torch.stack([param.square().sum() for param in self.parameters()]).sum()

    def forward(self, part: str, *inputs: Tensor) -> Tensor:
        if part == "both":
            return (self.encode(inputs[0]) * self.text(inputs[1])).square().mean()
        return getattr(self, part)(*inputs)  # type: ignore[no-any-return]


INSIDE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a method": lambda model, x, y: model("encode", x).square().mean(),
    "a submodule": lambda model, x, y: model("image", x).square().mean(),
    "a method beside a forward": lambda model, x, y: (
        model("both", x, y) + model("head", model("encode", x)).mean()
    ),
    "a submodule of an output": lambda model, x, y: (
        model("head", model("encode", x)).square().mean()
    ),
    "a penalty": lambda model, x, y: model("both", x, y) + 0.1 * model("penalty"),
}
"""The remedy that the error names."""


def _losses_of_weights() -> tuple[list[str], bool]:
    """The errors of losses by weights that are divided, and whether anything has
    changed.
    """
    engine, (x, y) = _engine(3, Pair()), _samples(0)
    before, errors = copy.deepcopy(engine.module_state_dict()), []
    for loss_of in (
        engine.module.penalty,
        lambda: (x @ engine.module.image.weight.T).square().mean(),
    ):
        with pytest.raises(RuntimeError) as caught:
            engine.backward(engine("both", x, y) + loss_of())
        errors.append(str(caught.value))
    return errors, any(
        not torch.equal(value, before[key]) for key, value in engine.module_state_dict().items()
    )


def test_in_stage_3_a_weight_outside_of_the_forward_is_refused_with_the_remedy_and_trains_nothing(
    ranks: RankPool,
) -> None:
    for errors, has_changed in ranks(2, _losses_of_weights):
        assert not has_changed and all(
            "compute inside the engine's forward" in error for error in errors
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", INSIDE)
def test_parts_that_the_forward_runs_by_name_train_as_in_a_plain_loop(
    name: str, stage: int
) -> None:
    torch.manual_seed(0)
    engine, (x, y) = _engine(stage, Pair()), _samples(0)
    torch.manual_seed(0)
    plain = Pair()
    optimizer = _adamw(plain)
    for _ in range(NUM_STEPS):
        engine.backward(INSIDE[name](engine, x, y))
        engine.step()
        optimizer.zero_grad(set_to_none=False)
        for param in plain.parameters():
            # a state decays what got no gradient, as DeepSpeed does
            param.grad = torch.zeros_like(param)
        INSIDE[name](plain, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(
        engine.module_state_dict(), dict(plain.named_parameters()), rtol=1e-5, atol=1e-5
    )
