"""The laws that an order of parameters must keep, so that a flat buffer can follow it
on every rank.
"""

from __future__ import annotations

import os
import random
from typing import NamedTuple
from unittest.mock import patch

from hypothesis import strategies as st

from fzero.plans.orders import OrderFunction
from fzero.testing.laws import Laws


class OrderExample(NamedTuple):
    """A number of parameters, and of ranks."""

    length: int
    world_size: int


ORDER_LAWS = Laws[OrderFunction, OrderExample](
    st.builds(OrderExample, st.integers(0, 40), st.integers(1, 64))
)


@ORDER_LAWS.law(
    "it must be a permutation of the parameters", "Name every index from 0 to length - 1 once"
)
def _is_no_permutation(order: OrderFunction, example: OrderExample) -> str | None:
    indices = tuple(order(example.length, example.world_size).indices)
    if len(indices) != example.length:
        return f"it orders {len(indices)} of {example.length} parameters"
    missing = sorted(set(range(example.length)) - set(indices))
    return f"parameter {missing[0]} is not in {indices}" if missing else None


@ORDER_LAWS.law("its inverse must undo it", "Return a sharding.Order, which has the inverse")
def _is_not_undone(order: OrderFunction, example: OrderExample) -> str | None:
    found, names = (
        order(example.length, example.world_size),
        tuple(f"p{index}" for index in range(example.length)),
    )
    ordered = tuple(found.apply(names))
    if ordered != tuple(names[index] for index in found.indices):
        return f"apply gives {ordered} where indices are {found.indices}"
    undone = tuple(found.inverse().apply(ordered))
    return f"the inverse gives {undone}" if undone != names else None


@ORDER_LAWS.law(
    "equal arguments must give equal orders",
    "Draw no random numbers and remember nothing between calls",
)
def _changes(order: OrderFunction, example: OrderExample) -> str | None:
    state = random.getstate()
    try:
        first, second = (tuple(order(example.length, example.world_size).indices) for _ in range(2))
    finally:
        random.setstate(state)
    return f"two calls give {first} and {second}" if first != second else None


@ORDER_LAWS.law("it must be the same on all ranks", "Compute it from the two numbers only")
def _differs_by_rank(order: OrderFunction, example: OrderExample) -> str | None:
    found: dict[int, tuple[int, ...]] = {}
    size = str(example.world_size)
    for rank in sorted({0, example.world_size // 2, example.world_size - 1}):
        with patch.dict(
            os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size
        ):
            found[rank] = tuple(order(example.length, example.world_size).indices)
        if found[rank] != found[0]:
            return f"rank 0 has {found[0]} and rank {rank} has {found[rank]}"
    return None
