"""The laws of parameter groups: each has its own hyper-parameters, in every stage, as
in torch.optim.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from training import Plain, config, make, part, train, train_plainly, vectors

import fzero
from fzero import ConfigError, Transform

GROUPS: list[dict[str, Any]] = [
    {"params": r"scale$", "weight_decay": 0.0},
    {"params": lambda name, param: name.startswith("blocks.3"), "lr": 3e-3, "betas": (0.8, 0.95)},
]


class Named(Plain):
    """`Plain`, whose parameters know their names, so that the plain loop can group
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.name_here = name  # type: ignore[attr-defined]


def grouped_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    names = {param: param.name_here for param in params}  # type: ignore[attr-defined]
    scales = [p for p in params if re.search("scale$", names[p])]
    slow = [p for p in params if names[p].startswith("blocks.3") and p not in set(scales)]
    rest = [p for p in params if p not in {*scales, *slow}]
    groups = [
        {"params": rest},
        {"params": scales, "weight_decay": 0.0},
        {"params": slow, "lr": 3e-3, "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


def halving_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Halves every group's learning rate after each update."""
    optimizer = grouped_adamw(params)

    def halve(*_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    optimizer.register_step_post_hook(halve)
    return optimizer


def _train_all_stages(halving: bool) -> list[Any]:
    options = {"lr_schedule": lambda n: 1e-2 * 0.5**n} if halving else {}
    cfgs = [config(stage) for stage in range(4)]
    return [train(Named, vectors, cfg, num_steps=5, param_groups=GROUPS, **options) for cfg in cfgs]


@pytest.mark.covering(1)
@pytest.mark.parametrize("halving", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_groups_train_alike_in_all_stages_and_like_the_plain_loop(
    ranks: RankPool, world_size: int, halving: bool
) -> None:
    plain_curve, plain_weights = train_plainly(
        Named, vectors, halving_adamw if halving else grouped_adamw, num_steps=5
    )  # fmt: skip
    on_ranks = ranks(world_size, _train_all_stages, halving)
    first_curve, first_weights = on_ranks[0][0]
    for curve, weights in (result for results in on_ranks for result in results):
        assert curve == first_curve
        assert all(torch.equal(weights[name], first_weights[name]) for name in weights)
    # Rounding only, as in test_stages; Adam divides small gradients by their own size.
    torch.testing.assert_close(
        torch.tensor(first_curve), torch.tensor(plain_curve), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(first_weights, plain_weights, rtol=0, atol=2e-5)


def test_a_group_has_flat_buffers_of_its_own_and_the_first_match_counts() -> None:
    plan = fzero.plan(make(Plain), config(3), world_size=2, param_groups=GROUPS)
    by_group: dict[int, list[str]] = {}
    for buffer in plan.flat_buffers:
        by_group.setdefault(buffer.group, []).extend(buffer.layout.names)
        assert buffer.key.endswith(f"/group{buffer.group}") == bool(buffer.group)
    assert sorted(by_group[1]) == [f"blocks.{n}.scale" for n in range(5)]
    assert by_group[2] == ["blocks.3.weight"]


@pytest.mark.parametrize(
    ("group", "reported"),
    [
        (
            {"weight_decay": 0.0},
            r"param_groups\[0\].params: must be a regular expression or a function .*, got None",
        ),
        (
            {"params": "norm", "momentum": 0.5},
            r"param_groups\[0\].momentum: .*AdamW has: lr, betas",
        ),
        ({"params": "norm", "lr": -1.0}, r"param_groups\[0\].lr: .* got -1.0"),
    ],
)
def test_a_wrong_group_is_reported_with_its_field(group: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        fzero.make_train_step(make(Plain), config(0), param_groups=[group])


def test_a_group_keeps_its_rate_where_the_others_rest_and_no_schedule_can_scale_zero() -> None:
    resting = {"type": "SGD", "params": {"lr": 0.0}}
    groups = [{"params": r"blocks\.2\.weight", "lr": 0.5}]
    _, weights = train(
        Plain, vectors, config(0, optimizer=resting), num_steps=1, param_groups=groups
    )
    start = make(Plain).state_dict()
    assert [name for name in start if not torch.equal(weights[name], start[name])] == [
        "blocks.2.weight"
    ]
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr: must not be 0"):
        train(
            Plain,
            vectors,
            config(0, optimizer=resting),
            param_groups=groups,
            lr_schedule=lambda n: 0.5,
        )


# --- a transform of one's own ---------------------------------------------------------------------


def signs(lr: float) -> Transform:
    """Moves by the sign of the gradient."""

    def update(grad: Tensor, param: Tensor, state: tuple[()]) -> tuple[Tensor, Tensor, tuple[()]]:
        return grad, param - lr * grad.sign(), state  # a new tensor, not the one given

    return Transform(lambda param: (), update, lambda spec: ())


def _with_own_transform(stage: int, keys: dict[str, Any]) -> Any:
    groups = [
        {"params": r"scale$", "transform": fzero.sgd(0.05)},
        {"params": "blocks.3", "lr": 0.02},
    ]
    schedule = (
        {"lr_schedule": lambda n: 0.01 / (n + 1), "param_groups": groups[1:]}
        if keys
        else {"param_groups": groups}
    )
    cfg = config(stage, clip=0.0, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    return train(Plain, vectors, cfg, transform=signs, num_steps=4, **schedule)


def _by_hand(scheduled: bool) -> dict[str, Tensor]:
    model = make(Plain)
    for index in range(4):
        model.zero_grad()
        model(*vectors(index)).backward()
        with torch.no_grad():
            for name, param in model.named_parameters():
                assert param.grad is not None
                lr = (0.02 if "blocks.3" in name else 0.01) / (index + 1 if scheduled else 1)
                is_scale = name.endswith("scale") and not scheduled
                param.sub_(0.05 * param.grad if is_scale else lr * param.grad.sign())
    return model.state_dict()


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_transform_of_the_users_own_works_on_shards(
    ranks: RankPool, world_size: int, scheduled: bool
) -> None:
    expected = _by_hand(scheduled)
    for stage in range(4):
        for _, weights in ranks(
            world_size, _with_own_transform, stage, {"scheduled": 1} if scheduled else {}
        ):
            # The mean of two means; a gradient within rounding of zero would show as a whole
            # stride.
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def test_a_transform_that_would_be_wrong_on_shards_is_refused_with_the_reason() -> None:
    by_norm = Transform(lambda p: (), lambda g, p, s: (g, p - g / g.norm(), s), lambda spec: ())
    with pytest.raises(ConfigError, match="transform: must be elementwise"):
        fzero.make_train_step(make(Plain), config(0), transform=by_norm)
    with pytest.raises(ConfigError, match=r"param_groups\[0\].transform: must be elementwise"):
        fzero.make_train_step(
            make(Plain), config(0), param_groups=[{"params": "scale", "transform": by_norm}]
        )
    with pytest.raises(
        ConfigError, match=r"transform: must be a Transform or a function .*, got 3"
    ):
        fzero.make_train_step(make(Plain), config(0), transform=3)
    with pytest.raises(
        ConfigError, match=r"param_groups\[0\].betas: a group of a transform has .* only, got"
    ):
        group = {"params": "scale", "transform": signs, "betas": (0.9, 0.9)}
        fzero.make_train_step(make(Plain), config(0), param_groups=[group])
    with pytest.raises(
        ConfigError, match="transform: must be a function of the learning rate where a schedule"
    ):
        fzero.make_train_step(
            make(Plain), config(0), transform=fzero.sgd(0.1), lr_schedule=lambda n: 0.1
        )


class Past(NamedTuple):
    """The parameter before the last update, and the sum of squares in double."""

    before: Any
    squares: Any


def _with_momentum_of_the_past(*, in_place: bool) -> Transform:
    """Heavy ball by the last two parameters, written as pure functions or in place: the
    old values are still to be read.
    """

    def update(grad: Tensor, param: Tensor, state: Past) -> tuple[Tensor, Tensor, Past]:
        squares = state.squares + grad.double().square()
        new = param - 0.1 * grad + 0.5 * (param - state.before)
        if not in_place:
            return grad, new, Past(param, squares)
        state.before.copy_(param)
        state.squares.copy_(squares)
        return grad, param.copy_(new), state

    return Transform(
        lambda p: Past(p.clone(), p.new_zeros(p.shape, dtype=torch.float64)),
        update,
        lambda spec: Past(spec, replace(spec, dtype="float64")),
    )


def _with_the_past(stage: int, in_place: bool, keys: dict[str, Any]) -> Any:
    cfg = config(stage) | {"bf16": {"enabled": bool(keys), "auto_cast": True}}
    step = fzero.make_train_step(
        make(Plain), cfg, transform=_with_momentum_of_the_past(in_place=in_place)
    )
    state = step.init()
    for index in range(4):
        state, _ = step(state, part(vectors(index), step.rank, step.world_size))
    kept = [x for key in sorted(state.optimizer) for x in state.optimizer[key]]
    return [str(x.dtype) for x in kept[:2]], kept, step.gather(state)


@pytest.mark.parametrize("keys", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_transform_may_be_written_in_place_or_as_pure_functions(
    ranks: RankPool, keys: dict[str, Any]
) -> None:
    for stage in (0, 2, 3):
        pure, written = (
            ranks(2, _with_the_past, stage, in_place, keys) for in_place in (False, True)
        )
        for (dtypes, kept, weights), (_, other_kept, other_weights) in zip(
            pure, written, strict=True
        ):
            assert dtypes == ["torch.float32", "torch.float64"], (
                "a state keeps the dtypes that its transform gives it"
            )
            assert all(torch.equal(x, y) for x, y in zip(kept, other_kept, strict=True))
            assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_a_group_that_takes_nothing_is_reported() -> None:
    for params, reported in (
        ("sacle", "selects none, got 'sacle'"),
        ("(", "must be a regular expression"),
    ):
        with pytest.raises(ConfigError, match=rf"param_groups\[0\].params: .*{reported}"):
            fzero.make_train_step(
                make(Plain), config(0), param_groups=[{"params": params, "lr": 1e-5}]
            )


@pytest.mark.parametrize(
    ("rates", "reported"),
    [
        (
            [1e-3],
            r"rates must be a list with one for each of the 3 parameter groups \(group 0 \(all "
            r"that no other group takes\), group 1 \('scale\$'\), group 2 \(chosen by a "
            r"function\)\), got 1: \[0.001\]",
        ),
        ([1e-3] * 4, "rates must be a list with one for each of the 3 parameter groups .* got 4"),
        (1e-3, "rates must be a list .* got 0.001"),
        ([1e-3, "2e-3", 0.0], r"learning rate: must be a finite number for every parameter group"),
        (
            [1e-3, float("inf"), 0.0],
            r"learning rate: must be a finite number .* got \[0.001, inf, 0.0\]",
        ),
    ],
)
def test_rates_to_follow_are_one_for_each_group_by_name(rates: Any, reported: str) -> None:
    step = fzero.make_train_step(make(Plain), config(0), param_groups=GROUPS)
    with pytest.raises(ValueError, match=reported):
        step.following(rates)
    with pytest.raises(
        ValueError, match="optimizers must be a list with one for each of the 3 parameter groups"
    ):
        step.following([1e-3, 2e-3, 3e-3], step.runtime.updater.optimizers[:1])


def test_the_rates_to_follow_are_those_of_the_groups_in_their_order() -> None:
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    groups = [{"params": r"scale$"}, {"params": lambda name, param: name.startswith("blocks.3")}]
    step = fzero.make_train_step(make(Plain), config(0, optimizer=sgd), param_groups=groups)
    state = step.init()
    before = step.gather(state)
    state, _ = step.following([0.0, 0.5, 0.25])(state, vectors(0))
    moved = {
        name for name, weight in step.gather(state).items() if not torch.equal(weight, before[name])
    }
    assert moved == {
        name for name in before if name.endswith("scale") or name.startswith("blocks.3")
    }
