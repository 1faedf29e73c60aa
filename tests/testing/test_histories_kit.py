"""`check_model_transform`, histories and configurations: what is right passes, and what is
broken on purpose is found.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings

import fzero
from fzero.testing import check_model_transform, configurations, histories, models, play
from fzero.testing.histories import Freeze, LoseRank, Reshard, Save, Train


class Halved:
    """Modules see half of each weight of the blocks."""

    def __call__(self, spec: Any) -> fzero.transforms.Changes:
        names = [name for name, _ in spec.model.named_parameters() if "blocks" in name]
        views = {name: (fzero.transforms.FunctionView(lambda x: x / 2),) for name in names}
        return fzero.transforms.Changes(name="halved", views=views)


class Forgetful:
    """Counts its own calls: the second step computes something else."""

    calls = 0

    def __call__(self, spec: Any) -> fzero.transforms.Changes:
        Forgetful.calls += 1
        scale = 1.0 / Forgetful.calls
        view = fzero.transforms.FunctionView(lambda x: x * scale)
        return fzero.transforms.Changes(name="forgetful", views={"outlet.weight": (view,)})


def test_a_model_transform_that_keeps_the_laws_passes() -> None:
    check_model_transform(Halved, captured=False)


def test_a_model_transform_with_a_memory_breaks_a_law() -> None:
    with pytest.raises(AssertionError, match=r"forgetful: all stages must give the same bits"):
        check_model_transform(Forgetful, captured=False, name="forgetful")


HISTORY = (Train(), Save(), Reshard(3, 3), Freeze(1), Train(2), LoseRank(), Train())


def test_a_history_is_played_beside_a_plain_loop() -> None:
    model = find(models(), lambda model: len(model.blocks) == 2)
    play(HISTORY, model)


def test_an_optimizer_that_is_not_elementwise_does_not_survive_a_history() -> None:
    clipped = fzero.Transform(
        lambda param: (),
        lambda g, p, s: (g, p - 0.1 * g / (g.norm() + 1e-3), s),
        lambda spec: (),
    )
    model = find(models(), lambda model: len(model.blocks) == 2)
    with pytest.raises(AssertionError, match="must be elementwise"):
        play(HISTORY, model, transform=clipped)


@given(histories())
def test_histories_end_with_an_update(history: tuple[Any, ...]) -> None:
    assert isinstance(history[-1], Train)


@settings(max_examples=2)
@given(configurations())
def test_configurations_make_steps(cfg: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fzero.make_train_step(torch.nn.Linear(2, 2), cfg, mesh=fzero.comms.AbstractAxis("data", 2))
