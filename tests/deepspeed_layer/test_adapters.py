"""Adapted models: nothing is kept for what is frozen but the parameters themselves, and
stage 3 divides these.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from training import adamw, config, make, part, train, train_plainly, vectors

import fzero
from sharding import Replicated, Sharded

WIDTH, RANK, NUM_BLOCKS = 16, 3, 4


class Adapted(nn.Module):
    """LoRA (Hu et al., arXiv:2106.09685): a frozen linear map, and a trainable one of
    low rank beside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(NUM_BLOCKS))
        self.frozen_head = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.frozen_head(x), y)


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True, "auto_cast": True}},
}


def _held(stage: int, keys: dict[str, Any]) -> Any:
    step = fzero.make_train_step(make(Stack), config(stage) | keys)
    start = step.gather(step.init())
    state, _ = step(step.init(), part(vectors(0), step.rank, step.world_size))
    end = step.gather(state)
    per_dtype = {key: x.element_size() for key, x in state.params.items()}
    return {
        "kept": [set(state.params), set(state.grads), set(state.optimizer), set(state.master)],
        "frozen": {b.key: b.layout.partition for b in step.plan.flat_buffers if not b.trainable},
        "elements": {key: x.numel() for key, x in state.params.items()},
        "itemsizes": set(per_dtype.values()),
        "moved": sorted(name for name in start if not torch.equal(start[name], end[name])),
        "specs": {b.key: b.row.params for b in step.plan.flat_buffers if not b.trainable},
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters_have_no_gradients_master_or_moments_and_are_divided_in_stage_3(
    ranks: RankPool, stage: int, precision: str
) -> None:
    for held in ranks(2, _held, stage, PRECISIONS[precision]):
        params, grads, optimizer, master = held["kept"]
        trained = params - set(held["frozen"])
        assert len(trained) == NUM_BLOCKS and len(held["frozen"]) == NUM_BLOCKS + 1
        assert grads == optimizer == trained and master == (
            trained if precision == "bf16" else set()
        )
        for key, partition in held["frozen"].items():
            assert held["specs"][key] == (Sharded("data") if stage == 3 else Replicated())
            assert held["elements"][key] == (
                partition.shard_numel if stage == 3 else partition.padded_numel
            )
        assert held["itemsizes"] == {2 if precision == "bf16" else 4}
        assert held["moved"] == sorted(
            f"blocks.{i}.{name}.weight" for i in range(NUM_BLOCKS) for name in ("down", "up")
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_adapted_model_trains_as_in_the_plain_loop(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    expected_curve, expected = train_plainly(Stack, vectors, adamw, num_steps=5)
    for curve, weights in ranks(world_size, train, Stack, vectors, config(stage), num_steps=5):
        # The mean of W means is not the sum of the global batch to the last bit.
        assert curve == [pytest.approx(pair, rel=1e-5) for pair in expected_curve]
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


def test_the_plan_counts_no_state_for_what_is_frozen() -> None:
    model = make(Stack)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    plan = fzero.plan(model, config(2) | PRECISIONS["bf16"], world_size=1)
    padded = sum(b.padded_numel for b in plan.flat_buffers if b.trainable)
    assert trained <= padded < trained + 32 * NUM_BLOCKS
    assert (
        plan.bytes_per_rank["gradients"] == 2 * padded
        and plan.bytes_per_rank["master"] == 4 * padded
    )
    assert plan.bytes_per_rank["optimizer"] == 8 * padded + 4 * NUM_BLOCKS
