"""Layouts: the position of each parameter in a flat buffer, and its fragments in the
shards.

The parameters follow each other without gaps in the order of `names`. A `Partition`
then divides the buffer by its length only, so that a shard boundary may fall inside a
parameter. The part of a parameter that one shard holds is a `Fragment`. Zero-sized and
0-d parameters need no special care.

Shape letters: N elements of all parameters, P padded = W * S, S shard, W ranks.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from sharding.checks import check_at_least, check_shape
from sharding.partition import Partition


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, stop) of the flattened parameter `name`, which are at `offset`
    inside the shard.

    >>> Fragment("w", start=4, stop=6, offset=0).numel
    2
    """

    name: str
    start: int
    stop: int
    offset: int

    def __post_init__(self) -> None:
        check_at_least("Fragment", "start", self.start, 0)
        check_at_least("Fragment", "stop", self.stop, self.start)
        check_at_least("Fragment", "offset", self.offset, 0)

    @property
    def numel(self) -> int:
        """The elements of the fragment."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Parameters one after another in a flat buffer, cut into equal shards with padding
    at the end.

    Args:
        names: the parameters in the order of the buffer; all names differ.
        shapes: the shape of each parameter.
        world_size: W, the number of ranks among which the buffer is divided.
        multiple_of: the length of every shard is a multiple of this.

    Attributes:
        numels: the elements of each parameter.
        offsets: the start of each parameter in the buffer.
        numel: N, the elements of all parameters.
        partition: the division of the buffer.

    Raises:
        ValueError: a name occurs twice, a shape is missing or not a shape, or a number
            is too small.

    >>> layout = FlatLayout(
    ...     names=("w", "scale", "b"), shapes=((2, 3), (), (3,)), world_size=2, multiple_of=2
    ... )
    >>> layout.numel, layout.offsets, layout.partition.shard_numel
    (10, (0, 6, 7), 6)
    >>> layout.fragments(0)
    (Fragment(name='w', start=0, stop=6, offset=0),)
    >>> layout.fragments(1)
    (Fragment(name='scale', start=0, stop=1, offset=0), Fragment(name='b', start=0, stop=3, offset=1))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    world_size: int
    multiple_of: int = 1
    numels: tuple[int, ...] = field(init=False, repr=False, compare=False)
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    partition: Partition = field(init=False, repr=False, compare=False)
    _places: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names, shapes = tuple(self.names), tuple(tuple(shape) for shape in self.shapes)
        if len(names) != len(shapes):
            raise ValueError(
                f"FlatLayout: got {len(names)} names but {len(shapes)} shapes; pass one shape for "
                f"each name"
            )
        check_at_least("FlatLayout", "world_size", self.world_size, 1)
        check_at_least("FlatLayout", "multiple_of", self.multiple_of, 1)
        places: dict[str, int] = {}
        for place, (name, shape) in enumerate(zip(names, shapes)):
            check_shape("FlatLayout", f"the shape of parameter {name!r}", shape)
            if name in places:
                raise ValueError(
                    f"FlatLayout: names must differ, got {name!r} twice; give a tied parameter one "
                    f"of its names"
                )
            places[name] = place
        numels = tuple(map(math.prod, shapes))
        *offsets, numel = accumulate(numels, initial=0)
        computed = {
            "names": names,
            "shapes": shapes,
            "numels": numels,
            "offsets": tuple(offsets),
            "numel": numel,
        }
        computed |= {
            "partition": Partition(numel, self.world_size, self.multiple_of),
            "_places": places,
        }
        for attribute, value in computed.items():
            object.__setattr__(self, attribute, value)

    def __contains__(self, name: object) -> bool:
        """Whether the layout has a parameter `name`."""
        return name in self._places

    def bounds(self, name: str) -> tuple[int, int]:
        """Where parameter `name` starts and stops in the buffer.

        >>> FlatLayout(("w", "b"), ((2, 3), (3,)), world_size=2).bounds("b")
        (6, 9)
        """
        place = self._place(name)
        return self.offsets[place], self.offsets[place] + self.numels[place]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of parameter `name`."""
        return self.shapes[self._place(name)]

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """The fragments in the shard of `rank`, in order; empty ones are left out.

        >>> FlatLayout(("w", "b"), ((2, 3), (3,)), world_size=2).fragments(1)
        (Fragment(name='w', start=5, stop=6, offset=0), Fragment(name='b', start=0, stop=3, offset=1))
        """
        return tuple(self.within(*self.partition.bounds(rank)))

    def within(self, start: int, stop: int) -> Iterator[Fragment]:
        """The fragments in elements [start, stop) of the buffer, in order; their
        offsets count from `start`.

        >>> list(FlatLayout(("w", "b"), ((2, 3), (3,)), world_size=2).within(4, 7))
        [Fragment(name='w', start=4, stop=6, offset=0), Fragment(name='b', start=0, stop=1, offset=2)]
        """
        # If several parameters start at one offset, only the last one can have elements; the search
        # finds that one.
        for place in range(max(bisect_right(self.offsets, start) - 1, 0), len(self.names)):
            offset, numel = self.offsets[place], self.numels[place]
            if offset >= stop:
                return
            first, last = max(start - offset, 0), min(stop - offset, numel)
            if first < last:
                yield Fragment(self.names[place], first, last, offset + first - start)

    def num_within(self, start: int, stop: int) -> int:
        """The number of parameters, with empty ones, that `within` visits; it yields at
        most that many fragments.

        >>> FlatLayout(("w", "b"), ((2, 3), (3,)), world_size=2).num_within(0, 6)
        1
        """
        return bisect_left(self.offsets, stop) - max(bisect_right(self.offsets, start) - 1, 0)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise unless `shapes` has exactly the parameters of this layout, in any
        order, each with its shape.

        >>> FlatLayout(("h.3.w",), ((4, 8),), world_size=2).check(
        ...     {"h.3.w": (4, 4)}
        ... )  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        ...
        ValueError: FlatLayout: parameter 'h.3.w' has shape (4, 4) but the layout was built for (4, 8);
            rebuild the layout after changing the model
        """
        fix = "rebuild the layout after changing the model"
        for name, built_for in zip(self.names, self.shapes):
            if name not in shapes:
                raise ValueError(
                    f"FlatLayout: parameter {name!r} of shape {built_for} is missing; pass it, or "
                    f"{fix}"
                )
            if tuple(shapes[name]) != built_for:
                raise ValueError(
                    f"FlatLayout: parameter {name!r} has shape {tuple(shapes[name])} "
                    f"but the layout was built for {built_for}; {fix}"
                )
        for name in shapes:
            if name not in self._places:
                raise ValueError(
                    f"FlatLayout: parameter {name!r} is not in the layout; leave it out, or {fix}"
                )

    def _place(self, name: str) -> int:
        if name not in self._places:
            known = ", ".join(map(repr, self.names[:8])) + (", ..." if len(self.names) > 8 else "")
            raise ValueError(
                f"FlatLayout: unknown parameter {name!r}; the layout holds {known or 'none'}"
            )
        return self._places[name]
