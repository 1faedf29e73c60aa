"""Difficulty schedules and θ: golden values, and what is refused; batches cut to a
length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.data import fixed_discrete, fixed_linear, fixed_root, kept_layers, theta, truncated
from fzero.data.keys import key_of, mixed, uniform
from fzero.data.schedules import Root, fewer_values, first_step

LINEAR = fixed_linear(8, 64, steps=10, multiple=8)
GOLDEN = [
    (LINEAR, range(1, 12), [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64]),
    (
        fixed_root(8, 64, steps=100, multiple=8, degree=2),
        (1, 5, 10, 25, 50, 80, 99, 100),
        [8, 16, 24, 32, 40, 56, 56, 64],
    ),
    (
        fixed_linear(10, 64, steps=10, multiple=8),
        range(1, 13),
        [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64],
    ),
    (fixed_linear(8, 60, steps=10, multiple=8), (10, 11), [56, 60]),
    (fixed_discrete([8, 16, 64], [3, 10]), (1, 3, 4, 10, 11), [8, 8, 16, 16, 64]),
    (
        fixed_linear(128, 1024, steps=400, multiple=8),
        (0, 3, 4, 100, 200, 399, 400),
        [128, 128, 136, 352, 576, 1016, 1024],
    ),
    (fixed_linear(128, 1020, steps=400, multiple=8), (400, 402), [1016, 1020]),
]


@pytest.mark.parametrize(("schedule", "steps", "values"), GOLDEN)
def test_schedules_have_their_golden_values(schedule: Any, steps: Any, values: list[int]) -> None:
    assert [schedule(g) for g in steps] == values


def schedules() -> st.SearchStrategy[Root]:
    numbers = st.integers(1, 200)
    return st.builds(
        lambda low, more, steps, multiple, degree: Root(low, low + more, steps, multiple, degree),
        st.integers(0, 100),
        st.integers(0, 100),
        numbers,
        st.integers(1, 40),
        st.sampled_from([1, 2, 3]),
    )


@given(schedules())
def test_distinct_values_and_their_first_steps_are_those_of_the_schedule(schedule: Root) -> None:
    walked = list(dict.fromkeys(schedule(g) for g in range(1, 4000)))
    found = schedule.values()
    assert found[: len(walked)] == walked
    for value in walked[1:]:
        g = first_step(schedule, value)
        assert schedule(g) == value and (g == 0 or schedule(g - 1) < value)


def test_theta_has_its_golden_values() -> None:
    assert [round(theta(n, limit=0.5), 4) for n in (0, 100, 1000, 10000)] == [
        1.0,
        0.9524,
        0.6839,
        0.5,
    ]


def test_layers_are_kept_with_their_probabilities() -> None:
    """2,000 draws of each layer: four standard deviations are at most 0.045."""
    kept = torch.tensor([kept_layers(7, n, 12, 0.4) for n in range(2000)], dtype=torch.float64)
    assert torch.allclose(
        kept.mean(0), 1 - torch.arange(12, dtype=torch.float64) / 12 * 0.6, atol=0.045, rtol=0
    )
    assert kept_layers(7, 3, 12, 0.4) == kept_layers(7, 3, 12, 0.4) != kept_layers(8, 3, 12, 0.4)


def test_keys_make_uniform_independent_numbers_the_same_for_tensors() -> None:
    numbers = torch.tensor(
        [[uniform(key_of(3, n, layer)) for layer in range(8)] for n in range(1000)]
    )
    counts = torch.histc(numbers, 16, 0, 1)
    assert (counts - 500).abs().max() < 5 * 500**0.5
    assert (torch.corrcoef(numbers.T) - torch.eye(8)).abs().max() < 0.13  # four of 1/√1000
    ns = torch.arange(5)
    assert mixed(ns).tolist() == [mixed(int(n)) for n in ns]
    assert [int(key_of(3, n, 2)) for n in ns] == [key_of(3, n, 2) for n in range(5)]


def block(**keys: Any) -> dict[str, Any]:
    numbers = {"total_curriculum_step": 10, "difficulty_step": 8}
    given = {
        "enabled": True,
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
    }
    return {"curriculum_learning": {**given, "schedule_config": numbers, **keys}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule_type": "fixed_cube"}, "schedule_type"),
        ({"schedule_type": "fixed_root"}, "schedule_config.root_degree: is required"),
        ({"min_difficulty": 65}, "min_difficulty: must be at most max_difficulty, 64, got 65"),
        (
            {"schedule_config": {"total_curriculum_step": 0, "difficulty_step": 8}},
            "total_curriculum_step: must be at least 1",
        ),
        (
            {"schedule_config": {"total_curriculum_step": 9, "difficulty_step": 0}},
            "difficulty_step: must be at least 1",
        ),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1, 2], "max_step": [1, 2]},
            },
            "2 values and 2",
        ),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1, 2, 3], "max_step": [2, 1]},
            },
            "ascend",
        ),
        ({"curriculum_type": "rarity"}, "curriculum_type"),
        ({"max_difficulty": None}, "max_difficulty: is required"),
    ],
)
def test_wrong_schedules_are_errors_of_the_configuration(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(block(**keys))


def test_enabled_is_required_and_a_first_difficulty_below_the_smallest_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"curriculum_learning: enabled: is required"):
        Config.load({"curriculum_learning": {"min_difficulty": 8}})
    cfg = Config.load(block(min_difficulty=10))
    with pytest.warns(
        ConfigWarning, match="no multiple of difficulty_step 8, so that the first difficulty is 8"
    ):
        cfg.warn_of_no_effect(torch.nn.Linear(2, 2))


def test_an_inner_block_under_a_disabled_one_has_no_effect_and_says_so() -> None:
    numbers = {"require_steps": 2, "seq_per_step": 1}
    inner = {
        "enabled": True,
        "random_ltd_schedule": {"min_value": 2, "max_value": 4, "schedule_config": numbers},
    }
    cfg = Config.load({"data_efficiency": {"enabled": True, "data_routing": {"random_ltd": inner}}})
    assert not cfg.data_efficiency.drops_tokens
    with pytest.warns(
        ConfigWarning, match=r"data_efficiency\.data_routing\.random_ltd\.enabled: has no effect"
    ):
        cfg.warn_of_no_effect(torch.nn.Linear(2, 2))


def test_a_multiple_that_makes_few_enough_values_is_proposed() -> None:
    schedule = fixed_linear(128, 1024, steps=400, multiple=8)
    assert len(schedule.values(0)) == 113 and fewer_values(schedule, 8, 0).multiple == 128


def test_batches_are_cut_and_the_given_one_is_unchanged() -> None:
    ids = torch.arange(24).view(2, 12)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "mask": torch.ones(2, 1, 12, 12),
        "weight": torch.ones(2),
    }
    short = truncated(batch, 5)
    assert short["input_ids"].tolist() == [[0, 1, 2, 3, 4], [12, 13, 14, 15, 16]] and short[
        "mask"
    ].shape == (
        2,
        1,
        12,
        12,
    )
    assert batch["input_ids"].shape == (2, 12) and short["weight"] is batch["weight"]
    named = truncated(batch, 5, dims={"input_ids": 1, "mask": (2, 3)})
    assert named["mask"].shape == (2, 1, 5, 5) and named["labels"].shape == (2, 12)
    assert truncated((ids, ids), 12)[0] is ids and truncated((ids, ids), 3)[1].shape == (2, 3)
    with pytest.raises(ValueError, match="must name keys of the batch"):
        truncated(batch, 5, dims={"inputs": 1})
    with pytest.raises(
        ValueError, match=r"must name keys of the batch \(a tuple, which has none\), got 0"
    ):
        truncated((ids,), 5, dims={0: 1})
    with pytest.raises(
        ValueError,
        match=r"must be dimensions of the tensor 'mask', got \(4,\) for \(2, 1, 12, 12\)",
    ):
        truncated(batch, 5, dims={"mask": 4})
    with pytest.raises(ValueError, match="seqlen must be at least 1"):
        truncated(batch, 0)
