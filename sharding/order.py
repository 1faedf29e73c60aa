"""The order of the parameters in a flat buffer.

An order is an explicit permutation of the declared parameters; it does not depend on
how a tree is traversed. Declaration order keeps a unit's parameters together. Round
robin distributes them over `num_lists` lists, as DeepSpeed does: gradients that become
ready at the same time then belong to different ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from sharding.checks import check_at_least

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """A permutation: item i of the result is item `indices[i]` of the input.

    >>> order = Order((2, 0, 1))
    >>> order.apply(("a", "b", "c"))
    ('c', 'a', 'b')
    >>> order.inverse().apply(order.apply(("a", "b", "c")))
    ('a', 'b', 'c')
    """

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(self.indices))
        seen: set[int] = set()
        for index in self.indices:
            if not isinstance(index, int) or not 0 <= index < len(self.indices):
                raise ValueError(
                    f"Order: indices must be those of {len(self.indices)} items, got {index!r}; "
                    f"number items from 0 on"
                )
            if index in seen:
                raise ValueError(
                    f"Order: indices must differ, got {index} twice; name every item once"
                )
            seen.add(index)

    def __len__(self) -> int:
        return len(self.indices)

    def apply(self, items: Sequence[T]) -> tuple[T, ...]:
        """The items in this order.

        >>> Order((1, 0)).apply(["a", "b"])
        ('b', 'a')
        """
        if len(items) != len(self):
            raise ValueError(
                f"Order: orders {len(self)} items, got {len(items)}; make an order of this many"
            )
        return tuple(map(items.__getitem__, self.indices))

    def inverse(self) -> "Order":
        """The order that undoes this one.

        >>> Order((2, 0, 1)).inverse()
        Order(indices=(1, 2, 0))
        """
        places = {index: place for place, index in enumerate(self.indices)}
        return Order(tuple(places[index] for index in range(len(self))))


def declaration(length: int) -> Order:
    """The order that changes nothing.

    >>> declaration(3)
    Order(indices=(0, 1, 2))
    """
    check_at_least("declaration", "length", length, 0)
    return Order(tuple(range(length)))


def round_robin(length: int, num_lists: int) -> Order:
    """Item i goes to list i mod `num_lists`, and the lists are joined.

    >>> round_robin(7, num_lists=3).indices
    (0, 3, 6, 1, 4, 2, 5)
    """
    check_at_least("round_robin", "length", length, 0)
    check_at_least("round_robin", "num_lists", num_lists, 1)
    return Order(
        tuple(index for first in range(num_lists) for index in range(first, length, num_lists))
    )
