"""The laws of schedules: DeepSpeed's values, torch's values, and a learning rate that is a function of the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool
from training import Plain, adamw, config, make, part, train, train_plainly, vectors

import fzero
from fzero import ConfigError, lr_schedules

# What DeepSpeed 0.19.6 sets before updates 1, 2, …, run with an optimizer whose lr is 1 and rounded to 4 places.
MEASURED: list[tuple[str, dict[str, Any], list[float]]] = [
    ("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 4}, [0, 0, 0.5, 0.7925, 1, 1]),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"},
        [0.1, 0.1, 0.28, 0.46, 0.64, 0.82, 1, 1],
    ),
    (
        "WarmupDecayLR",
        {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "total_num_steps": 8},
        [0, 0, 0.5, 0.7925, 1, 1, 0.75, 0.5, 0.25, 0, 0],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.2},
        [0, 0.2, 1, 0.8682, 0.55, 0.2318, 0.1, 0.1],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0},
        [0.01, 0.015, 0.02, 0.025, 0.03, 0.035],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
        [0.01, 0.01, 0.02, 0.02, 0.03],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "cycle_second_step_size": 5},
        [0.1, 0.4, 0.7, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 5, "cycle_second_step_size": 4,
            "cycle_first_stair_count": 3, "cycle_second_stair_count": 2,
        },
        [0.1, 0.1, 0.4, 0.4, 0.7, 1.0, 0.55, 0.55, 0.1, 0.1],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 2,
            "decay_lr_rate": 0.5,
        },
        [0.1, 0.4, 0.7, 1.0, 0.7, 0.4, 0.1, 0.08, 0.0667],
    ),
]  # fmt: skip


def scheduler(name: str, params: Mapping[str, Any]) -> Any:
    return fzero.Config.load({"scheduler": {"type": name, "params": params}}).scheduler


@pytest.mark.parametrize(("name", "params", "rates"), MEASURED)
def test_deepspeeds_schedules_have_the_values_measured_there(
    name: str, params: dict[str, Any], rates: list[float]
) -> None:
    rate = scheduler(name, params).rate(1.0)
    assert [rate(n) for n in range(len(rates))] == pytest.approx(rates, abs=5e-5)  # the values are rounded


def test_one_cycle_moves_momentum_against_the_rate() -> None:
    cycle = scheduler("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4})
    measured = [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9]
    assert [cycle.momentum()(n) for n in range(9)] == pytest.approx(measured)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 6), st.integers(0, 6))
def test_a_cycle_stays_between_its_ends_and_reaches_both(up: int, down: int, stairs: int, down_stairs: int) -> None:
    cycle = lr_schedules.one_cycle(
        1.0, 3.0, first_step_size=up, second_step_size=down, first_stair_count=stairs, second_stair_count=down_stairs
    )
    values = [cycle(n) for n in range(up + down + 3)]
    assert all(1 <= value <= 3 for value in values) and values[0] == values[-1] == 1
    assert max(values) == 3 or down == 0
    assert values[1 : up + 1] == sorted(values[1 : up + 1]) or down == 0


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("StepLR", {"step_size": 3}),
        ("CosineAnnealingLR", {"T_max": 7}),
        ("OneCycleLR", {"max_lr": 0.5, "total_steps": 12}),
    ],
)
def test_a_torch_class_by_name_has_its_own_values_in_any_order_of_asking(name: str, params: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.25, momentum=0.9)
    reference = getattr(torch.optim.lr_scheduler, name)(optimizer, **params)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    rate = scheduler(name, params).rate(0.25)
    assert [rate(n) for n in reversed(range(10))] == expected[::-1]


CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 3, "cycle_min_mom": 0.7}


def _scheduled_adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Plain AdamW that sets its learning rate and first beta before every update."""
    optimizer, cycle = adamw(params), scheduler("OneCycle", CYCLE)
    num_updates = 0

    def before(*_: Any) -> None:
        nonlocal num_updates
        group = optimizer.param_groups[0]
        group["lr"], group["betas"] = cycle.rate(1.0)(num_updates), (cycle.momentum()(num_updates), 0.999)
        num_updates += 1

    optimizer.register_step_pre_hook(before)
    return optimizer


@pytest.mark.parametrize("stage", [0, 3])
def test_a_scheduled_run_is_the_plain_loops_that_sets_its_rates_by_hand(ranks: RankPool, stage: int) -> None:
    expected, weights = train_plainly(Plain, vectors, _scheduled_adamw)
    cfg = config(stage) | {"scheduler": {"type": "OneCycle", "params": CYCLE}}
    for curve, ours in ranks(2, train, Plain, vectors, cfg):
        assert curve == [pytest.approx(pair, rel=1e-5) for pair in expected]  # fp32, other orders of addition
        for name, weight in weights.items():
            # Adam divides by the gradient's own size, which magnifies rounding where a gradient is almost zero.
            torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)


def _rates(**options: Any) -> list[float]:
    cfg = config(0) | options.pop("cfg", {})
    step = fzero.make_train_step(make(Plain), cfg, donate=False, **options)
    state, rates = step.init(), []
    for index in (0, 1, 2, 3):
        new, metrics = step(state, part(vectors(index), 0, 1))
        again, repeated = step(state, part(vectors(index), 0, 1))  # the same state, the same rate
        assert metrics.lr == repeated.lr
        assert all(optree.tree_leaves(optree.tree_map(torch.equal, new, again)))
        rates.append(metrics.lr.item())
        state = new
    return rates


def test_the_rate_is_a_function_of_the_state_and_a_metric() -> None:
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4}}}
    assert _rates(cfg=warmup) == pytest.approx([0, 0, 0.5, 0.79248], abs=5e-6)
    assert _rates(lr_schedule=lambda n: 0.5**n) == [1, 0.5, 0.25, 0.125]
    assert _rates(cfg=warmup, lr_schedule=lambda n: 0.5**n) == [1, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "WarmupLr"}, "scheduler: no scheduler is named 'WarmupLr'; did you mean 'WarmupLR'"),
        ({"type": "ReduceLROnPlateau"}, "scheduler: no scheduler is named 'ReduceLROnPlateau'"),
        ({"type": "StepLR", "params": {"step_sise": 2}}, r"scheduler: StepLR does not take \{'step_sise': 2\}"),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 4}},
            "scheduler.params.warmup_steps: unknown key; did you mean",
        ),
        ({"type": "WarmupLR", "params": {"warmup_type": "exp"}}, "scheduler.params.warmup_type: must be 'log' or"),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}},
            "scheduler.params.cycle_max_lr: is required; give a value",
        ),
        ({"type": "WarmupLR", "params": {"last_batch_iteration": 7}}, "scheduler.params.last_batch_iteration: must be"),
    ],
)
def test_a_wrong_scheduler_is_told_with_its_field(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fzero.Config.load({"scheduler": given})


def test_a_cycle_of_momentum_for_an_optimizer_without_betas_is_told() -> None:
    sgd = {"optimizer": {"type": "SGD"}, "scheduler": {"type": "OneCycle", "params": CYCLE}}
    with pytest.warns(UserWarning, match="scheduler.params.cycle_momentum: SGD has no betas"):
        fzero.make_train_step(make(Plain), sgd)
