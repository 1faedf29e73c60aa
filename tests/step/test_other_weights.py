"""The laws of other weights: a state with an average of weights evaluates, gathers,
saves and exports that average.
"""

from __future__ import annotations

import functools
from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from torch import Tensor
from training import Plain, config, make, part, vectors

import fzero

BF16 = {"bf16": {"enabled": True, "auto_cast": True}}
MODEL = functools.partial(Plain, num_blocks=2)


def _averaged(step: Any, batches: list[Any]) -> tuple[Any, Any, dict[str, Tensor]]:
    """Three steps: the state before the last one and after it, and a running mean of
    the weights.
    """
    state = step.init()
    mean = optree.tree_map(lambda x: x.double(), step.weights(state))
    for batch in batches:
        before = optree.tree_map(torch.clone, state)
        state, _ = step(state, batch)
        mean = optree.tree_map(
            lambda x, weight: torch.lerp(x, weight.double(), 0.25), mean, step.weights(state)
        )
    return before, state, mean


def _check(
    step: Any, batches: list[Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
    """The mean by name, what a state with it gathers, what it evaluates to, and what a
    new state of those weights does.
    """
    before, state, mean = _averaged(step, batches)
    given = optree.tree_map(torch.clone, mean)
    other = step.with_weights(state, mean)
    whole, batch = step.gather(other), batches[0]
    loss = step.evaluate(other, batch)
    assert step.evaluate(state, batch) != loss, "the mean must make a difference"
    assert all(map(torch.equal, mean.values(), given.values()))
    again = step.with_weights(other, step.weights(before))  # to and fro, with the state's own
    assert all(map(torch.equal, step.gather(again).values(), step.gather(before).values()))
    (key, weight), *_ = mean.items()
    for bad, reported in (
        ({"nobody": weight}, "'nobody' must be one of"),
        ({key: weight[..., 1:]}, "must be a tensor of shape"),
    ):
        with pytest.raises(ValueError, match=rf"with_weights: .*{reported}.*step.weights\(state\)"):
            step.with_weights(state, bad)
    unchanged = step.with_weights(state, {})
    assert all(map(torch.equal, step.gather(unchanged).values(), step.gather(state).values()))
    fresh = step.init(whole)
    return whole, step.gather(fresh), loss.item(), step.evaluate(fresh, batch).item()


def _on_a_rank(stage: int, keys: dict[str, Any]) -> Any:
    step = fzero.make_train_step(make(MODEL), config(stage) | keys)
    return _check(step, [part(vectors(index), step.rank, step.world_size) for index in range(3)])


@pytest.mark.parametrize("keys", [{}, BF16], ids=["fp32", "bf16"])
def test_an_average_of_weights_evaluates_and_gathers_as_a_new_state_with_it(
    ranks: RankPool, keys: dict[str, Any]
) -> None:
    expected = _on_a_rank(0, keys)
    assert expected[2] == expected[3] and all(
        map(torch.equal, expected[0].values(), expected[1].values())
    )
    for stage in range(4):
        for whole, fresh, loss, fresh_loss in ranks(2, _on_a_rank, stage, keys):
            assert loss == fresh_loss and all(map(torch.equal, whole.values(), fresh.values()))
            for name, weight in expected[0].items():
                torch.testing.assert_close(
                    whole[name], weight, rtol=0.05 if keys else 1e-4, atol=1e-3 if keys else 1e-6
                )


def test_simulated_ranks_have_other_weights_too() -> None:
    step = fzero.simulate(fzero.make_train_step(make(MODEL), config(2) | BF16), 2, by="lockstep")
    batches = [tuple(x.unflatten(0, (2, -1)) for x in vectors(index)) for index in range(3)]
    whole, fresh, loss, fresh_loss = _check(step, batches)
    assert loss == fresh_loss and all(map(torch.equal, whole.values(), fresh.values()))
