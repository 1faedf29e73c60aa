"""For which uses is a unit gathered once, and when is it gathered again?

Only integers: positions in a step's graph, units, and their elements.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class LiveRange(NamedTuple):
    """A unit is gathered for the uses from `first` to `last`, positions in the trunk."""

    unit: int
    first: int
    last: int


def plan_live_ranges(
    uses: Sequence[tuple[int, Sequence[int]]], numels: Sequence[int], *, max_live: int, max_reuse_distance: int
) -> list[LiveRange]:
    """How often each unit is gathered, and for which uses.

    A unit is kept until its next use if that is near enough. Where more would be alive than allowed, the unit whose
    next use is furthest away goes.

    Args:
        uses: positions in ascending order, each with the units that are used there.
        numels: the elements of each unit.
        max_live: the most gathered elements alive, besides what one position uses at once.
        max_reuse_distance: the most elements of other units that are entered between two uses of one stay; a unit
            that is entered twice counts twice.

    Returns:
        The stays by their first use.

    >>> there_and_back = [(i, (unit,)) for i, unit in enumerate([0, 1, 2, 2, 1, 0])]
    >>> stays = plan_live_ranges(there_and_back, [4, 4, 4], max_live=100, max_reuse_distance=0)
    >>> [(stay.unit, stay.first, stay.last) for stay in stays]
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
    stays: list[LiveRange] = []
    open_stays: dict[int, tuple[int, int]] = {}  # unit → first position, index of its last access so far
    furthest: list[tuple[int, int, int]] = []  # (-next access, unit, access), of which some are outdated
    live = 0

    def close(unit: int) -> None:
        nonlocal live
        first, access = open_stays.pop(unit)
        stays.append(LiveRange(unit, first, accesses[access][0]))
        live -= numels[unit]

    index = 0
    for position, units in uses:
        here = list(enumerate(units, index))
        index += len(units)
        for access, unit in here:
            if unit not in open_stays:
                live += numels[unit]
            open_stays[unit] = (open_stays.get(unit, (position, 0))[0], access)
        while live > max_live and furthest:  # which has nothing that is used here, but for outdated entries
            _, unit, access = heapq.heappop(furthest)
            if open_stays.get(unit, (0, -1))[1] == access:
                close(unit)
        for access, unit in here:
            after = following[access]
            if after is None or entered_at[after - 1] - entered_at[access] > max_reuse_distance:
                close(unit)
            else:
                heapq.heappush(furthest, (-after, unit, access))
    return sorted(stays, key=lambda stay: (stay.first, stay.unit))


def _next_uses(accesses: Sequence[tuple[int, int]]) -> list[int | None]:
    """For each access, the index of the next one of the same unit."""
    following: list[int | None] = [None] * len(accesses)
    seen: dict[int, int] = {}
    for index in reversed(range(len(accesses))):
        following[index] = seen.get(accesses[index][1])
        seen[accesses[index][1]] = index
    return following
