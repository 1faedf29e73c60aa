"""A placement of one's own is a class: it says when a device computes with its memory,
and puts tensors there.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from test_offload import ACCUMULATING, ADAMW, PRECISIONS, blocks, config, data, differing
from torch import Tensor
from training import make, part

import fzero
from sharding import Placement

ARENA = torch.empty(1 << 22, dtype=torch.uint8)
"""A second pool of memory."""
NUM_USED = [0]


class InArena(Placement):
    """Parts of `ARENA`."""

    def is_here(self, device: str) -> bool:
        return False

    def put(self, x: Tensor, *, may_pin: bool = False) -> Tensor:
        start = NUM_USED[0]
        NUM_USED[0] += -(-x.nbytes // 64) * 64
        # which, unlike a view of the arena, has a version of its own
        memory = x.new_empty(0, device="cpu")
        return memory.set_(ARENA.untyped_storage(), start // x.itemsize, x.shape).copy_(x)

    def holds(self, x: Tensor, *, may_pin: bool = False) -> bool:
        return x.untyped_storage().data_ptr() == ARENA.untyped_storage().data_ptr()


HOME = InArena("host")


def _state(quantity: str, key: str, leaf: str) -> Placement | None:
    return HOME if quantity in ("master", "optimizer") else None


def _all(quantity: str, key: str, leaf: str) -> Placement | None:
    return HOME


def _half(quantity: str, key: str, leaf: str) -> Placement | None:
    return HOME if "1" in key and quantity in ("master", "optimizer") else None


WAYS: dict[str, Any] = {
    "moments": {"optimizer/*": HOME},
    "state": _state,
    "all that may": _all,
    "a half": _half,
}


def _trained(
    stage: int, precision: str, placements: Any
) -> tuple[list[str], fzero.TrainState[Any], int]:
    """Losses and norms, the state at the end, and how many of its tensors lie in the
    arena.
    """
    NUM_USED[0], found = 0, list[str]()
    cfg = config(stage, optimizer=ADAMW, clip=0.1) | PRECISIONS[precision] | ACCUMULATING
    step = fzero.make_train_step(make(blocks), cfg, placements=placements)
    state = step.init()
    for index in range(3):
        state, metrics = step(state, part(data(index), step.rank, step.world_size))
        found.append(repr((metrics.loss.item(), metrics.grad_norm.item())))
    there = sum(
        HOME.holds(x)
        for x in optree.tree_leaves((state.params, state.grads, state.master, state.optimizer))
        if isinstance(x, Tensor)
    )
    assert there == sum(
        isinstance(placement, InArena) for placement in step.plan.placements.values()
    )
    return found, optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state), there


def test_memory_that_a_card_does_not_compute_with_is_of_another_kind_than_the_device_s() -> None:
    with pytest.raises(
        ValueError, match=r"kind must not be 'device' .* got .*InArena.*; pass kind='host'"
    ):
        InArena()
    assert HOME.is_away and not Placement().is_away


@pytest.mark.covering(1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_tensors_in_a_second_pool_of_memory_train_with_the_bits_of_the_device(
    ranks: RankPool, precision: str, stage: int, world_size: int
) -> None:
    expected = ranks(world_size, _trained, stage, precision, None)
    for way, placements in WAYS.items():
        for (losses, state, num_there), (others, other, none) in zip(
            ranks(world_size, _trained, stage, precision, placements), expected, strict=True
        ):
            assert num_there > 0 == none
            assert (losses, differing(state, other)) == (others, []), way
