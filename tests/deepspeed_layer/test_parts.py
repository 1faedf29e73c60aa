"""Parts of the engine's module that a script calls by themselves, and weights that a
loss uses, train as in the plain loop.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import assert_close, settings
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import adamw, make, part

import fzero
import fzero.deepspeed as deepspeed

STEPS, WIDTH, SAMPLES = 3, 6, 12


class Net(nn.Module):
    """Two encoders of several units, a head beside the forward, tied weights, a frozen
    part and a 0-d parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(2)
        )
        self.text = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH))
        self.aux, self.back = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH, bias=False)
        self.back.weight = nn.Parameter(
            torch.empty(WIDTH, 4).normal_(generator=torch.Generator().manual_seed(0))
        )
        self.twin = nn.Linear(WIDTH, 8)
        self.twin.weight = self.text[0].weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.frozen(x))
        return x

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        return self.scale.exp() * self.encode(x) + self.text(y)

    def everything(self, x: Tensor) -> Tensor:
        return (
            self.encode(x).square().mean()
            + self.back(self.aux(self.twin(x)[:, :WIDTH])).square().mean()
        )


def data(index: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(70 + index))


Losses = Callable[[Any, Any, Tensor], Tensor]
"""The loss of a batch: of what is called like the model (the engine), and of the module
whose parts are called.
"""


def _methods(model: Any, module: Any, x: Tensor) -> Tensor:
    return (module.scale.exp() * module.encode(x) + module.text(x)).square().mean()


def _submodules(model: Any, module: Any, x: Tensor) -> Tensor:
    return (
        module.back(module.aux(module.blocks[1](x))).square().mean()
        + module.twin(x).square().mean()
    )


def _head_beside(model: Any, module: Any, x: Tensor) -> Tensor:
    return model(x).square().mean() + module.aux(module.encode(x)).square().mean()


def _part_before(model: Any, module: Any, x: Tensor) -> Tensor:
    return model(module.back(module.aux(x)), x).square().mean()


def _checkpointed(model: Any, module: Any, x: Tensor) -> Tensor:
    return checkpoint(module.everything, x, use_reentrant=False) + model(x).square().mean()


def _checkpointed_alone(model: Any, module: Any, x: Tensor) -> Tensor:
    return (
        checkpoint(lambda x: module.text(torch.tanh(module.blocks[1](x))), x, use_reentrant=False)
        .square()
        .mean()
    )


SUBMODULES: dict[str, Losses] = {
    f.__name__: f
    for f in (_submodules, _head_beside, _part_before, _checkpointed, _checkpointed_alone)
}


def _decay(model: Any, module: Any, x: Tensor) -> Tensor:
    return model(x).square().mean() + 0.1 * sum((p**2).sum() for p in module.parameters())


def _decay_alone(model: Any, module: Any, x: Tensor) -> Tensor:
    return 0.1 * sum((p**2).sum() for p in module.parameters() if p.requires_grad) * x.abs().mean()


def _tied_by_hand(model: Any, module: Any, x: Tensor) -> Tensor:
    return model(x).square().mean() + nn.functional.linear(x, module.aux.weight).square().mean()


def _penalty(model: Any, module: Any, x: Tensor) -> Tensor:
    weight = module.text[0].weight
    (grad,) = torch.autograd.grad(module.text(x).square().mean(), weight, create_graph=True)
    return model(x).square().mean() + grad.square().sum()


def _weight_itself(model: Any, module: Any, x: Tensor) -> Tensor:
    return module.scale


WEIGHTS: dict[str, Losses] = {
    f.__name__: f for f in (_methods, _decay, _decay_alone, _tied_by_hand, _penalty, _weight_itself)
}
LOSSES = SUBMODULES | WEIGHTS


def plainly(
    losses: Losses, *, clip: float = 1.0, of: Callable[[int], list[Tensor]] | None = None
) -> Any:
    """The oracle: gradient norms and weights of one process; `of`: the parts of step i,
    whose losses' mean it takes.
    """
    module = make(Net)
    own = adamw([p for p in module.parameters() if p.requires_grad])
    norms = []
    for index in range(STEPS):
        parts = [data(index)] if of is None else of(index)
        for x in parts:
            (losses(module, module, x) / len(parts)).backward()
        trained = [p for p in module.parameters() if p.requires_grad]
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip)))
        own.step()
        own.zero_grad()
    return norms, module.state_dict()


def made(stage: float, **keys: Any) -> fzero.Engine:
    """An engine; in "stage 3.5" it is 3, and small parameters stay whole."""
    model = make(Net)
    trained = [p for p in model.parameters() if p.requires_grad]
    cfg = settings(int(stage), **keys)
    cfg["zero_optimization"]["stage3_param_persistence_threshold"] = 20 if stage == 3.5 else 0
    return fzero.initialize(model=model, model_parameters=trained, config=cfg)[0]


def _trains(stage: float, loss: str, how: str) -> Any:
    accumulates = how in ("accumulates", "no_sync")
    keys: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2 if accumulates else 1,
    }
    engine = made(stage, **keys)
    norms: list[float] = []
    for index in range(STEPS):
        own = part(data(index), engine.global_rank, engine.world_size)
        for number, x in enumerate(own.chunk(2) if accumulates else [own]):
            found = LOSSES[loss](engine, engine.module, x)
            if how == "direct":
                found.backward()
            elif how == "no_sync" and number == 0:
                with engine.no_sync():
                    engine.backward(found)
            else:
                engine.backward(found)
            engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
        assert all(p.grad is None for p in engine.module.parameters())
    return norms, engine.module_state_dict()


def _check(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert_close(found[1], expected[1])


PAIRS = [
    *itertools.product((0, 1, 2), LOSSES),
    *itertools.product((3, 3.5), SUBMODULES),
    (3.5, "_methods"),
]
"""Stages and the losses that they train: in stage 3 a weight that is divided has no
values outside of a forward.
"""


@pytest.mark.covering(1)
@pytest.mark.parametrize(("stage", "loss"), PAIRS)
def test_parts_and_weights_outside_the_forward_train_as_in_the_plain_loop(
    ranks: RankPool, stage: float, loss: str
) -> None:
    for found in ranks(2, _trains, stage, loss, "engine"):
        _check(found, _expected(loss, 2, "engine"))


def _expected(loss: str, world_size: int, how: str) -> Any:
    num = 2 if how in ("accumulates", "no_sync") else 1

    def parts(index: int) -> list[Tensor]:
        own = [part(data(index), rank, world_size) for rank in range(world_size)]
        return [x for shard in own for x in shard.chunk(num)]

    return plainly(LOSSES[loss], of=parts)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("stage", "how"),
    [
        *itertools.product((0, 1, 2, 3, 3.5), ("direct", "accumulates")),
        (0, "no_sync"),
        (1, "no_sync"),
    ],
)
def test_they_do_however_the_backward_is_started_and_gradients_are_collected(
    ranks: RankPool, stage: float, how: str
) -> None:
    for loss in (
        ("_submodules", "_head_beside") if stage >= 3 else ("_methods", "_head_beside", "_decay")
    ):
        for found in ranks(2, _trains, stage, loss, how):
            _check(found, _expected(loss, 2, how))


@pytest.mark.parametrize("world_size", [1, 3, pytest.param(4, marks=pytest.mark.long)])
def test_they_do_on_any_number_of_ranks(ranks: RankPool, world_size: int) -> None:
    for stage in (0, 1, 2, 3, 3.5):
        for loss in ("_head_beside", "_submodules"):
            for found in ranks(world_size, _trains, stage, loss, "engine"):
                _check(found, _expected(loss, world_size, "engine"))


# --- ranks that differ, and steps that differ -----------------------------------------------------

DRAWN: list[Losses] = [
    lambda model, module, x: model(x).square().mean(),
    lambda model, module, x: module.aux(x).square().mean(),
    _head_beside,
    lambda model, module, x: model(x).square().mean() + model(x + 1).square().mean(),
    _methods,
]
"""Losses that a rank may have while another has another of them: of forwards only, of
parts only, and of both.
"""


def _drawn(index: int, rank: int) -> Losses:
    return DRAWN[(2 * index + 3 * rank + index // 2) % len(DRAWN)]


def _trains_apart(stage: float) -> Any:
    engine = made(stage)
    for index in range(6):
        x = part(data(index), engine.global_rank, engine.world_size)
        engine.backward(_drawn(index, engine.global_rank)(engine, engine.module, x))
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", range(3))
def test_each_rank_and_each_step_may_use_other_parts(ranks: RankPool, stage: int) -> None:
    module = make(Net)
    own = adamw([p for p in module.parameters() if p.requires_grad])
    for index in range(6):
        for rank in range(3):
            (_drawn(index, rank)(module, module, part(data(index), rank, 3)) / 3).backward()
        trained = [p for p in module.parameters() if p.requires_grad]
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        nn.utils.clip_grad_norm_(trained, 1.0)
        own.step()
        own.zero_grad()
    for found in ranks(3, _trains_apart, stage):
        assert_close(found, module.state_dict())


# --- precision, flags, and what stays as it is ----------------------------------------------------


def _scales(stage: float, how: str) -> list[float]:
    fp16 = {"enabled": True, "initial_scale_power": 8}
    engine = made(stage, **({"bf16": {"enabled": True}} if how == "bf16" else {"fp16": fp16}))
    dtype = torch.bfloat16 if how == "bf16" else torch.float16
    norms = []
    for index in range(STEPS):
        x = part(data(index), engine.global_rank, engine.world_size).to(dtype)
        loss = _methods(engine, engine.module, x).float()
        if how == "fp16 direct":
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
    return norms


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["bf16", "fp16", "fp16 direct"])
@pytest.mark.parametrize("stage", range(3))
def test_their_gradients_have_the_loss_scale_of_all_others(
    ranks: RankPool, stage: int, how: str
) -> None:
    expected, _ = _expected("_methods", 2, "engine")
    for norms in ranks(2, _scales, stage, how):
        assert norms == pytest.approx(expected, rel=0.03)


def _without_grad(stage: float) -> Any:
    engine = made(stage)
    x = part(data(0), engine.global_rank, engine.world_size)
    with torch.no_grad():
        engine.module.encode(x)
    loss = engine(x).square().mean()
    # nobody's gradients
    grads = torch.autograd.grad(engine.module.aux(x).sum(), list(engine.module.aux.parameters()))
    engine.backward(loss)
    engine.step()
    return (
        [g.sum().item() for g in grads],
        engine.get_global_grad_norm(),
        engine.module_state_dict(),
    )


def test_parts_without_gradients_and_gradients_by_weights_change_nothing(ranks: RankPool) -> None:
    for stage in range(3):
        for grads, norm, weights in ranks(2, _without_grad, stage):
            module = make(Net)
            assert all(grads)
            own = adamw([p for p in module.parameters() if p.requires_grad])
            module(data(0)).square().mean().backward()
            trained = [p for p in module.parameters() if p.requires_grad]
            for p in trained:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(trained, 1.0)), rel=1e-4)
            own.step()
            assert_close(weights, module.state_dict())


def test_gradients_of_a_dropped_backward_do_not_count() -> None:
    for stage in range(3):
        engine, other = made(stage), made(stage)
        x = data(0)
        engine.backward(engine.module.encode(x).sum())
        engine.zero_grad()
        for one in (engine, other):
            one.backward(_head_beside(one, one.module, x))
            one.step()
        assert_close(engine.module_state_dict(), other.module_state_dict(), tolerance=0)


def test_stage_0_shows_them_in_grad() -> None:
    engine, module = (
        made(0, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=1),
        make(Net),
    )
    for index in range(2):
        engine.backward(_methods(engine, engine.module, data(index)))
        (_methods(module, module, data(index)) / 2).backward()
        for own, plain in zip(engine.module.parameters(), module.parameters(), strict=True):
            if plain.grad is not None:
                torch.testing.assert_close(own.grad, plain.grad)
        engine.step()


def test_a_backward_that_uses_nothing_of_the_module_is_refused_before_anything_is_sent() -> None:
    engine = made(1)
    for call in (engine.backward, engine.scale):
        with pytest.raises(
            RuntimeError,
            match="must follow a forward since the last update, or be given a loss that uses",
        ):
            call(torch.ones((), requires_grad=True) * 2)
    engine.backward(engine.module.aux(data(0)).sum())
    engine.step()
    assert engine.global_steps == 1


def test_another_engines_backward_drops_them_as_it_drops_those_of_forwards() -> None:
    one, two = made(1), made(1)
    before = two.module_state_dict()
    x = data(0)
    one.backward(two.module.encode(one(x)).square().mean())
    one.step()
    with pytest.raises(RuntimeError, match="must follow a backward"):
        two.step()
    assert_close(two.module_state_dict(), before, tolerance=0)
    one.backward(one(x).square().mean())
    two.backward(two(x).square().mean())


def test_a_destroyed_engine_gives_the_module_its_gradients_back_and_is_freed() -> None:
    engine = made(2)
    module, x = engine.module, data(0)
    engine.backward(module.encode(x).sum())
    engine.step()
    engine.destroy()
    found = weakref.ref(engine.outside_grads)
    module.aux(x).sum().backward()
    assert module.aux.weight.grad is not None
    del engine
    gc.collect()
    assert found() is None


# --- what is around a part ------------------------------------------------------------------------


class Chain(nn.Module):
    """A recurrent layer, blocks that its forward may checkpoint, and a head."""

    reentrant: bool | None = None
    """How the forward checkpoints its blocks; None does not."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(x[None])[0][0]
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return self.head(x)

    def aside(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def fixed(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.head(self.blocks[0](x))


def _beside(model: Any, module: Any, x: Tensor) -> Tensor:
    return model(x).square().mean() + module.aside(x)


def _again(model: Any, module: Any, x: Tensor) -> Tensor:
    part_ = checkpoint(module.blocks[1], x.clone().requires_grad_(), use_reentrant=True)
    return model(x).square().mean() + part_.square().mean()


def _is_checkpointed(module: Any, index: int, *, reentrant: bool) -> None:
    module.reentrant = reentrant


def _freezes(module: Any, index: int) -> None:
    module.head.requires_grad_(index != 1)


AROUND: dict[str, tuple[Losses, Callable[[Any, int], None]]] = {
    "a recurrent part": (
        lambda model, module, x: module.rnn(x[None])[0].square().mean(),
        lambda module, index: None,
    ),
    "a target without gradients": (
        lambda model, module, x: (model(x) - module.fixed(x)).square().mean(),
        lambda module, index: None,
    ),
    "parts of outputs": (
        lambda model, module, x: module.head(module.blocks[0](model(x))).square().mean(),
        lambda module, index: None,
    ),
    "one part many times": (
        lambda model, module, x: sum(module.blocks[i % 3](x).square().mean() for i in range(7)),
        lambda module, index: None,
    ),
    "checkpoints in the forward": (_beside, functools.partial(_is_checkpointed, reentrant=False)),
    "reentrant ones": (
        lambda model, module, x: _beside(model, module, x.clone().requires_grad_()),
        functools.partial(_is_checkpointed, reentrant=True),
    ),
    "a reentrant checkpoint around a part": (_again, lambda module, index: None),
    "a part that is frozen for a step": (_beside, _freezes),
    "only parts, frozen for a step": (lambda model, module, x: module.aside(x), _freezes),
}


def _trains_around(stage: int) -> dict[str, float]:
    """By case, how far the weights are from the plain loop's."""
    apart = {}
    for name, (loss_of, prepare) in AROUND.items():
        plain = make(Chain)
        own = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
        cfg = settings(stage, gradient_clipping=0.0)
        cfg["optimizer"]["params"]["weight_decay"] = 0.0  # what a loss does not use, stays as it is
        engine = fzero.initialize(model=make(Chain), config=cfg)[0]
        for index in range(STEPS):
            prepare(engine.module, index)
            prepare(plain, index)
            shards = [
                part(data(index), rank, engine.world_size) for rank in range(engine.world_size)
            ]
            engine.backward(loss_of(engine, engine.module, shards[engine.global_rank]))
            engine.step()
            own.zero_grad()
            for x in shards:
                (loss_of(plain, plain, x) / engine.world_size).backward()
            own.step()
        expected = plain.state_dict()
        apart[name] = max(
            (x - expected[key]).abs().max().item() for key, x in engine.module_state_dict().items()
        )
    return apart


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_parts_train_beside_checkpoints_and_frozen_parts_too(ranks: RankPool, stage: int) -> None:
    for apart in ranks(2, _trains_around, stage):
        assert apart.keys() == AROUND.keys() and max(apart.values()) < 1e-6, apart


MIXED = [
    lambda model, module, x: model(x).square().mean(),
    AROUND["a recurrent part"][0],
    AROUND["a target without gradients"][0],
    lambda model, module, x: module.aside(x),
    lambda model, module, x: _beside(model, module, x) + model(2 * x).square().mean(),
    _again,
    lambda model, module, x: checkpoint(module.aside, x, use_reentrant=False),
    AROUND["parts of outputs"][0],
]


def _mixes(stage: int) -> float:
    """Four micro-steps of different losses make an update, whose backwards share their
    learned orders.
    """
    plain = make(Chain)
    own = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    cfg = settings(
        stage,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=4,
        gradient_clipping=0.0,
    )
    cfg["optimizer"]["params"]["weight_decay"] = 0.0
    engine = fzero.initialize(model=make(Chain), config=cfg)[0]
    for index, loss_of in enumerate(MIXED * 2):
        shards = [part(data(index), rank, engine.world_size) for rank in range(engine.world_size)]
        engine.backward(loss_of(engine, engine.module, shards[engine.global_rank]))
        engine.step()
        for x in shards:
            (loss_of(plain, plain, x) / (4 * engine.world_size)).backward()
        if index % 4 == 3:
            own.step()
            own.zero_grad()
    expected = plain.state_dict()
    return max(
        (x - expected[key]).abs().max().item() for key, x in engine.module_state_dict().items()
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_losses_of_all_kinds_train_in_one_accumulation(ranks: RankPool, stage: int) -> None:
    """The engine has one order for each backward of the same forwards, and leaves it
    where a checkpoint runs parts again.
    """
    assert max(ranks(3, _mixes, stage)) < 1e-6


def _evaluates() -> tuple[float, float, bool, str]:
    """In stage 3: a part without gradients, its hook, what a destroyed engine leaves,
    and a compiled engine's error.
    """
    engine, plain, x = made(3), make(Net), data(0)
    seen: list[Tensor] = []
    hook = engine.module.text.register_forward_hook(
        lambda module, inputs, output: seen.append(output)
    )
    with torch.no_grad():
        apart = float((engine.module.encode(x) - plain.encode(x)).abs().max())
        apart = max(apart, float((engine.module.text(x) - plain.text(x)).abs().max()))
    hook.remove()
    with engine.gathered():
        within = float((engine.module.text(x) - seen[0]).abs().max())
    engine.destroy()
    is_left = any("forward" in module.__dict__ for module in engine.module.modules())
    compiled = made(3)
    compiled.compile(backend="aot_eager")
    with pytest.raises(RuntimeError) as caught:
        compiled.module.text(x)
    return apart, within, is_left, str(caught.value)


def test_in_stage_3_a_part_has_its_values_without_gradients_and_a_destroyed_engine_leaves_nothing(
    ranks: RankPool,
) -> None:
    for apart, within, is_left, error in ranks(2, _evaluates):
        assert max(apart, within) < 1e-6 and not is_left and "is sharded over the ranks" in error


def _loses() -> str:
    engine, x = made(3), data(0)
    with (
        pytest.raises(ValueError) as caught,
        deepspeed.zero.GatheredParameters(list(engine.module.parameters())),
    ):
        engine.module.text(x).sum().backward()
    return str(caught.value)


def test_a_gradient_that_leaving_gathered_parameters_would_lose_is_an_error(
    ranks: RankPool,
) -> None:
    for error in ranks(2, _loses):
        assert "must be used inside the forward" in error
