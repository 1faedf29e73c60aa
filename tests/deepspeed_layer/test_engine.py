"""A script's own loop through the engine trains as the plain loop does, however it puts
its forwards and backwards.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import SAMPLES, Net, assert_close, criterion, data, made, mine, plainly, settings
from ranks import RankError, RankPool
from torch import Tensor, nn
from training import make, part

import fzero

NUM_STEPS = 3


# --- scripts: of an engine (or the plain model) what goes backward --------------------------------


def _one(model: Any, batch: Any) -> list[Tensor]:
    x, y = batch(0)
    return [criterion(model(x), y)]


def _two_forwards_one_loss(model: Any, batch: Any) -> list[Tensor]:
    (x, y), (z, w) = batch(0), batch(1)
    first, second = model(x), model(z)
    near = (first["logits"] - second["logits"]).square().mean()
    return [criterion(first, y) + criterion(second, w) + near]


def _two_forwards_two_losses(model: Any, batch: Any) -> list[Tensor]:
    (x, y), (z, w) = batch(0), batch(1)
    first, second = model(x), model(z)
    return [criterion(first, y), criterion(second, w)]


def _one_forward_without_a_backward(model: Any, batch: Any) -> list[Tensor]:
    (x, y), (z, _) = batch(0), batch(1)
    model(z)
    outputs = model(x)
    model(z)
    with torch.no_grad():
        model(z)
    return [criterion(outputs, y)]


def _part_of_the_outputs(model: Any, batch: Any) -> list[Tensor]:
    x, _ = batch(0)
    return [model(x)["hidden"][0].square().mean()]


SCRIPTS = [
    _one,
    _two_forwards_one_loss,
    _two_forwards_two_losses,
    _one_forward_without_a_backward,
    _part_of_the_outputs,
]


def _trains(stage: int, script: int, **keys: Any) -> tuple[list[float], dict[str, Tensor]]:
    engine = made(stage, **keys)
    norms: list[Any] = []
    for index in range(NUM_STEPS):
        for loss in SCRIPTS[script](engine, lambda part_: mine(engine, data(10 * index + part_))):  # noqa: B023
            engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, engine.module_state_dict()


@pytest.mark.covering(1)
@pytest.mark.parametrize("script", range(len(SCRIPTS)), ids=[f.__name__ for f in SCRIPTS])
@pytest.mark.parametrize("stage", range(4))
def test_any_order_of_forwards_and_backwards_trains_as_the_plain_loop(
    ranks: RankPool, stage: int, script: int
) -> None:
    plain_norms, expected = plainly(
        lambda m, i: SCRIPTS[script](m, lambda k: data(10 * i + k)), NUM_STEPS
    )
    for norms, weights in ranks(2, _trains, stage, script):
        assert norms == pytest.approx(plain_norms, rel=1e-4)
        assert_close(weights, expected)


def test_a_boundary_of_none_returns_to_counting_micro_steps() -> None:
    engine = made(1, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
    engine.set_gradient_accumulation_boundary(False)
    engine.set_gradient_accumulation_boundary(None)
    boundaries = []
    for _ in range(4):
        x, y = (t.chunk(2)[0] for t in mine(engine, data(0)))
        engine.backward(criterion(engine(x), y))
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    assert (boundaries, engine.global_steps) == ([False, True, False, True], 2)


def _accumulates(stage: int, how: str) -> tuple[list[float], dict[str, Tensor]]:
    engine = made(stage, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
    norms: list[Any] = []
    for index in range(NUM_STEPS):
        for micro in range(2):
            x, y = (t.chunk(2)[micro] for t in mine(engine, data(index)))
            if how == "by hand":
                engine.set_gradient_accumulation_boundary(micro == 1)
            if how == "no_sync" and micro == 0:
                with engine.no_sync():
                    engine.backward(criterion(engine(x), y))
            elif how == "two backwards":  # in each micro-step
                for half in (slice(0, 2), slice(2, 3)):
                    engine.backward(criterion(engine(x[half]), y[half]) * (len(y[half]) / 3))
            else:
                loss = criterion(engine(x), y)
                assert engine.backward(loss) == loss / 2
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (
        NUM_STEPS,
        2 * NUM_STEPS,
        12 * NUM_STEPS,
    )
    return norms, engine.module_state_dict()


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["by count", "by hand", "no_sync", "two backwards"])
@pytest.mark.parametrize("stage", range(4))
def test_micro_steps_add_up_to_the_plain_step(ranks: RankPool, stage: int, how: str) -> None:
    if how == "no_sync" and stage >= 2:
        with pytest.raises(RankError, match="must be used in stage 0 or 1"):
            ranks(2, _accumulates, stage, how)
        return
    plain_norms, expected = plainly(lambda m, i: _one(m, lambda _: data(i)), NUM_STEPS)
    for norms, weights in ranks(2, _accumulates, stage, how):
        assert norms == pytest.approx(plain_norms, rel=1e-4)
        assert_close(weights, expected)


def _engine_and_step(
    stage: int, keys: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    cfg = settings(stage, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2, **keys)
    engine = fzero.initialize(model=make(Net), config=cfg)[0]
    step = fzero.make_train_step(
        make(Net), cfg, loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])
    )
    state = step.init()
    for index in range(NUM_STEPS):
        x, y = mine(engine, data(index))
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            engine.backward(criterion(engine(part_x), part_y))
            engine.step()
        state, metrics = step(state, (x, y))
        assert metrics.grad_norm.item() == engine.get_global_grad_norm()
    return engine.module_state_dict(), step.gather(state)


BF16 = {"bf16": {"enabled": True, "auto_cast": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("keys", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_the_engine_has_the_bits_of_the_train_step(
    ranks: RankPool, stage: int, keys: dict[str, Any]
) -> None:
    for engine, step in ranks(2, _engine_and_step, stage, keys):
        assert all(torch.equal(engine[name], step[name]) for name in step)


def _retains(stage: int) -> dict[str, Tensor]:
    """Two backwards through one graph."""
    engine = made(stage)
    x, y = mine(engine, data(0))
    outputs = engine(x)
    engine.backward(criterion(outputs, y), retain_graph=True)
    engine.backward(outputs["hidden"][1].square().mean())
    engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_graph_that_is_retained_is_gone_through_again(ranks: RankPool, stage: int) -> None:
    def losses(model: nn.Module, index: int) -> list[Tensor]:
        x, y = data(0)
        outputs = model(x)
        return [criterion(outputs, y), outputs["hidden"][1].square().mean()]

    _, expected = plainly(losses, 1)
    for weights in ranks(2, _retains, stage):
        assert_close(weights, expected)


def _in_parts(stage: int) -> dict[str, Tensor]:
    """A step from its parts, where a backward that was not expected comes after the
    last one.
    """
    step = fzero.make_train_step(make(Net), settings(stage))
    state = step.init()
    for index in range(NUM_STEPS):
        window = step.begin(state)
        for part_, is_last in enumerate((False, True, False)):
            x, y = part(data(10 * index + part_), step.rank, step.world_size)
            outputs = step.forward(window, lambda: step.spec.model(x))  # noqa: B023
            window = step.backward(window, criterion(outputs, y), num_parts=3, is_last=is_last)
        state, _ = step.update(window)
    return step.gather(state)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_what_comes_after_the_last_backward_is_added(ranks: RankPool, stage: int) -> None:
    def losses(model: Any, index: int) -> list[Tensor]:
        return [
            criterion(model(data(10 * index + k)[0]), data(10 * index + k)[1]) / 3 for k in range(3)
        ]

    _, expected = plainly(losses, NUM_STEPS)
    for weights in ranks(2, _in_parts, stage):
        assert_close(weights, expected)


def _reduces(script: int) -> dict[Any, Counter[str]]:
    """How often each unit was reduced in each backward."""
    engine = made(3)
    for loss in SCRIPTS[script](engine, lambda part_: mine(engine, data(part_))):
        engine.backward(loss)
    runs = {
        run: events
        for run, events in engine.train_step.runtime.learned.orders.learned.items()
        if run[0] == "backward"
    }
    return {
        run: Counter(event.unit for event in events if event.kind == "reduce")
        for run, events in runs.items()
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("script", range(len(SCRIPTS)), ids=[f.__name__ for f in SCRIPTS])
def test_a_backward_reduces_each_unit_once_however_many_forwards_it_is_of(
    ranks: RankPool, script: int
) -> None:
    for found in ranks(2, _reduces, script):
        assert found and all(counts == dict.fromkeys(counts, 1) for counts in found.values())


def _overflows(stage: int) -> list[Any]:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "auto_cast": True}
    warmup = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 10, "warmup_min_lr": 0.005, "warmup_max_lr": 0.01},
    }
    cfg = settings(stage, fp16=fp16, scheduler=warmup)
    engine, optimizer, _, scheduler = fzero.initialize(model=make(Net), config=cfg)
    seen = []
    for index in range(4):
        x, y = mine(engine, data(index))
        before = engine.module_state_dict()
        loss = criterion(engine(x), y) * (float("inf") if index == 1 else 1.0)
        engine.backward(loss.float())
        engine.step()
        after = engine.module_state_dict()
        same = all(torch.equal(after[name], before[name]) for name in after)
        seen.append(
            (
                optimizer.overflow,
                engine.was_step_applied(),
                same,
                optimizer.loss_scale,
                scheduler.last_batch_iteration,
            )
        )
    return [seen, engine.global_steps, engine.skipped_steps]


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_skips_update_and_schedule_and_counts_as_a_step(
    ranks: RankPool, stage: int
) -> None:
    for seen, num_steps, num_skipped in ranks(2, _overflows, stage):
        assert [row[0] for row in seen] == [False, True, False, False]
        assert [row[1] for row in seen] == [True, False, True, True]
        assert [row[3] for row in seen] == [16.0, 8.0, 8.0, 8.0]
        assert [row[4] for row in seen] == [0, 0, 1, 2]
        assert seen[1][2] and not seen[2][2]
        assert (num_steps, num_skipped) == (4, 1)


# --- errors ---------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_reported_with_what_to_do_instead() -> None:
    engine = made(2)
    x, y = data(0)
    with pytest.raises(RuntimeError, match="must follow a forward"):
        engine.backward(torch.zeros((), requires_grad=True))
    with pytest.raises(RuntimeError, match="must follow a backward"):
        engine.step()
    with pytest.raises(ValueError, match="needs a scalar loss"):
        engine.backward(engine(x)["logits"])
    engine.backward(criterion(engine(x), y))
    engine.step()
    with pytest.raises(RuntimeError, match=r"call engine.step\(\)"):
        engine.optimizer.step()
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018
    assert engine.predict(x).shape == (SAMPLES,)  # of the module


def _goes_on_after_errors(stage: int) -> dict[str, Tensor]:
    """An error between the halves, and one in each half, on all ranks."""
    engine = made(stage)
    for index in range(NUM_STEPS):
        x, y = mine(engine, data(index))
        with pytest.raises(ZeroDivisionError):
            _ = engine(x)["logits"].sum() / (1 // 0)
        if index == 1:
            with pytest.raises(TypeError):
                engine(x, x)
            loss = criterion(engine(x), y)
            loss.register_hook(lambda grad: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
        engine.backward(criterion(engine(x), y))
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_an_error_that_every_rank_meets(ranks: RankPool, stage: int) -> None:
    _, expected = plainly(lambda m, i: _one(m, lambda _: data(i)), NUM_STEPS)
    for weights in ranks(2, _goes_on_after_errors, stage):
        assert_close(weights, expected)


def _goes_on_after_nan(stage: int) -> dict[str, Tensor]:
    engine = made(stage, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
    for index in (0, 1, 2, 3):
        x, y = mine(engine, data(index))
        for micro in range(2):
            loss = criterion(engine(x.chunk(2)[micro]), y.chunk(2)[micro])
            engine.backward(loss * (float("nan") if index == 1 and micro == 0 else 1.0))
            if index == 1 and micro == 1:
                with pytest.raises(FloatingPointError, match="the state was not updated"):
                    engine.step()
            else:
                engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(ranks: RankPool, stage: int) -> None:
    _, expected = plainly(lambda m, i: _one(m, lambda _: data((0, 2, 3)[i])), 3)
    for weights in ranks(2, _goes_on_after_nan, stage):
        assert_close(weights, expected)


def test_gradients_that_an_error_took_are_missed_at_the_end_of_the_accumulation() -> None:
    engine = made(2, train_micro_batch_size_per_gpu=12, gradient_accumulation_steps=2)
    x, y = data(0)
    engine.backward(criterion(engine(x), y))
    engine.step()
    for _ in range(2):
        with pytest.raises(TypeError):
            engine(x, x)
    engine.backward(criterion(engine(x), y))
    with pytest.raises(RuntimeError, match="an error dropped the gradients"):
        engine.step()
    engine.zero_grad()


def test_a_checkpoint_that_is_loaded_after_an_error_lacks_nothing(tmp_path: Path) -> None:
    engine = made(2, train_micro_batch_size_per_gpu=12, gradient_accumulation_steps=2)
    engine.save_checkpoint(tmp_path)
    x, y = data(0)
    criterion(engine(x), y).backward()  # the engine does not see this loss
    engine.step()
    with pytest.raises(TypeError):
        engine(x, x)
    engine.load_checkpoint(tmp_path)
    losses = []
    for index in range(2):
        x, y = data(index)
        losses.append(engine.backward(criterion(engine(x), y)))
        engine.step()
    assert engine.metrics.loss == pytest.approx(float(sum(losses)))


def _changes_the_accumulation(stage: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = made(stage, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=SAMPLES // 2)
    norms: list[Any] = []
    index = 0
    for num in (2, 4, 1):
        engine.set_train_batch_size(num * SAMPLES)
        for at in range(num):
            x, y = mine(engine, data(index))
            engine.backward(criterion(engine(x), y))
            assert engine.is_gradient_accumulation_boundary() == (at == num - 1)
            engine.step()
            index += 1
        norms.append(engine.get_global_grad_norm())
    return norms, engine.module_state_dict()


def test_another_number_of_accumulation_steps_begins_a_whole_accumulation(ranks: RankPool) -> None:
    parts = [range(2), range(2, 6), range(6, 7)]

    def losses(model: Any, index: int) -> list[Tensor]:
        return [criterion(model(data(i)[0]), data(i)[1]) / len(parts[index]) for i in parts[index]]

    plain_norms, expected = plainly(losses, len(parts))
    for norms, weights in ranks(2, _changes_the_accumulation, 2):
        assert norms == pytest.approx(plain_norms, rel=1e-4)
        assert_close(weights, expected)


def test_the_middle_of_an_accumulation_is_reported_where_it_would_be_lost(tmp_path: Path) -> None:
    engine = made(1, gradient_accumulation_steps=3, train_micro_batch_size_per_gpu=SAMPLES)
    x, y = data(0)
    engine.backward(criterion(engine(x), y))
    engine.step()
    with pytest.raises(
        RuntimeError,
        match=r"set_train_batch_size: .* after 1 of 3 micro-steps; call it after an update",
    ):
        engine.set_train_batch_size(SAMPLES)
    with pytest.warns(UserWarning, match="gradients since the last update are not saved"):
        engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    for at in range(3):
        assert engine.is_gradient_accumulation_boundary() == (at == 2)
        engine.backward(criterion(engine(x), y))
        engine.step()
    assert engine.global_steps == 1
