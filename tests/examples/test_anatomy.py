"""The page that composes a step by hand trains like a plain loop, in all stages,
however it is run.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import nn

import fzero

ROOT = Path(__file__).parents[2]
STAGES = (0, 1, 2, 3)


def curves(
    stages: tuple[int, ...], num_steps: int, stacked: int | None = None, backend: str | None = None
) -> Any:
    """The losses of each step: of the plain loop, and in the stages on this rank (or on
    stacked ranks).
    """
    if (folder := str(ROOT / "examples")) not in sys.path:
        sys.path.insert(0, folder)
    page = importlib.import_module("anatomy_of_a_step")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    batches = 3 * torch.randn(num_steps, 24, 1)
    ranks = None if stacked is None else fzero.comms.Stacked(stacked)
    how = (
        {} if backend is None else {"jit": partial(torch.compile, fullgraph=True, backend=backend)}
    )
    torch._dynamo.reset()
    trained = [page.train(model, batches, stage, ranks, **how) for stage in stages]
    return page.train_plainly(model, batches), *trained


def assert_equal(curves: Any) -> None:
    plain, *trained = curves
    for curve in trained:
        torch.testing.assert_close(curve, plain, rtol=1e-5, atol=0)  # as the page says


@pytest.mark.parametrize(
    "world_size",
    [1, pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)],
)
def test_a_step_composed_by_hand_is_the_plain_one_on_real_and_on_stacked_ranks(
    ranks: RankPool, world_size: int
) -> None:
    of_ranks = ranks(world_size, curves, STAGES, 4)
    assert all(own == of_ranks[0] for own in of_ranks)
    assert_equal(of_ranks[0])
    assert_equal(curves(STAGES, 4, world_size))


@pytest.mark.parametrize("stages", [pytest.param((0, 1, 2), marks=pytest.mark.long), (3,)])
def test_a_step_composed_by_hand_is_one_graph_on_real_and_on_stacked_ranks(
    ranks: RankPool, stages: tuple[int, ...]
) -> None:
    for own in ranks(2, curves, stages, 2, None, "eager"):
        assert_equal(own)
    assert_equal(curves(stages, 2, 2, "aot_eager"))


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [("--compile",), ("--simulate", "2"), ("--simulate", "2", "--compile")]
)
def test_the_page_runs_as_it_says(options: tuple[str, ...]) -> None:
    page = subprocess.run(
        [sys.executable, ROOT / "examples" / "anatomy_of_a_step.py", *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert page.returncode == 0, page.stderr
    assert page.stdout.count("loss 1.230562 -> 0.3271") == 5
