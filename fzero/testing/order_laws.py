"""The laws that an order of parameters must keep, so that a flat buffer can follow it on every rank."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from hypothesis import strategies as st

from fzero.plans.orders import OrderFunction
from fzero.testing.laws import Law


@dataclass(frozen=True, slots=True)
class OrderExample:
    """A number of parameters, and of ranks.

    >>> OrderExample(length=3, world_size=2)
    OrderExample(length=3, world_size=2)
    """

    length: int
    world_size: int


def _is_no_permutation(order: OrderFunction, example: OrderExample) -> str | None:
    indices = tuple(order(example.length, example.world_size).indices)
    if len(indices) != example.length:
        return f"it orders {len(indices)} of {example.length} parameters"
    missing = sorted(set(range(example.length)) - set(indices))
    return f"parameter {missing[0]} is not in {indices}" if missing else None


def _is_not_undone(order: OrderFunction, example: OrderExample) -> str | None:
    found, names = order(example.length, example.world_size), tuple(f"p{index}" for index in range(example.length))
    ordered = tuple(found.apply(names))
    if ordered != tuple(names[index] for index in found.indices):
        return f"apply gives {ordered} where indices are {found.indices}"
    undone = tuple(found.inverse().apply(ordered))
    return f"the inverse gives {undone}" if undone != names else None


def _changes(order: OrderFunction, example: OrderExample) -> str | None:
    state = random.getstate()
    try:
        first, second = (tuple(order(example.length, example.world_size).indices) for _ in range(2))
    finally:
        random.setstate(state)
    return f"two calls give {first} and {second}" if first != second else None


def _differs_by_rank(order: OrderFunction, example: OrderExample) -> str | None:
    found: dict[int, tuple[int, ...]] = {}
    for rank in sorted({0, example.world_size // 2, example.world_size - 1}):
        with _as_rank(rank, example.world_size):
            found[rank] = tuple(order(example.length, example.world_size).indices)
        if found[rank] != found[0]:
            return f"rank 0 has {found[0]} and rank {rank} has {found[rank]}"
    return None


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Inside, the environment variables are those of a rank of a job, without a process group."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with patch.dict(os.environ, {key: str(value) for key, value in told.items()}):
        yield


ORDER_LAWS: tuple[Law[OrderFunction, OrderExample], ...] = tuple(
    Law(sentence, fix, st.builds(OrderExample, st.integers(0, 40), st.integers(1, 64)), find_fault)
    for sentence, fix, find_fault in (
        (
            "it must be a permutation of the parameters",
            "Name every index from 0 to length - 1 once",
            _is_no_permutation,
        ),
        ("its inverse must undo it", "Return a sharding.Order, which has the inverse", _is_not_undone),
        (
            "equal arguments must give equal orders",
            "Draw no random numbers and remember nothing between calls",
            _changes,
        ),
        ("it must be the same on all ranks", "Compute it from the two numbers only", _differs_by_rank),
    )
)
