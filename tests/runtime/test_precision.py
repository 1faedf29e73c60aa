"""The laws of precision: training in 16 bits is the plain loop in the same arithmetic,
in every stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st
from ranks import RankPool
from torch import Tensor, nn
from training import (
    GLOBAL_BATCH,
    Mixed,
    Odd,
    Plain,
    config,
    make,
    part,
    tokens,
    train,
    train_in_16_bits,
    vectors,
    weights_of,
)

import fzero
from fzero.deepspeed.utils import safe_get_full_fp32_param
from fzero.optim.rounding import stochastic
from fzero.optim.transforms import mixed_precision

B, H, F = torch.bfloat16, torch.float16, torch.float32
NUM_STEPS = 4
STATIC = {"enabled": True, "auto_cast": True, "loss_scale": 1024}

POLICIES: dict[str, tuple[dict[str, Any], Mixed]] = {
    "fp32": ({}, Mixed(F, F, F)),
    "bf16": ({"bf16": {"enabled": True, "auto_cast": True}}, Mixed(B, B, B)),
    "fp16": ({"fp16": STATIC}, Mixed(H, H, H, scale=1024.0)),
    "bf16, gradients added up in fp32": (
        {"bf16": {"enabled": True, "auto_cast": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        Mixed(B, B, F),
    ),
    "bf16, reduced in fp32": (
        {"bf16": {"enabled": True, "auto_cast": True}, "communication_data_type": "fp32"},
        Mixed(B, F, B),
    ),
    "pure bf16": (
        {"bf16": {"enabled": True, "auto_cast": True, "bf16_master_weights_and_grads": True}},
        Mixed(B, B, B, B, F),
    ),
    "pure bf16, also the moments": (
        {
            "bf16": dict.fromkeys(
                ("enabled", "auto_cast", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
                True,
            )
        },
        Mixed(B, B, B, B, B),
    ),
    "pure fp16": (
        {"fp16": STATIC | {"fp16_master_weights_and_grads": True}},
        Mixed(H, H, H, H, F, 1024.0),
    ),
}


def _train(stage: int, keys: dict[str, Any], num_micro_steps: int = 1, clip: float = 0.0) -> Any:
    cfg = config(stage, clip=clip) | {"gradient_accumulation_steps": num_micro_steps} | keys
    return train(Plain, vectors, cfg | {"train_batch_size": GLOBAL_BATCH}, num_steps=NUM_STEPS)


def _train_all_stages(*args: Any) -> list[Any]:
    return [_train(stage, *args) for stage in range(4)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_micro_steps", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_16_bits_in_all_stages_are_the_plain_loop_in_the_same_arithmetic_bit_for_bit(
    ranks: RankPool, world_size: int, policy: str, num_micro_steps: int
) -> None:
    keys, mixed = POLICIES[policy]
    results = ranks(world_size, _train_all_stages, keys, num_micro_steps)
    for stage in range(4):
        oracle_curve, oracle_weights = train_in_16_bits(
            Plain,
            vectors,
            mixed,
            num_steps=NUM_STEPS,
            num_ranks=world_size,
            num_micro_steps=num_micro_steps,
            reduces_each=stage >= 2,
        )
        for by_stage in results:
            curve, weights = by_stage[stage]
            assert all(torch.equal(weights[name], oracle_weights[name]) for name in oracle_weights)
            # The metrics alone are added up in another order.
            assert curve == [pytest.approx(pair, rel=1e-6) for pair in oracle_curve]


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_micro_steps", [1, 2])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_in_16_bits_is_the_plain_loop_to_the_rounding_of_the_norm(
    ranks: RankPool, world_size: int, policy: str, num_micro_steps: int
) -> None:
    keys, mixed = POLICIES[policy]
    results = ranks(world_size, _train_all_stages, keys, num_micro_steps, 0.01)
    for stage in range(4):
        oracle_curve, oracle_weights = train_in_16_bits(
            Plain,
            vectors,
            mixed,
            num_steps=NUM_STEPS,
            num_ranks=world_size,
            num_micro_steps=num_micro_steps,
            reduces_each=stage >= 2,
            clip=0.01,
        )
        for by_stage in results:
            curve, weights = by_stage[stage]
            assert curve == results[0][stage][0]
            assert min(norm for _, norm in curve) > 0.02, "the clip must bind"
            # The norm is added up in another order, so that the factor may differ in its last bit;
            # then a master does, and where it stands between two 16-bit numbers the parameter,
            # whose last bit is 2^-8 of its size (2^-11 in fp16).
            assert curve == [pytest.approx(pair, rel=2e-3) for pair in oracle_curve]
            for name, weight in oracle_weights.items():
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-4)


def _train_odd(keys: dict[str, Any]) -> list[Any]:
    return [train(Odd, tokens, config(stage) | keys, num_steps=3) for stage in range(4)]


@pytest.mark.covering(0)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "keys",
    [
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 4}},
        {
            "bf16": dict.fromkeys(
                ("enabled", "bf16_master_weights_and_grads", "stochastic_rounding"), True
            )
        },
        {"torch_autocast": {"enabled": True}},
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}},
        {"gradient_norm_type": "inf"},
    ],
    ids=str,
)
def test_a_peculiar_model_gives_the_same_bits_in_all_stages(
    ranks: RankPool, world_size: int, keys: Any
) -> None:
    results = ranks(world_size, _train_odd, keys)
    first_curve, first_weights = results[0][0]
    assert first_curve[-1][0] < first_curve[0][0], "it must learn something"
    for curve, weights in (result for by_stage in results for result in by_stage):
        assert curve == first_curve
        assert all(torch.equal(weights[name], first_weights[name]) for name in first_weights)


# --- which dtype is where -------------------------------------------------------------------------


class Rotary(nn.Module):
    """A module whose buffer needs all its bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.tensor([1 / 3]))
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.cos(self.frequency).to(self.norm.weight.dtype)
        return self.norm(self.linear(x * angle)).float().square().mean()


def dtypes(keys: dict[str, Any], stage: int = 0) -> tuple[dict[str, list[str]], str]:
    step = fzero.make_train_step(Rotary(), config(stage) | keys)
    state = step.init()
    found = {
        "params": [x.dtype for x in state.params.values()],
        "master": [x.dtype for x in state.master.values()],
        "grads": [x.dtype for x in state.grads.values()],
        "moments": [x.exp_avg.dtype for x in state.optimizer.values()],
        "buffers": [x.dtype for x in state.buffers.values()],
    }
    names = {
        part: [str(dtype).removeprefix("torch.") for dtype in all_] for part, all_ in found.items()
    }
    return {part: list(dict.fromkeys(all_)) for part, all_ in names.items()}, str(step.plan)


def test_dtypes_are_what_was_asked_for_and_the_plan_shows_every_one() -> None:
    found, shown = dtypes({})
    assert found == {
        "params": ["float32"],
        "master": [],
        "grads": ["float32"],
        "moments": ["float32"],
        "buffers": ["float32"],
    }
    assert "parameters float32, which are the master" in shown and "module buffers float32" in shown
    found, shown = dtypes({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})
    assert found == {
        "params": ["bfloat16"], "master": ["float32"], "grads": ["float32"], "moments": ["float32"],
        "buffers": ["float32"],
    }  # fmt: skip
    assert (
        "parameters bfloat16, master float32, gradients reduced in bfloat16 and added up in "
        "float32, optimizer state float32" in shown
    )
    found, shown = dtypes({"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}})
    assert found["buffers"] == ["bfloat16"] and "module buffers bfloat16" in shown
    found, _ = dtypes({"torch_autocast": {"enabled": True}})
    assert found["params"] == ["bfloat16", "float32"] and found["master"] == ["float32"]
    names = ["torch.nn.Conv1d", "torch.nn.LayerNorm"]
    found, _ = dtypes({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": names}})
    assert found["params"] == ["float32", "bfloat16"]
    found, _ = dtypes(
        {"data_types": {"param_dtype": "bf16", "master_dtype": "bf16", "optimizer_dtype": "fp32"}}
    )
    assert (
        found["params"] == found["grads"] == ["bfloat16"]
        and found["master"] == []
        and found["moments"] == ["float32"]
    )


def test_a_buffer_keeps_its_bits_beside_16_bit_parameters() -> None:
    step = fzero.make_train_step(
        Rotary(), config(0) | {"bf16": {"enabled": True, "auto_cast": True}}
    )
    state, _ = step(step.init(), torch.randn(3, 8))
    assert state.buffers["frequency"] == torch.tensor([1 / 3])


@pytest.mark.parametrize("world_size", [1, 2, 4, 64])
def test_planned_bytes_in_16_bits_are_the_papers_formula(world_size: int) -> None:
    """ZeRO §3 and figure 1: 2Ψ parameters, 2Ψ gradients, and 12Ψ of master and moments."""
    model = Plain(width=64)
    for keys in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}):
        for stage in range(4):
            plan = fzero.plan(model, config(stage) | keys, world_size=world_size)
            psi = sum(param.numel() for param in model.parameters()) + plan.padding
            optimizer = 8 * psi // (world_size if stage >= 1 else 1) + 4 * len(plan.flat_buffers)
            assert plan.bytes_per_rank == {
                "parameters": 2 * psi // (world_size if stage >= 3 else 1),
                "master": 4 * psi // (world_size if stage >= 1 else 1),
                "gradients": 2 * psi // (world_size if stage >= 2 else 1),
                "optimizer": optimizer,
            }


def _bytes_of_elements(stage: int, keys: dict[str, Any]) -> dict[str, float]:
    log: list[fzero.comms.CommRecord] = []
    step = fzero.make_train_step(
        make(Plain), config(stage) | keys, mesh=replace(fzero.join(), observe=log.append)
    )
    state = step.init()
    log.clear()
    step(state, part(vectors(0), step.rank, step.world_size))
    elements: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for sent in log:
        elements[sent.label.purpose] += sent.num_elements
        nbytes[sent.label.purpose] += sent.nbytes
    return {
        label: nbytes[label] / elements[label]
        for label in ("gather", "reduce", "all_gather_params")
        if elements[label]
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_what_is_sent_has_the_dtype_that_was_asked_for(ranks: RankPool, stage: int) -> None:
    moves = "gather" if stage == 3 else "all_gather_params"
    for communication, nbytes in ((None, 2), ("fp32", 4), ("fp16", 2)):
        keys = {
            "bf16": {"enabled": True, "auto_cast": True},
            "communication_data_type": communication,
        }
        for found in ranks(2, _bytes_of_elements, stage, keys):
            assert found["reduce"] == nbytes
            assert found.get(moves, 2) == 2
    for found in ranks(2, _bytes_of_elements, stage, {"communication_data_type": "bf16"}):
        assert found["reduce"] == 2 and found.get(moves, 4) == 4


def test_autocast_is_the_plain_loop_under_autocast_bit_for_bit(device: torch.device) -> None:
    cfg = config(
        3, clip=0.0, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    )
    curve, weights = train(
        Plain, vectors, cfg | {"torch_autocast": {"enabled": True}}, num_steps=NUM_STEPS
    )
    module = make(Plain)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = module(*vectors(index))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [loss for loss, _ in curve] == losses
    assert all(torch.equal(weights[name], weight) for name, weight in weights_of(module).items())


# --- gather and initial values --------------------------------------------------------------------


def _gathers_the_master(stage: int) -> bool:
    model = make(Odd)
    step = fzero.make_train_step(model, config(stage) | {"bf16": {"enabled": True}})
    full = step.gather(step.init())
    return all(
        torch.equal(full[name], tensor)
        for name, tensor in weights_of(model).items()
        if "1.up.bias" not in name
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_the_weights_gathered_are_the_masters_to_the_last_bit(ranks: RankPool, stage: int) -> None:
    assert all(ranks(3, _gathers_the_master, stage))


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_an_engine_s_master_starts_from_the_fp32_weights(kind: str, stage: int) -> None:
    """DeepSpeed's starts from weights that are rounded already."""
    weights = make(Plain).state_dict()
    engine, *_ = fzero.initialize(
        model=make(Plain), config=config(stage) | {kind: {"enabled": True}}
    )
    with engine.gathered() as narrow:
        assert all(
            not torch.equal(narrow[name].float(), weights[name])
            for name in weights
            if "scale" not in name
        )
    for name, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), weights[name])


def test_an_fp32_state_dict_reaches_the_master_of_a_16_bit_model_unrounded() -> None:
    weights = weights_of(make(Plain))
    step = fzero.make_train_step(make(Plain).bfloat16(), config(1) | {"bf16": {"enabled": True}})
    full = step.gather(step.init(weights))
    assert all(torch.equal(full[name], weights[name]) for name in weights)


# --- how gradients are divided --------------------------------------------------------------------


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "keys",
    [
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 1.0},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=str,
)
def test_where_gradients_are_divided_changes_the_rounding_only(
    ranks: RankPool, stage: int, keys: Any
) -> None:
    (curve, weights), *_ = ranks(3, _train, stage, keys)
    (expected_curve, expected_weights), *_ = ranks(3, _train, stage, {})
    # fp32 and three ranks: a third is rounded before or after the sum.
    assert curve == [pytest.approx(pair, rel=1e-5) for pair in expected_curve]
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-5)
    assert (curve == expected_curve) == ("prescale_gradients" in keys)


class Steep(nn.Module):
    """A gradient of 40,000 on every rank: fp16 holds it and not twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def _overflows(keys: dict[str, Any]) -> list[float]:
    fp16 = {"fp16": {"enabled": True, "loss_scale": 1, "auto_cast": True}}
    step = fzero.make_train_step(Steep(), config(0) | fp16 | keys)
    _, metrics = step(step.init(), torch.tensor([40000.0]))
    return [float(metrics.overflow), metrics.grad_norm.item()]


def test_gradients_divided_before_the_sum_do_not_overflow_fp16(ranks: RankPool) -> None:
    assert (
        ranks(2, _overflows, {})
        == ranks(2, _overflows, {"gradient_predivide_factor": 2})
        == [[0.0, 40000.0]] * 2
    )
    assert [overflow for overflow, _ in ranks(2, _overflows, {"gradient_predivide_factor": 1})] == [
        1.0,
        1.0,
    ]


def test_a_sum_of_gradients_is_divided_nowhere() -> None:
    """Half of 2^-24, the smallest number in fp16, would be 0."""
    fp16 = {
        "fp16": {"enabled": True, "loss_scale": 1, "auto_cast": True},
        "gradient_allreduce_op": "sum",
    }
    step = fzero.make_train_step(Steep(), config(0, clip=0.0) | fp16)
    assert step(step.init(), torch.tensor([2.0**-24]))[1].grad_norm == 2.0**-24


class Counts(nn.Module):
    """The loss is `weight · x + y`, with dropout; a buffer counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count.add_(1)
        return nn.functional.dropout(self.weight * x, 0.5).sum() + y.sum()


def _skips(stage: int, x: float, y: float) -> None:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    step = fzero.make_train_step(Counts(), config(stage) | fp16, donate=False)
    state, _ = step(step.init(), (torch.ones(1, 4), torch.zeros(1)))
    is_bad = step.rank == step.world_size - 1
    skipped, metrics = step(
        state, (torch.full((1, 4), x if is_bad else 1.0), torch.full((1,), y if is_bad else 0.0))
    )
    assert metrics.overflow and (state.loss_scale.scale, skipped.loss_scale.scale) == (16, 8)
    assert state.buffers["count"] == 1
    for name in ("step", "params", "master", "optimizer", "buffers", "rng"):
        before, after = (optree.tree_leaves(getattr(x, name)) for x in (state, skipped))
        assert all(map(torch.equal, before, after)), name


@pytest.mark.parametrize(("x", "y"), [(60000.0, 0.0), (1.0, math.inf)], ids=["gradient", "loss"])
def test_after_an_overflow_of_the_gradient_or_the_loss_on_one_rank_the_state_is_as_before(
    ranks: RankPool, x: float, y: float
) -> None:
    for stage in (0, 3):
        _skips(stage, x, y)
        ranks(2, _skips, stage, x, y)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_inf_norm_is_the_largest_gradient_of_all_and_clips_by_it(
    ranks: RankPool, world_size: int
) -> None:
    results = ranks(world_size, _train_all_stages, {"gradient_norm_type": "inf"}, 1, 0.001)
    module = make(Plain)
    module(*vectors(0)).backward()
    largest = max(param.grad.abs().max().item() for param in module.parameters())
    assert largest > 0.002, "the clip must bind"
    for curve, weights in (result for by_stage in results for result in by_stage):
        assert curve == results[0][0][0]
        assert curve[0][1] == pytest.approx(largest, rel=1e-6)
        assert all(torch.equal(weights[name], results[0][0][1][name]) for name in weights)


# --- updates of narrow numbers --------------------------------------------------------------------


@given(
    st.integers(0, 2**31),
    st.integers(0, 10**7),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
def test_stochastic_rounding_gives_a_neighbour_and_keeps_what_is_exact(
    seed: int, start: int, value: float
) -> None:
    wide, narrow = torch.full((64,), value), torch.empty(64, dtype=torch.bfloat16)
    stochastic(seed, start)(wide, narrow, 0, 0)
    bits = wide.view(torch.int32)
    below = (bits & -0x10000).view(torch.float32).bfloat16()
    above = ((bits & -0x10000) + 0x10000).view(torch.float32).bfloat16()
    assert ((narrow == below) | (narrow == above)).all()
    exact = below.float()
    stochastic(seed, start)(exact, narrow, 0, 0)
    assert torch.equal(narrow, below)


def test_stochastic_rounding_is_right_on_average_and_does_not_depend_on_the_cut() -> None:
    wide, narrow = torch.full((1 << 16,), 1 + 2**-10), torch.empty(1 << 16, dtype=torch.bfloat16)
    stochastic(3, 0)(wide, narrow, 0, 1)
    # A quarter... of the way from 1 to 1 + 2^-7 is 1/8; 65,536 draws, so that one standard
    # deviation is 0.0013.
    assert (narrow.float() > 1).float().mean().item() == pytest.approx(1 / 8, abs=0.006)
    halves = torch.empty_like(narrow)
    for start in (0, 1 << 15):
        stochastic(3, 0)(wide[: 1 << 15], halves[start : start + (1 << 15)], start, 1)
    assert torch.equal(halves, narrow)
    stochastic(4, 0)(wide, halves, 0, 1)
    assert not torch.equal(halves, narrow)
    stochastic(3, 0)(wide, halves, 0, 2)
    assert not torch.equal(halves, narrow)


def test_stochastic_rounding_keeps_infinities_and_nan() -> None:
    wide = torch.tensor([float("inf"), float("-inf"), float("nan")])
    narrow = torch.empty(3, dtype=torch.bfloat16)
    stochastic(1, 5)(wide, narrow, 0, 0)
    assert narrow[:2].tolist() == [float("inf"), float("-inf")] and narrow[2].isnan()


def test_small_updates_are_lost_to_the_nearest_and_kept_at_random() -> None:
    # 100 updates of 2^-12: a thirty-second of the last bit of 1.
    def after(rounding: Any) -> float:
        param, transform = torch.ones(4096, dtype=torch.bfloat16), fzero.sgd(2**-12)
        state = mixed_precision(transform, state_dtype="bfloat16").init(param)
        for index in range(100):
            one = mixed_precision(transform, state_dtype="bfloat16", **rounding(index))
            _, param, state = one.update(torch.full((4096,), -1.0), param, state)
        return param.float().mean().item()

    assert after(lambda index: {}) == 1.0
    assert after(lambda index: {"rounding": stochastic(index, 0)}) == pytest.approx(
        1 + 100 / 4096, rel=1e-3
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("numel", [0, 1, 100, 128, 1000])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")], ids=str
)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adagrad"])
def test_tiles_change_nothing(name: str, dtypes: tuple[str, str], numel: int) -> None:
    def after(tile: int | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        transform, out = getattr(fzero.optim, name)(0.1), torch.zeros(numel, dtype=torch.float16)
        param = torch.randn(numel, generator=generator).to(getattr(torch, dtypes[0]))
        state = mixed_precision(transform, state_dtype=dtypes[1]).init(param)
        for index in range(3):
            one = mixed_precision(
                transform,
                state_dtype=dtypes[1],
                rounding=stochastic(index, 0),
                factor=torch.tensor(0.3),
                out=out,
                tile=tile,
            )
            _, param, state = one.update(torch.randn(numel, generator=generator), param, state)
        assert state.step == 3
        assert torch.equal(out, param.half())
        return [param, out, *(x for x in state if x is not None)]

    # Tiles of a multiple of 32, so that a vectorised kernel meets the same lanes.
    for tile in (32, 128, 1000):
        assert all(torch.equal(x, y) for x, y in zip(after(tile), after(None), strict=True))


def test_a_widened_transform_places_what_it_makes() -> None:
    for transform in (
        fzero.adamw(1e-3),
        fzero.sgd(0.1, momentum=0.9),
        fzero.optim.lion(1e-3),
        fzero.sgd(0.1),
    ):
        for param_dtype, state_dtype in (
            ("bfloat16", "float32"),
            ("bfloat16", "bfloat16"),
            ("float32", "bfloat16"),
        ):
            param = torch.zeros(64, dtype=getattr(torch, param_dtype))
            narrow = mixed_precision(transform, state_dtype=state_dtype)
            spec = fzero.specs_of(param)
            made = [(tuple(x.shape), str(x.dtype)) for x in narrow.init(param) if x is not None]
            assert made == [
                (x.shape, f"torch.{x.dtype}") for x in narrow.specs(spec) if x is not None
            ]


# --- what does not fit ----------------------------------------------------------------------------


class Double(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.double()


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "Lion", "Lamb", "Adafactor", "Muon"])
@pytest.mark.parametrize(
    "keys",
    [
        {"bf16": {"enabled": True, "auto_cast": True}},
        {"fp16": STATIC},
        {"torch_autocast": {"enabled": True}},
        {"data_types": {"optimizer_dtype": "fp32"}},
        {"data_types": {"master_dtype": "fp32"}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
    ],
    ids=str,
)
def test_fp64_parameters_are_updated_in_fp64_in_every_mode(
    keys: dict[str, Any], optimizer: str
) -> None:
    cfg = config(1, optimizer={"type": optimizer, "params": {"lr": 1e-3}}) | keys
    step = fzero.make_train_step(make(Double), cfg)
    state = step.init()
    before = step.gather(state)
    batch = vectors(0) if "auto_cast" in str(keys) else tuple(x.double() for x in vectors(0))
    for _ in range(2):
        state, _ = step(state, batch)
    after = step.gather(state)
    assert all(x.isfinite().all() and not torch.equal(x, before[name]) for name, x in after.items())
    wide = torch.float32 if "master_dtype" in str(keys) else torch.float64
    assert all(x.dtype == wide for x in after.values())


def _state_of_another_step(
    stage: int, other: int, keys: dict[str, Any], others: dict[str, Any]
) -> str:
    step = fzero.make_train_step(make(Plain), config(stage) | keys)
    state = fzero.make_train_step(make(Plain), config(other) | others).init()
    messages = set()
    for use in (
        lambda: step(state, vectors(0)),
        lambda: step.evaluate(state, vectors(0)),
        lambda: step.gather(state),
    ):
        with pytest.raises(ValueError, match=r"^state.* this step's") as raised:
            use()
        messages.add(str(raised.value))
    return messages.pop()


@pytest.mark.parametrize(
    ("stage", "other", "keys", "others", "reported"),
    [
        (
            0,
            1,
            {},
            {},
            "must be torch.float32 of shape .* in this step .stage 0, 2 ranks., got torch.float32 "
            "of shape",
        ),
        (2, 0, {}, {}, "in this step .stage 2"),
        (3, 2, {}, {}, r"state.params\[.blocks.0/float32.\]: must be"),
        (
            1,
            1,
            {"bf16": {"enabled": True}},
            {},
            r"without state.grads\[.blocks.0/bfloat16-float32.\]",
        ),
        (
            1,
            1,
            {},
            {"optimizer": {"type": "SGD"}},
            r"without state.optimizer\[.blocks.0/float32.\].exp_avg",
        ),
        (
            1,
            1,
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"bf16": {"enabled": True}},
            "must be torch.float32 .* got torch.bfloat16",
        ),
    ],
)
def test_a_state_of_another_step_is_reported(
    ranks: RankPool,
    stage: int,
    other: int,
    keys: dict[str, Any],
    others: dict[str, Any],
    reported: str,
) -> None:
    import re

    for message in ranks(2, _state_of_another_step, stage, other, keys, others):
        assert re.search(reported, message), message


def test_a_batch_or_a_buffer_of_another_dtype_is_reported_with_the_fix() -> None:
    step = fzero.make_train_step(make(Plain), config(0) | {"bf16": {"enabled": True}})
    with pytest.raises(RuntimeError, match="dtype") as raised:
        step(step.init(), vectors(0))
    assert "auto_cast" in raised.value.__notes__[0] and "buffer_dtype" in raised.value.__notes__[0]


def test_what_cannot_be_trained_or_does_not_exist_is_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match=r"parameter 'weight': must be real to be trained, got torch.complex64"
    ):
        fzero.make_train_step(model, config(0))
    names = {
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linaer"]}
    }
    with pytest.raises(
        fzero.ConfigError, match=r"lower_precision_safe_modules: must be dotted names .*Linaer"
    ):
        fzero.Config.load(names)
    with pytest.raises(ValueError, match=r"lr_schedule: must give a number .*, got 'a' for 0"):
        fzero.make_train_step(make(Plain), config(0), lr_schedule=lambda n: "a")
    for name, reported in (
        ("OneBitAdam", "knows DeepSpeed's 'OneBitAdam'"),
        ("Rprop", "Rprop: does not take a flat tensor"),
    ):
        params = {"etas": [0.5]} if name == "Rprop" else {}
        with pytest.raises(fzero.ConfigError, match=reported):
            fzero.Config.load({"optimizer": {"type": name, "params": params}})


def test_a_lazy_module_that_has_not_run_is_refused_by_name() -> None:
    weight, statistics = (
        nn.Sequential(nn.LazyLinear(2)),
        nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)),
    )
    for model, named in ((weight, "parameter '0.weight'"), (statistics, "buffer '1.running_mean'")):
        with pytest.raises(ValueError, match=f"{named}: must have a shape.* run the model once"):
            fzero.make_train_step(model, config(0))


# --- what is frozen -------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Frozen linear maps of full precision, each with a small one beside it that is
    trained.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(2)).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for base in self.base:
            x = torch.tanh(base(x) + self.up(self.down(x)))
        return nn.functional.mse_loss(x, y)


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize("stage", range(4))
def test_frozen_weights_under_autocast_come_back_with_all_their_bits(
    stage: int, tmp_path: Path
) -> None:
    model = make(Adapted)
    own = {name: param.clone() for name, param in model.base.named_parameters(prefix="base")}

    def has_own(weights: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(weights[name].cpu(), weight.cpu()) for name, weight in own.items())

    recipe = fzero.make_train_step(model, config(stage) | AUTOCAST)
    other = fzero.make_train_step(model, config(3 - stage) | AUTOCAST)
    plain = fzero.make_train_step(model, config(stage))
    for world_size in (1, 2):
        step, moved, wide = (
            fzero.simulate(x, world_size, by="lockstep") for x in (recipe, other, plain)
        )
        state, _ = step(step.init(), tuple(x.unflatten(0, (world_size, -1)) for x in vectors(0)))
        keys = [b.key for b in step.plan.flat_buffers if not b.trainable]
        assert keys and all(
            state.params[key].dtype == B and state.master[key].dtype == F for key in keys
        )
        assert has_own(step.gather(state))
        assert has_own(moved.gather(fzero.reshard(state, step, moved)))
        assert has_own(wide.gather(fzero.reshard(state, step, wide)))
        back = fzero.reshard(fzero.reshard(state, step, wide), wide, step)
        assert all(torch.equal(back.params[key], state.params[key]) for key in keys) and has_own(
            step.gather(back)
        )
        fzero.save(state, tmp_path / f"{world_size}", step=step)
        for into in (step, moved, wide):
            assert has_own(into.gather(fzero.load(tmp_path / f"{world_size}", step=into).state))
        fzero.checkpoint.export(tmp_path / f"{world_size}", tmp_path / "out", dtype="float32")
        assert has_own(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
        fzero.checkpoint.save_16bit_model(state, tmp_path / "out", step=step, dtype="float32")
        assert has_own(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
        assert has_own(step.gather(fzero.load_weights(tmp_path / "out", step=step)))


def test_frozen_weights_under_autocast_compute_as_in_plain_autocast_in_all_stages(
    ranks: RankPool, device: torch.device
) -> None:
    module, curve = make(Adapted), []
    optimizer = torch.optim.AdamW(
        [*module.down.parameters(), *module.up.parameters()], lr=1e-2, weight_decay=0.1
    )
    for index in range(3):
        with torch.autocast(device.type, torch.bfloat16):
            loss = module(*vectors(index))
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    runs = ranks(2, _train_adapted)
    assert all(run == runs[0][0] for of_rank in runs for run in of_rank)
    assert runs[0][0] == pytest.approx(curve, rel=1e-2)


def _train_adapted() -> list[list[float]]:
    return [
        [loss for loss, _ in train(Adapted, vectors, config(stage) | AUTOCAST, num_steps=3)[0]]
        for stage in range(4)
    ]
