"""The laws of simulated ranks: a job's bits in lockstep, and whatever goes wrong told as a job would."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import pytest
import torch
from ranks import RankPool
from test_models import bert, gpt2, images, resnet, text
from torch import Tensor, nn
from training import Odd, Plain, adamw, config, make, part, tokens, train_plainly, vectors

import fzero
from fzero.lockstep import Hub, StuckError
from fzero.simulate import stacked

TWO_MICRO_STEPS = {"train_batch_size": 24, "gradient_accumulation_steps": 2}
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


class Noisy(nn.Module):
    """Random numbers in the forward, running statistics, and a count of its own in Python."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)) for _ in range(3)
        )
        self.num_calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_calls += 1
        for block in self.blocks:
            x = x + block(x) + 0.1 * torch.randn_like(x) / self.num_calls
        return nn.functional.mse_loss(x, y)


class Branching(Plain):
    """Runs some of its blocks only, by data."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index % 2 == int(x.sum() > 0):
                x = block(x)
        return nn.functional.mse_loss(x, y)


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    cfg: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}


CASES = {
    "plain": Case(Plain, vectors),
    "odd": Case(Odd, functools.partial(tokens, size=24), TWO_MICRO_STEPS),
    "noisy": Case(Noisy, functools.partial(vectors, size=24), TWO_MICRO_STEPS),
    "checkpointed": Case(Noisy, vectors, {}, {"units": ["blocks.*"], "checkpoint": 1}),
    "bf16": Case(Odd, tokens, {"bf16": {"enabled": True}}),
    "overflows": Case(
        Plain, vectors, {"fp16": {"enabled": True, "initial_scale_power": 24, "auto_cast": True, "hysteresis": 1}}
    ),
    "autocast": Case(Plain, vectors, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "muon": Case(Odd, tokens, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    "lamb": Case(Odd, tokens, {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
    "gpt2": Case(gpt2, text),  # with dropout
    "bert": Case(bert, text, {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}),
    "resnet": Case(resnet, images),
    "negotiated": Case(Branching, vectors, {}, {"schedule": "negotiated"}),
}


def _step(case: Case, stage: int) -> fzero.TrainStep:
    return fzero.make_train_step(make(case.model), config(stage) | {"optimizer": ADAM} | case.cfg, **case.options)


def _on_a_rank(case: str, stage: int, num_steps: int) -> tuple[Any, list[fzero.Metrics]]:
    step = _step(CASES[case], stage)
    state, curve = step.init(), []
    for index in range(num_steps):
        state, metrics = step(state, part(CASES[case].data(index), step.rank, step.world_size))
        curve.append(metrics)
    return state, curve


def for_ranks(batch: Any, world_size: int) -> Any:
    """A global batch as the stacked batches of the ranks."""
    return stacked([part(batch, rank, world_size) for rank in range(world_size)])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("case", CASES)
def test_ranks_in_lockstep_have_the_bits_of_as_many_processes(
    ranks: RankPool, case: str, stage: int, world_size: int
) -> None:
    if (len(case) + stage + world_size) % 3 and case not in ("odd", "noisy"):
        pytest.skip("every third combination")
    on_ranks = ranks(world_size, _on_a_rank, case, stage, 3)
    simulated = fzero.simulate(_step(CASES[case], stage), world_size)
    state = simulated.init()
    for index in range(3):
        state, metrics = simulated(state, for_ranks(CASES[case].data(index), world_size))
        assert_same(metrics, on_ranks[0][1][index])
    assert_same(state, stacked([of_rank for of_rank, _ in on_ranks]))


def assert_same(state: Any, other: Any) -> None:
    """Both have the same structure, shapes, dtypes and bits."""
    paths, leaves, treespec = optree.tree_flatten_with_path(state)
    others, same = optree.tree_flatten(other)
    assert same == treespec
    for path, x, y in zip(paths, leaves, others, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=lambda text, path=path: f"{path}: {text}")


def test_a_rank_in_lockstep_keeps_what_the_model_counts_for_itself() -> None:
    simulated = fzero.simulate(_step(CASES["noisy"], 0), 3)
    simulated(simulated.init(), for_ranks(vectors(0, 24), 3))
    assert [rank.recipe.model.num_calls for rank in simulated.steps] == [2] * 3  # micro-steps


@pytest.mark.parametrize("stage", [0, 3])
def test_so_many_ranks_are_the_plain_loop_on_the_global_batch(stage: int) -> None:
    def data(index: int) -> Any:
        return tokens(index, 64)

    world_size = 32
    simulated = fzero.simulate(fzero.make_train_step(make(Odd), config(stage)), world_size)
    state, curve = simulated.init(), []
    for index in range(3):
        state, metrics = simulated(state, for_ranks(data(index), world_size))
        curve.append((metrics.loss.item(), metrics.grad_norm.item()))
    plain_curve, plain_weights = train_plainly(Odd, data, adamw, num_steps=3)
    # Rounding only, as in test_stages: a mean of means is another sum, and AdamW turns last bits into parts of lr = 1e-2.
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(plain_curve), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(simulated.gather(state), plain_weights, rtol=0, atol=1e-5)


def test_a_simulated_state_is_donated_and_a_simulated_step_leaves_the_process_as_it_was() -> None:
    simulated = fzero.simulate(_step(CASES["noisy"], 2), 2)
    state = simulated.init()
    torch.manual_seed(3)
    before, num_threads = torch.get_rng_state(), threading.active_count()
    new, _ = simulated(state, for_ranks(vectors(0, 24), 2))
    assert torch.equal(torch.get_rng_state(), before) and threading.active_count() == num_threads
    assert all(new.params[key] is state.params[key] for key in state.params)


def test_an_undonated_simulated_state_stays_good() -> None:
    simulated = fzero.simulate(fzero.make_train_step(make(Plain), config(2), donate=False), 3)
    state = simulated.init()
    kept = optree.tree_map(torch.clone, state)
    new, _ = simulated(state, for_ranks(vectors(0), 3))
    assert_same(state, kept)
    assert not any(torch.equal(new.params[key], state.params[key]) for key in state.params)


def test_micro_batches_may_come_from_an_iterator() -> None:
    cfg = config(2) | {"train_batch_size": 12, "gradient_accumulation_steps": 3}
    simulated = fzero.simulate(fzero.make_train_step(make(Plain), cfg), 2)
    at_once, _ = simulated(simulated.init(), for_ranks(vectors(0), 2))
    given = [stacked([part(part(vectors(0), rank, 2), index, 3) for rank in range(2)]) for index in range(3)]
    one_by_one, _ = simulated(simulated.init(), iter(given))
    assert_same(at_once, one_by_one)
    with pytest.raises(ValueError, match="must give 3 micro-batches"):
        simulated(simulated.init(), iter(given[:2]))


def test_evaluation_and_weights_are_those_of_one_process() -> None:
    step = fzero.make_train_step(make(Odd), config(3))
    simulated = fzero.simulate(step, 4)
    state, alone = simulated.init(), step.init()
    assert_same(simulated.gather(state), step.gather(alone))
    loss = simulated.evaluate(state, for_ranks(tokens(0), 4))
    torch.testing.assert_close(loss, step.evaluate(alone, tokens(0)), rtol=2e-6, atol=0)  # a mean of four means


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_an_error_on_one_rank_is_raised_with_its_rank() -> None:
    simulated = fzero.simulate(_step(CASES["plain"], 3), 3)
    state = simulated.init()
    kept = optree.tree_map(torch.clone, state)
    batch = for_ranks(vectors(0), 3)
    batch[0][1].fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"not finite on ranks \[1\]"):
        simulated(state, batch)
    state, _ = simulated(kept, for_ranks(vectors(0), 3))

    def fails_on_rank_2(rank: int) -> Any:
        if rank == 2:
            raise KeyError("only here")
        return simulated.steps[rank].evaluate(fzero.unstacked(state, 3)[rank], part(vectors(0), rank, 3))

    with pytest.raises(KeyError, match="only here") as raised:
        simulated._run(fails_on_rank_2)
    assert "rank 2 of 3" in raised.value.__notes__[0]
    with pytest.raises(fzero.CollectiveError, match="the ranks are in different steps"):
        simulated.evaluate(state, for_ranks(vectors(0), 3))


def test_ranks_that_wait_for_each_other_are_told_so() -> None:
    hub = Hub(2)
    with pytest.raises(StuckError, match="rank 0 waits for rank 1, which waits for others, too"):
        hub.run(lambda rank: hub.receive(hub.expect(1 - rank, rank)))
    with pytest.raises(StuckError, match="rank 1 waits for rank 0, which has ended"):
        hub.run(lambda rank: rank and hub.receive(hub.expect(0, 1)))
    assert hub.run(lambda rank: rank) == [0, 1]


def test_messages_arrive_in_order_whenever_they_are_looked_at() -> None:
    hub = Hub(2)

    def late(rank: int) -> list[Any]:
        for value in "abc":
            hub.send(rank, 1 - rank, value + str(rank))
        expected = [hub.expect(1 - rank, rank) for _ in range(3)]
        return [hub.receive(message) for message in reversed(expected)]

    assert hub.run(late) == [["c1", "b1", "a1"], ["c0", "b0", "a0"]]


def test_ranks_whose_models_run_different_units_are_told_to_negotiate() -> None:
    cfg = config(3)
    simulated = fzero.simulate(fzero.make_train_step(make(Branching), cfg), 2)
    x, y = for_ranks(vectors(0), 2)
    x[0], x[1] = x[0].abs(), -x[1].abs()
    state, _ = simulated(simulated.init(), (x, y))
    with pytest.raises(fzero.ScheduleError, match="schedule='negotiated'"):
        simulated(state, (-x, y))


class Uncopyable(Plain):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("holds a connection")


def test_what_cannot_be_simulated_is_told() -> None:
    step = fzero.make_train_step(make(Plain), config(0))
    with pytest.raises(ValueError, match="world_size must be positive, got 0"):
        fzero.simulate(step, 0)
    simulated = fzero.simulate(step, 2)
    with pytest.raises(ValueError, match=r"leading dimension of 2 ranks, got shape \(12, 16\)"):
        simulated(simulated.init(), vectors(0))
    with pytest.raises(ValueError, match=r"leading dimension of 2 ranks, got shape \(\)"):
        simulated(step.init(), for_ranks(vectors(0), 2))
    with pytest.raises(ValueError, match=r"Uncopyable must be one that can be copied.*holds a connection"):
        fzero.simulate(fzero.make_train_step(Uncopyable(), config(0)), 2)
