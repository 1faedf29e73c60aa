"""`plan_live_ranges`: the uses over which a unit is kept gathered, and the uses before
which it is gathered again.

The inputs are integers: positions in a step's graph, units, and their elements.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class LiveRange(NamedTuple):
    """A unit is kept gathered from its use at `first` to its use at `last`, positions
    in the trunk.
    """

    unit: int
    first: int
    last: int


def plan_live_ranges(
    uses: Sequence[tuple[int, Sequence[int]]],
    numels: Sequence[int],
    *,
    max_live: int,
    max_reuse_distance: int,
) -> list[LiveRange]:
    """The live ranges of all units.

    A unit is kept until its next use if that is within `max_reuse_distance`. When more
    than `max_live` would be alive, the unit whose next use is furthest away is
    released.

    Args:
        uses: positions in ascending order, each with the units that are used there.
        numels: the elements of each unit.
        max_live: the most gathered elements alive; the units of one position may exceed
            it.
        max_reuse_distance: the most elements of other units that are entered between
            two uses in one live range; a unit that is entered twice counts twice.

    Returns:
        The live ranges by their first use.

    >>> there_and_back = [(i, (unit,)) for i, unit in enumerate([0, 1, 2, 2, 1, 0])]
    >>> ranges = plan_live_ranges(there_and_back, [4, 4, 4], max_live=100, max_reuse_distance=0)
    >>> [tuple(live_range) for live_range in ranges]
    [(0, 0, 0), (1, 1, 1), (2, 2, 3), (1, 4, 4), (0, 5, 5)]
    >>> len(plan_live_ranges(there_and_back, [4, 4, 4], max_live=100, max_reuse_distance=100))
    3
    """
    accesses = [(position, unit) for position, units in uses for unit in units]
    following = _next_uses(accesses)
    entered = 0  # elements of all units entered so far
    entered_at: list[int] = []
    for index, (_, unit) in enumerate(accesses):
        if index == 0 or accesses[index - 1][1] != unit:
            entered += numels[unit]
        entered_at.append(entered)
    ranges: list[LiveRange] = []
    # unit → first position, index of its last access so far
    open_ranges: dict[int, tuple[int, int]] = {}
    # (-next access, unit, access); some entries are outdated
    furthest: list[tuple[int, int, int]] = []
    live = 0

    def close(unit: int) -> None:
        nonlocal live
        first, access = open_ranges.pop(unit)
        ranges.append(LiveRange(unit, first, accesses[access][0]))
        live -= numels[unit]

    index = 0
    for position, units in uses:
        here = list(enumerate(units, index))
        index += len(units)
        for access, unit in here:
            if unit not in open_ranges:
                live += numels[unit]
            open_ranges[unit] = (open_ranges.get(unit, (position, 0))[0], access)
        while live > max_live and furthest:  # only outdated entries are of units used here
            _, unit, access = heapq.heappop(furthest)
            if open_ranges.get(unit, (0, -1))[1] == access:
                close(unit)
        for access, unit in here:
            after = following[access]
            if after is None or entered_at[after - 1] - entered_at[access] > max_reuse_distance:
                close(unit)
            else:
                heapq.heappush(furthest, (-after, unit, access))
    return sorted(ranges, key=lambda live_range: (live_range.first, live_range.unit))


def _next_uses(accesses: Sequence[tuple[int, int]]) -> list[int | None]:
    """For each access, the index of the next one of the same unit."""
    following: list[int | None] = [None] * len(accesses)
    seen: dict[int, int] = {}
    for index in reversed(range(len(accesses))):
        following[index] = seen.get(accesses[index][1])
        seen[accesses[index][1]] = index
    return following
