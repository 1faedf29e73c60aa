"""The order of parameters within flat buffers: as declared, round robin over the ranks,
or as the user says.

All flat buffers follow one order: a function of the numbers of parameters and of ranks,
or the names of all parameters. It does not decide which parameters share a buffer
(`fzero.plans.flat_params`), and it does not change what a model computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sharding import Order

T = TypeVar("T")

OrderFunction = Callable[..., Order]
"""A function of the number of parameters, and optionally of the number of ranks, that
returns the order in a flat buffer.
"""

GivenOrder = OrderFunction | Sequence[str] | None
"""An `OrderFunction`, the names of all parameters, or None for the configuration's
order.
"""


def in_two_numbers(order: OrderFunction) -> OrderFunction:
    """The order as a function of (number of parameters, number of ranks), even if the
    given function takes only the first.
    """
    try:
        parameters = list(inspect.signature(order).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return order
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if takes_any or any(p.default is p.empty or p.name == "world_size" for p in positional[1:2]):
        return order
    if any(p.name == "world_size" for p in parameters):
        return lambda length, world_size: order(length, world_size=world_size)
    return lambda length, world_size: order(length)


def check_named(order: GivenOrder, names: Sequence[str], aliases: Mapping[str, str]) -> None:
    """Raises a ValueError unless `order` is a function, or names every parameter once,
    by its first name.

    Args:
        order: see `GivenOrder`.
        names: the names of the model's parameters.
        aliases: the other names of tied parameters, each with the first one.

    >>> check_named(("b", "w"), ("w", "b"), {})
    >>> check_named(("b",), ("w", "b"), {})
    Traceback (most recent call last):
    ...
    ValueError: order: must name every parameter once, and 'w' is missing; name it, or pass sharding.round_robin
    """
    fix = "or pass sharding.round_robin"
    if order is None or callable(order):
        return
    if (
        isinstance(order, str)
        or not isinstance(order, Sequence)
        or not all(isinstance(name, str) for name in order)
    ):
        raise ValueError(
            f"order: must be a function of two numbers or a tuple of the names of all parameters, "
            f"got {order!r}; pass the names, {fix}"
        )
    known, seen = set(names), set()
    for name in order:
        if name in aliases:
            raise ValueError(
                f"order: must have tied parameters under their first names, got {name!r}; pass "
                f"{aliases[name]!r}"
            )
        if name not in known:
            raise ValueError(
                f"order: {name!r} is no parameter of the model; names look like "
                f"{', '.join(names[:4])}"
            )
        if name in seen:
            raise ValueError(
                f"order: must name every parameter once, got {name!r} twice; leave one out"
            )
        seen.add(name)
    missing = next((name for name in names if name not in seen), None)
    if missing is not None:
        raise ValueError(
            f"order: must name every parameter once, and {missing!r} is missing; name it, {fix}"
        )


def ordered(
    names: Sequence[str], order: OrderFunction | Sequence[str], num_shards: int
) -> tuple[str, ...]:
    """The names of one flat buffer, in the order of the buffer.

    Args:
        names: as declared.
        order: the names of all parameters, or a function of both numbers
            (`in_two_numbers`).
        num_shards: the number of ranks that share the buffer.

    Raises:
        ValueError: the function does not return an order of that many names.

    >>> from sharding import round_robin
    >>> ordered(("a", "b", "c", "d"), round_robin, 2), ordered(("a", "c"), ("c", "b", "a"), 2)
    (('a', 'c', 'b', 'd'), ('c', 'a'))
    """
    if not callable(order):
        wanted = set(names)
        return tuple(name for name in order if name in wanted)
    found: Any = order(len(names), num_shards)
    if not isinstance(found, Order) or len(found) != len(names):
        raise ValueError(
            f"order: must give a sharding.Order of {len(names)} parameters for ({len(names)}, "
            f"{num_shards}), got {found!r}; fzero.testing.check_order tries a function"
        )
    return found.apply(names)
