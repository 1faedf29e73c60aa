"""The laws of loss scaling: the state machine, and steps with overflows, which change
only the loss scale.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import Plain, config, make, part, vectors

import fzero
from fzero.optim.loss_scale import LossScale, LossScaling
from fzero.optim.transforms import skip_if
from fzero.testing.reference_trainer import ReferenceLossScale

# --- the machine ----------------------------------------------------------------------------------


def step(rules: LossScaling, state: LossScale[Tensor], overflow: bool) -> LossScale[Tensor] | None:
    if rules.is_exhausted(state, torch.tensor(overflow)):
        return None
    return rules.update(state, torch.tensor(overflow))


GOLDEN = (
    "g 4/2 · b 4/1 · g 4/1 · b 2/1 · g 2/1 · g 2/1 · g 2/1 · g 4/2 · g 4/2 · b 4/1 · b 2/1 · b 1/1"
)


def test_the_machine_follows_the_trace_measured_on_deepspeed() -> None:
    rules = LossScaling(initial=4.0, dynamic=True, window=3, hysteresis=2, minimum=1.0)
    state = rules.init()
    for entry in GOLDEN.split(" · "):
        kind, expected = entry.split()
        after = step(rules, state, kind == "b")
        assert after is not None and f"{after.scale:g}/{after.hysteresis}" == expected
        state = after
    assert step(rules, state, True) is None and step(rules, state, False) is not None


rules_of_machines = st.builds(
    LossScaling,
    initial=st.integers(0, 8).map(lambda power: 2.0**power),
    dynamic=st.just(True),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
    minimum=st.sampled_from([0.5, 1.0, 3.0]),
)


@given(rules_of_machines, st.lists(st.booleans(), max_size=40))
def test_the_machine_is_the_reference_model(rules: LossScaling, overflows: list[bool]) -> None:
    plain, state = ReferenceLossScale(rules), rules.init()
    for overflow in overflows:
        after = step(rules, state, overflow)
        assert (after is None) == (overflow and plain.is_exhausted)
        if after is None:
            return
        plain.step(overflow)
        assert (after.scale.item(), after.hysteresis.item()) == (plain.scale, plain.left)
        state = after


def test_a_static_scale_never_changes_and_never_ends() -> None:
    rules = LossScaling(initial=128.0)
    state = rules.init()
    for overflow in (True, True, False, True):
        after = step(rules, state, overflow)
        assert after is not None and optree.tree_map(Tensor.item, after) == (128.0, 2, 0)
        state = after


class NoReading(TorchDispatchMode):
    """Fails when the host reads the value of a tensor."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(operator) and "is_nonzero" not in str(operator), (
            operator
        )
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adagrad"])
def test_the_host_reads_neither_the_loss_scale_nor_a_skipped_update(name: str) -> None:
    rules = LossScaling(initial=4.0, dynamic=True)
    state, overflow = rules.init(), torch.tensor(True)
    param, transform = torch.ones(64), getattr(fzero.optim, name)(0.1)
    optimizer = transform.init(param)
    with NoReading():
        rules.update(state, overflow), rules.is_exhausted(state, overflow)
        skip_if(overflow, transform).update(torch.full((64,), float("nan")), param, optimizer)
    assert torch.equal(param, torch.ones(64))
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReading():
        bool(overflow)


# --- the step -------------------------------------------------------------------------------------

FP16 = {
    "fp16": {
        "enabled": True,
        "auto_cast": True,
        "initial_scale_power": 14,
        "hysteresis": 1,
        "loss_scale_window": 3,
    }
}
SCHEDULER = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}
}
BAD, GOOD = True, False


class Dropping(Plain):
    """A model that also draws random numbers and has statistics that an overflow would
    ruin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(16, affine=False), nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.dropout(self.norm(x.float())).to(x.dtype), y)


def batches(step: Any, overflows: list[bool], bad_rank: int = -1) -> list[Any]:
    good, found = 0, []
    for overflow in overflows:
        x, y = part(vectors(good), step.rank, step.world_size)
        if overflow and step.rank == bad_rank % step.world_size:
            x = x.clone()
            x[0, 3] = 1e6
        good += not overflow
        found.append((x, y))
    return found


def _train(
    stage: int, overflows: list[bool], keys: dict[str, Any]
) -> tuple[list[Any], list[Tensor], int]:
    step = fzero.make_train_step(make(Dropping), config(stage) | SCHEDULER | keys)
    state, found = step.init(), []
    for batch in batches(step, overflows):
        state, metrics = step(state, batch)
        found.append((bool(metrics.overflow), metrics.loss_scale.item(), metrics.lr.item()))
    held = (state.params, state.master, state.optimizer, state.buffers, state.rng)
    return found, optree.tree_leaves(held), int(state.step)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_that_overflows_changes_only_the_loss_scale(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    clean = ranks(world_size, _train, stage, [GOOD] * 3, FP16)
    broken = ranks(world_size, _train, stage, [BAD, GOOD, GOOD, BAD, BAD, GOOD], FP16)
    for (clean_metrics, clean_held, _), (found, held, num_updates) in zip(
        clean, broken, strict=True
    ):
        assert num_updates == 3
        # The scale is a power of two, so that it does not change the bits of gradients within the
        # range of fp16.
        assert all(torch.equal(x, y) for x, y in zip(held, clean_held, strict=True))
        assert [overflow for overflow, _, _ in found] == [BAD, GOOD, GOOD, BAD, BAD, GOOD]
        assert [scale for _, scale, _ in found] == [2**14, 2**13, 2**13, 2**13, 2**12, 2**11]
        assert [lr for overflow, _, lr in found if not overflow] == [
            lr for _, _, lr in clean_metrics
        ]


def _non_finite_in_bf16(stage: int, check: bool) -> Any:
    keys = {"bf16": {"enabled": True, "auto_cast": True, "check_grad_overflow": check}}
    step = fzero.make_train_step(make(Plain), config(stage) | keys)
    state = step.init()
    before = [x.clone() for x in optree.tree_leaves((state.params, state.master, state.optimizer))]
    x, y = part(vectors(0), step.rank, step.world_size)
    try:
        state, metrics = step(state, (x * float("inf") if step.rank == 0 else x, y))
    except FloatingPointError as error:
        return str(error)
    after = optree.tree_leaves((state.params, state.master, state.optimizer))
    return bool(metrics.overflow), metrics.loss_scale.item(), all(map(torch.equal, before, after))


@pytest.mark.parametrize("stage", range(4))
def test_bf16_skips_gradients_that_are_not_finite_in_every_stage_or_raises(
    ranks: RankPool, stage: int
) -> None:
    """DeepSpeed's stage 3 does neither, and its weights become infinite."""
    assert ranks(2, _non_finite_in_bf16, stage, True) == [(True, 1.0, True)] * 2
    assert all(
        "loss is not finite on ranks [0]" in error
        for error in ranks(2, _non_finite_in_bf16, stage, False)
    )


def _infinite_loss(stage: int, keys: dict[str, Any]) -> tuple[bool, int]:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(*batch) + (float("inf") if step.rank == 0 else 0.0)  # its gradient is finite

    step = fzero.make_train_step(make(Plain), config(stage) | keys, loss_fn=loss_fn)
    state, metrics = step(step.init(), part(vectors(0), step.rank, step.world_size))
    return bool(metrics.overflow), int(state.step)


@pytest.mark.parametrize(
    "keys", [FP16, {"bf16": {"enabled": True, "auto_cast": True}}], ids=["fp16", "bf16"]
)
def test_a_loss_that_is_not_finite_is_an_overflow_too(
    ranks: RankPool, keys: dict[str, Any]
) -> None:
    assert ranks(2, _infinite_loss, 1, keys) == [(True, 0)] * 2


def _first_overflow(stage: int) -> tuple[str | None, str | None]:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = model(*batch[:2])
        # An infinite gradient for one parameter alone, on the last rank.
        return loss + (model.blocks[2].scale * batch[2]).sum()

    step = fzero.make_train_step(make(Plain), config(stage) | FP16, loss_fn=loss_fn)
    state, found = step.init(), []
    for extra in (0.0, 1e7 if step.rank == step.world_size - 1 else 0.0):
        batch = (*part(vectors(0), step.rank, step.world_size), torch.tensor(extra))
        state, _ = step(state, batch)
        found.append(step.first_overflow(state))
    return found[0], found[1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_first_parameter_whose_gradient_overflows_is_named(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    assert ranks(world_size, _first_overflow, stage) == [(None, "blocks.2.scale")] * world_size


def _exhausted(stage: int) -> tuple[str, bool]:
    keys = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 1, "hysteresis": 1}}
    step = fzero.make_train_step(make(Plain), config(stage) | keys)
    state = step.init()
    for batch in batches(step, [BAD]):
        state, _ = step(state, batch)
    before = [x.clone() for x in optree.tree_leaves((state.params, state.master, state.optimizer))]
    try:
        step(state, batches(step, [BAD])[0])
    except FloatingPointError as error:
        after = optree.tree_leaves((state.params, state.master, state.optimizer))
        return str(error), all(map(torch.equal, before, after))
    return "", False


@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_at_the_smallest_scale_raises_on_every_rank(
    ranks: RankPool, stage: int
) -> None:
    for message, is_unchanged in ranks(2, _exhausted, stage):
        assert (
            "with the loss scale at its minimum 1, first in 'blocks.0." in message and is_unchanged
        )


class One(nn.Module):
    """A gradient of exactly 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def _strides(stage: int) -> list[tuple[float, float, float]]:
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 4, "loss_scale_window": 2}
    cfg = config(stage, clip=0.0, optimizer={"type": "SGD", "params": {"lr": 1.0}}) | {"fp16": fp16}
    step = fzero.make_train_step(One(), cfg)
    state, found, last = step.init(), [], 0.0
    for _ in range(5):
        state, metrics = step(state, torch.ones(1))
        weight = step.gather(state)["weight"].item()
        found.append((weight - last, metrics.grad_norm.item(), metrics.loss_scale.item()))
        last = weight
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_divided_by_the_scale_that_their_loss_had_also_where_it_grows(
    ranks: RankPool, stage: int
) -> None:
    """DeepSpeed divides by the new scale when the scale grows, and in stage 0 it never
    multiplies the loss.
    """
    for strides in ranks(2, _strides, stage):
        assert strides == [(-1.0, 1.0, scale) for scale in (16, 16, 16, 32, 32)]
