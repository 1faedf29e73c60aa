"""The laws of schedules: DeepSpeed's values, torch's values, and a learning rate that
is a function of the state.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPool
from training import Plain, adamw, config, make, part, train, train_plainly, vectors

import fzero
from fzero import ConfigError
from fzero.optim import lr_schedules

# The values of DeepSpeed 0.19.6 before updates 1, 2, …, for an optimizer whose lr is 1, rounded to
# 4 digits.
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
        {
            "total_num_steps": 6,
            "warmup_num_steps": 2,
            "cos_min_ratio": 0.1,
            "warmup_min_ratio": 0.2,
        },
        [0, 0.2, 1, 0.8682, 0.55, 0.2318, 0.1, 0.1],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.01,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 2.0,
        },
        [0.01, 0.015, 0.02, 0.025, 0.03, 0.035],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.01,
            "lr_range_test_step_size": 2,
            "lr_range_test_staircase": True,
        },
        [0.01, 0.01, 0.02, 0.02, 0.03],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 5,
        },
        [0.1, 0.4, 0.7, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 4,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
        },
        [0.1, 0.1, 0.4, 0.4, 0.7, 1.0, 0.55, 0.55, 0.1, 0.1],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 3,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
        },
        [0.1, 0.4, 0.7, 1.0, 0.7, 0.4, 0.1, 0.08, 0.0667],
    ),
]


def scheduler(name: str, params: Mapping[str, Any]) -> Any:
    return fzero.Config.load({"scheduler": {"type": name, "params": params}}).scheduler


@pytest.mark.parametrize(("name", "params", "rates"), MEASURED)
def test_deepspeeds_schedules_have_the_values_measured_there(
    name: str, params: dict[str, Any], rates: list[float]
) -> None:
    rate = scheduler(name, params).rate(1.0)
    # the values are rounded
    assert [rate(n) for n in range(len(rates))] == pytest.approx(rates, abs=5e-5)


def test_one_cycle_moves_momentum_against_the_rate() -> None:
    cycle = scheduler(
        "OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    )
    measured = [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9]
    assert [cycle.momentum()(n) for n in range(9)] == pytest.approx(measured)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 6), st.integers(0, 6))
def test_a_cycle_stays_between_its_ends_and_reaches_both(
    up: int, down: int, stairs: int, down_stairs: int
) -> None:
    cycle = lr_schedules.one_cycle(
        1.0,
        3.0,
        first_step_size=up,
        second_step_size=down,
        first_stair_count=stairs,
        second_stair_count=down_stairs,
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
def test_a_torch_class_by_name_has_its_own_values_in_any_order_of_asking(
    name: str, params: dict[str, Any]
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.25, momentum=0.9)
    reference = getattr(torch.optim.lr_scheduler, name)(optimizer, **params)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    rate = scheduler(name, params).rate(0.25)
    assert [rate(n) for n in reversed(range(10))] == expected[::-1]


CYCLE = {
    "cycle_min_lr": 1e-3,
    "cycle_max_lr": 2e-2,
    "cycle_first_step_size": 3,
    "cycle_min_mom": 0.7,
}


def _scheduled_adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Plain AdamW that sets its learning rate and first beta before every update."""
    optimizer, cycle = adamw(params), scheduler("OneCycle", CYCLE)
    num_updates = 0

    def before(*_: Any) -> None:
        nonlocal num_updates
        group = optimizer.param_groups[0]
        group["lr"], group["betas"] = (
            cycle.rate(1.0)(num_updates),
            (cycle.momentum()(num_updates), 0.999),
        )
        num_updates += 1

    optimizer.register_step_pre_hook(before)
    return optimizer


@pytest.mark.parametrize("stage", [0, 3])
def test_a_scheduled_run_is_the_plain_loops_that_sets_its_rates_by_hand(
    ranks: RankPool, stage: int
) -> None:
    expected, weights = train_plainly(Plain, vectors, _scheduled_adamw)
    cfg = config(stage) | {"scheduler": {"type": "OneCycle", "params": CYCLE}}
    for curve, ours in ranks(2, train, Plain, vectors, cfg):
        # fp32, other orders of addition
        assert curve == [pytest.approx(pair, rel=1e-5) for pair in expected]
        for name, weight in weights.items():
            # Adam divides by the size of the gradient, which magnifies rounding errors if a
            # gradient is almost zero.
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
    warmup = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4}}
    }
    assert _rates(cfg=warmup) == pytest.approx([0, 0, 0.5, 0.79248], abs=5e-6)
    assert _rates(lr_schedule=lambda n: 0.5**n) == [1, 0.5, 0.25, 0.125]
    assert _rates(cfg=warmup, lr_schedule=lambda n: 0.5**n) == [1, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"type": "WarmupLr"},
            "scheduler: no scheduler is named 'WarmupLr'; did you mean 'WarmupLR'",
        ),
        ({"type": "ReduceLROnPlateau"}, "scheduler: no scheduler is named 'ReduceLROnPlateau'"),
        (
            {"type": "StepLR", "params": {"step_sise": 2}},
            r"scheduler: StepLR does not take \{'step_sise': 2\}",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 4}},
            "scheduler.params.warmup_steps: unknown key; did you mean",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "exp"}},
            "scheduler.params.warmup_type: must be 'log' or",
        ),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}},
            "scheduler.params.cycle_max_lr: is required; give a value",
        ),
        (
            {"type": "WarmupLR", "params": {"last_batch_iteration": 7}},
            "scheduler.params.last_batch_iteration: must be",
        ),
    ],
)
def test_a_wrong_scheduler_is_refused_with_its_field(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fzero.Config.load({"scheduler": given})


def test_a_cycle_of_momentum_for_an_optimizer_without_betas_is_refused() -> None:
    sgd = {"optimizer": {"type": "SGD"}, "scheduler": {"type": "OneCycle", "params": CYCLE}}
    with pytest.warns(UserWarning, match="scheduler.params.cycle_momentum: SGD has no betas"):
        fzero.make_train_step(make(Plain), sgd)


# --- a rate that a rank computes by itself --------------------------------------------------------


def _step_that_drifts(stage: int, options: dict[str, Any], by_state: bool) -> str:
    """On a rank of a process group: the error of a step, between two good ones, in
    which this rank's rate or count differs.
    """
    rank = fzero.join().rank
    drift = [0.0]
    model = make(functools.partial(Plain, num_blocks=1))
    step = fzero.make_train_step(
        model, config(stage), param_groups=[{"params": "scale$", "weight_decay": 0.0}],
        lr_schedule=lambda n: 1e-3 * (1 + drift[0]), **options,
    )  # fmt: skip
    state, _ = step(step.init(), part(vectors(0), rank, 2))
    before, drift[0] = step.gather(state), 0.0 if by_state else float(rank)
    given = state._replace(step=state.step + rank) if by_state else state
    with pytest.raises(fzero.runtime.MismatchError) as error:
        step(given, part(vectors(1), rank, 2))
    assert all(map(torch.equal, step.gather(state).values(), before.values())), (
        "nothing was updated"
    )
    drift[0] = 0.0
    state, _ = step(state, part(vectors(1), rank, 2))
    assert int(state.step) == 2
    return str(error.value)


DIFFERENT = (
    r"^learning rate after 1 updates: must be the same on all ranks, but 'group 0 \(all that no "
    r"other group takes\)' is '0.001' on rank 0 and '0.002' on rank 1; compute it from what is the "
    r"same on all ranks \(metrics.loss is"
)


@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (1, {}), (3, {}), (3, {"schedule": "negotiated"})],
    ids=str,
)
def test_a_rate_that_differs_between_ranks_raises_on_all_and_updates_nothing(
    ranks: RankPool, stage: int, options: dict[str, Any]
) -> None:
    for error in ranks(2, _step_that_drifts, stage, options, False):
        assert re.search(DIFFERENT, error), error


def test_a_graph_of_a_step_finds_the_checksums_that_differ_and_updates_nothing() -> None:
    simulated = fzero.simulate(fzero.make_train_step(make(Plain), config(2)), 2, by="vmap")
    assert isinstance(simulated, fzero.simulation.VmapRanks)
    state, batch = simulated.init(), tuple(x.unflatten(0, (2, -1)) for x in vectors(0))
    for checksum, is_ok in ((7.0, False), (8.0, True)):
        given = optree.tree_map(torch.clone, state)._replace(buffers={}, hook_states={}, rng={})
        numbers = torch.tensor([[1.0, 8.0, 0.0], [1.0, checksum, 0.0]]).double()
        outcome, _ = simulated.program.compiled(given, [batch], numbers)
        assert outcome.ok.tolist() == [is_ok, is_ok] and outcome.loss_stats[
            0, 0, :, 3
        ].tolist() == [8.0, checksum]
        before, after = (optree.tree_leaves((x.params, x.optimizer)) for x in (state, given))
        assert all(map(torch.equal, before, after)) != is_ok


def test_states_of_other_updates_raise_on_all_ranks(ranks: RankPool) -> None:
    for error in ranks(2, _step_that_drifts, 0, {}, True):
        assert error.startswith(
            "number of updates so far: must be the same on all ranks, but 'state.step' is '1' on "
            "rank 0"
        )


def _step_of_other_transforms(how: str) -> str:
    """On a rank of a process group: the error where this rank gives another transform,
    or another loss scale.
    """
    rank = fzero.join().rank
    cfg = config(0) | (
        {"fp16": {"enabled": True, "auto_cast": True}} if how == "loss scale" else {}
    )
    transforms: dict[str, Any] = {
        "function": lambda lr: fzero.optim.sgd(lr * (1 + rank)),
        "transform": fzero.optim.adamw(1e-3, weight_decay=0.1 * rank),
    }
    with pytest.raises(fzero.runtime.MismatchError) as error:
        step = fzero.make_train_step(make(Plain), cfg, transform=transforms.get(how))
        state = step.init()
        scale = state.loss_scale._replace(scale=state.loss_scale.scale * (1 + rank))
        step(state._replace(loss_scale=scale), part(vectors(0), rank, 2))
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "function",
            "arguments: must be the same on all ranks, but 'updates' is 'transform at lr=",
        ),
        (
            "transform",
            "arguments: must be the same on all ranks, but 'updates' is 'transform at lr=",
        ),
        (
            "loss scale",
            "loss: must be the same on all ranks, but 'multiplied by' is '65536.0' on rank 0 and "
            "'131072.0'",
        ),
    ],
)
def test_a_transform_or_a_loss_scale_that_differs_between_ranks_raises_on_all(
    ranks: RankPool, how: str, expected: str
) -> None:
    for error in ranks(2, _step_of_other_transforms, how):
        assert error.startswith(expected), error


def _engine_that_drifts(stage: int, when: str) -> str:
    """On a rank of a process group: the error of a backward after this rank wrote other
    numbers into the param groups.
    """
    rank = fzero.join().rank
    engine, optimizer, *_ = fzero.initialize(model=make(Plain), config=config(stage))
    (group,) = optimizer.param_groups

    def train_once(index: int, *, before: float = 0.0, between: float = 0.0) -> None:
        group["lr"] += before
        loss = engine(*part(vectors(index), rank, 2))
        engine.backward(loss)
        group["lr"] += between
        engine.step()

    group["lr"] = 1 / 32
    train_once(0)
    with pytest.raises(fzero.runtime.MismatchError) as error:
        if when == "before the backward":
            train_once(1, before=rank / 16)
        elif when == "between backward and step":  # the ranks meet again in the next backward
            train_once(1, between=(rank + 1) / 16)
            train_once(2, before=-(rank + 1) / 16)
        else:
            group["weight_decay"] += rank
            train_once(1)
    return str(error.value)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (
            "before the backward",
            r"learning rate after 1 updates: .*'group 0 \(all parameters\)' is '0.03125' on rank 0 "
            r"and '0.09375'",
        ),
        (
            "between backward and step",
            r"learning rate after 1 updates, used in the last update: .*'0.09375'.*'0.15625'",
        ),
        (
            "other weight decay",
            r"hyper-parameters: .*'group 0 .*weight_decay=0.1.*on rank 0.*weight_decay=1.1",
        ),
    ],
)
def test_numbers_of_the_engine_s_groups_that_differ_between_ranks_raise_on_all(
    ranks: RankPool, when: str, expected: str
) -> None:
    for stage in (0, 2):
        for error in ranks(2, _engine_that_drifts, stage, when):
            assert re.match(expected, error), error


def test_a_rate_that_is_no_number_raises_before_anything_is_updated() -> None:
    rates: list[Any] = [1e-3, float("nan"), None, 1e-3]
    step = fzero.make_train_step(make(Plain), config(0), lr_schedule=lambda n: rates[0])
    state = step.init()
    for bad in (False, True, True, False):
        if bad:
            with pytest.raises(
                ValueError,
                match=r"learning rate: must be a finite number .*got \[(nan|None)\] after 1",
            ):
                step(state, part(vectors(0), 0, 1))
        else:
            state, _ = step(state, part(vectors(0), 0, 1))
        rates.pop(0)
    assert int(state.step) == 2
