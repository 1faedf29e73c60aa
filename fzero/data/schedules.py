"""Difficulty schedules: functions of a step's number, without state (Li et al. 2022,
arXiv:2212.03597; DeepSpeed's four kinds).

A schedule that is called with g gives the difficulty of step g. Which g belongs to an
update differs by technique: with n updates so far a curriculum asks for g = n + 1,
random layer-token dropping for g = n. The float64 operations are DeepSpeed's, in its
order, because another order moves a border by a step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Schedule = Callable[[int], int]
"""From the number of a step to its difficulty; one of the schedules below, or a
function of your own.
"""


@dataclass(frozen=True, slots=True)
class Root:
    """From `minimum` to `maximum` within `steps` steps, as a root of the step's number;
    see `fixed_root`.
    """

    minimum: int
    maximum: int
    steps: int
    multiple: int
    degree: float = 1

    def __post_init__(self) -> None:
        for name in ("steps", "multiple"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"schedule: {name} must be at least 1, got {getattr(self, name)}; pass a "
                    f"positive number"
                )
        if self.minimum > self.maximum:
            raise ValueError(
                f"schedule: minimum must not be above maximum, got {self.minimum} and "
                f"{self.maximum}; swap them"
            )
        if self.degree <= 0:
            raise ValueError(
                f"schedule: degree must be above 0, got {self.degree}; 1 is linear, 2 a square root"
            )

    def __call__(self, g: int) -> int:
        value: int = math.floor(
            (float(g) / self.steps) ** (1.0 / self.degree) * (self.maximum - self.minimum)
            + self.minimum
        )
        return min(value - value % self.multiple, self.maximum)

    def values(self, start: int = 1) -> list[int]:
        """The distinct values from step `start` on, ascending."""
        found, g = [self(start)], start
        while found[-1] < self.maximum and self.minimum < self.maximum:
            g = first_step(self, found[-1] + 1, g)
            found.append(self(g))
        return found


@dataclass(frozen=True, slots=True)
class Discrete:
    """A list of values, each until its last step; see `fixed_discrete`."""

    levels: tuple[int, ...]
    last_steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.last_steps or len(self.levels) != len(self.last_steps) + 1:
            raise ValueError(
                f"schedule: there must be one value more than last steps, got {len(self.levels)} "
                f"values and {len(self.last_steps)} steps; the last value has no end"
            )
        if list(self.last_steps) != sorted(self.last_steps):
            raise ValueError(
                f"schedule: last steps must ascend, got {list(self.last_steps)}; sort them"
            )

    def __call__(self, g: int) -> int:
        return self.levels[bisect_left(self.last_steps, g)]

    def values(self, start: int = 1) -> list[int]:
        """The distinct values from step `start` on, in order of their first use."""
        return list(
            dict.fromkeys(
                self(g) for g in (start, *(last + 1 for last in self.last_steps if last >= start))
            )
        )


def fixed_root(minimum: int, maximum: int, *, steps: int, multiple: int, degree: float) -> Root:
    """A schedule that rises as a root of the step's number.

    d(g) = ⌊(g / steps)^(1 / degree) · (maximum − minimum) + minimum⌋, rounded down to a
    multiple, at most `maximum`.

    A `minimum` that is no multiple is rounded down, too. A `maximum` that is no
    multiple is reached when the unrounded value passes the next multiple.

    Args:
        steps: DeepSpeed's `total_curriculum_step`.
        multiple: DeepSpeed's `difficulty_step`.
        degree: DeepSpeed's `root_degree`.

    >>> schedule = fixed_root(8, 64, steps=100, multiple=8, degree=2)
    >>> [schedule(g) for g in (1, 5, 10, 25, 50, 80, 99, 100)]
    [8, 16, 24, 32, 40, 56, 56, 64]
    """
    return Root(minimum, maximum, steps, multiple, degree)


def fixed_linear(minimum: int, maximum: int, *, steps: int, multiple: int) -> Root:
    """A schedule that rises linearly: `fixed_root` of degree 1.

    >>> schedule = fixed_linear(8, 64, steps=10, multiple=8)
    >>> [schedule(g) for g in range(1, 12)]
    [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64]
    """
    return Root(minimum, maximum, steps, multiple)


def fixed_discrete(values: Sequence[int], last_steps: Sequence[int]) -> Discrete:
    """A schedule of listed values: the first i with g ≤ `last_steps[i]` gives
    `values[i]`, a later g the last value.

    >>> schedule = fixed_discrete([8, 16, 64], [3, 10])
    >>> [schedule(g) for g in (1, 3, 4, 10, 11)]
    [8, 8, 16, 16, 64]
    """
    return Discrete(tuple(values), tuple(last_steps))


def first_step(schedule: Schedule, value: int, after: int = 0) -> int:
    """The first g ≥ `after` with a difficulty of at least `value`, of a schedule that
    never falls and reaches `value`.

    >>> first_step(fixed_linear(8, 64, steps=10, multiple=8), 24)
    3
    """
    stop = max(after, 1)
    while schedule(stop) < value:
        stop *= 2
    start = after
    while start < stop:
        middle = (start + stop) // 2
        start, stop = (start, middle) if schedule(middle) >= value else (middle + 1, stop)
    return stop


def fewer_values(schedule: Root, most: int, start: int) -> Root:
    """The schedule with a larger multiple, by powers of two, that has at most `most`
    values; `minimum` becomes a multiple, too.

    >>> schedule = fixed_linear(128, 1024, steps=400, multiple=8)
    >>> len(schedule.values(0)), fewer_values(schedule, 8, 0).multiple
    (113, 128)
    """
    found = schedule
    while len(found.values(start)) > most:
        multiple = 2 * found.multiple
        minimum = min(-(-schedule.minimum // multiple) * multiple, schedule.maximum)
        found = replace(found, minimum=minimum, multiple=multiple)
    return found
