"""What replayed and recorded steps cost in a loop, and that clean steps report nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_replay import loss_of, made
from torch import Tensor, nn

import fzero

CLEAN = 500
"""Steps of one of 20 jobs, which are 10,000 together."""


def _clean(job: int) -> None:
    """Replays every step of a job."""
    keys: dict[str, Any] = {"accumulation": 2} if job % 8 > 3 else {}
    step, state, _ = made(job % 4, **keys)
    generator = torch.Generator().manual_seed(1000 * job + step.rank)
    for _ in range(CLEAN):
        rows = torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)
        state, metrics = fzero.replay(step, state, rows)
    assert int(state.step) == CLEAN and metrics.loss.isfinite()


@pytest.mark.nightly
@pytest.mark.parametrize("job", range(20))
def test_ten_thousand_clean_steps_are_replayed_without_a_report(ranks: RankPool, job: int) -> None:
    ranks(2, _clean, job)


class Wide(nn.Module):
    """Of which a step takes long beside the calls of a replay."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (4, *[192] * 6, 2)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _seconds(function: Callable[[], object]) -> float:
    """The processor time of a call."""
    began = time.process_time()
    function()
    return time.process_time() - began


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["replay", "record"])
def test_one_of_n_steps_replayed_or_recorded_costs_a_step_and_one_percent(
    tmp_path: Path, name: str
) -> None:
    """In processor time, the least of several tries: of n steps one takes that of two,
    and a hundredth of the others.
    """
    every = 100
    step = fzero.make_train_step(Wide(), {"zero_optimization": {"stage": 3}}, loss_fn=loss_of)
    state, batch = step.init(), (torch.randn(2048, 4), torch.randn(2048, 2))
    recorded = fzero.record(step, tmp_path, every=every)
    calls = {
        "replay": lambda state: fzero.replay(step, state, batch, every=every),
        "record": lambda state: recorded(state, batch),
    }
    plain, watched, skipped = list[float](), list[float](), list[float]()

    def run(call: Callable[[Any], Any]) -> float:
        nonlocal state

        def one() -> None:
            nonlocal state
            state, _ = call(state)

        return _seconds(one)

    for _ in range(4 * every):
        is_watched = int(state.step) % every == 0
        (watched if is_watched else skipped).append(run(calls[name]))
        if int(state.step) % every:
            plain.append(run(lambda state: step(state, batch)))
    own = min(watched[1:]) + (every - 1) * min(skipped)
    assert own / (every * min(plain)) <= 1 + 1 / every + 0.01
