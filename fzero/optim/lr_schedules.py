"""Learning-rate schedules, as pure functions of the number of updates so far.

A `Schedule` takes the number n of updates before this one, and returns the value for
this one. So the learning rate is a function of the state: a skipped step does not
advance it, and a saved state continues it.

The named schedules give the values of DeepSpeed. DeepSpeed steps a schedule *after*
each update. So an update with n updates before it uses DeepSpeed's iteration n-1. The
first update has no such iteration, but a value of its own.

>>> rate = warmup_lr(max_lr=1.0, warmup_num_steps=4)
>>> [round(rate(n), 5) for n in range(5)]
[0.0, 0.0, 0.5, 0.79248, 1.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

Schedule = Callable[[int], float]
"""Returns the value for the update after n others."""

WarmupType = Literal["log", "linear"]


def _after(first: float, formula: Schedule) -> Schedule:
    """`first` for update 0; then the formula, which gets DeepSpeed's iterations i = 0,
    1, …
    """
    return lambda n: formula(n - 1) if n else first


def constant(value: float) -> Schedule:
    """The same value for all updates."""
    return lambda n: value


def _warmup(num_steps: int, kind: WarmupType) -> Schedule:
    """From 0 to 1 in `num_steps` iterations, then 1."""
    num_steps = max(2, num_steps)

    def ratio(i: int) -> float:
        if i >= num_steps:
            return 1.0
        return math.log(i + 1) / math.log(num_steps) if kind == "log" else i / num_steps

    return ratio


def warmup_lr(
    max_lr: float,
    *,
    min_lr: float = 0.0,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> Schedule:
    """DeepSpeed's `WarmupLR`: from `min_lr` to `max_lr`, then constant."""
    warmup = _warmup(warmup_num_steps, warmup_type)
    return _after(min_lr, lambda i: min_lr + (max_lr - min_lr) * warmup(i))


def warmup_decay_lr(
    max_lr: float,
    *,
    total_num_steps: int,
    min_lr: float = 0.0,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> Schedule:
    """DeepSpeed's `WarmupDecayLR`: the warm-up of `warmup_lr`, then linear decay to
    `min_lr` at `total_num_steps`.
    """
    warmup_num_steps = max(2, warmup_num_steps)
    warmup = _warmup(warmup_num_steps, warmup_type)

    def rate(i: int) -> float:
        left = (total_num_steps - i) / max(1, total_num_steps - warmup_num_steps)
        return min_lr + (max_lr - min_lr) * (warmup(i) if i < warmup_num_steps else max(0.0, left))

    return _after(min_lr, rate)


def warmup_cosine_lr(
    lr: float,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 1e-4,
    warmup_type: WarmupType = "log",
) -> Schedule:
    """DeepSpeed's `WarmupCosineLR`: `lr` times a ratio that warms up, then falls to
    `cos_min_ratio` along half a cosine.
    """
    warmup_num_steps = max(2, warmup_num_steps)
    warmup = _warmup(warmup_num_steps, warmup_type)

    def rate(i: int) -> float:
        if i < warmup_num_steps:
            return lr * (warmup_min_ratio + (1 - warmup_min_ratio) * warmup(i))
        done = min(1.0, (i - warmup_num_steps + 1) / max(1, total_num_steps - warmup_num_steps))
        return lr * (cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)

    return _after(0.0, rate)


def lr_range_test(
    min_lr: float = 1e-3, *, step_size: int = 2000, step_rate: float = 1.0, staircase: bool = False
) -> Schedule:
    """DeepSpeed's `LRRangeTest` (arXiv:1803.09820): grows without limit, to find the
    largest rate that trains.
    """

    def rate(i: int) -> float:
        intervals = (i + 1) / step_size
        return min_lr * (1 + step_rate * (math.floor(intervals) if staircase else intervals))

    return _after(min_lr, rate)


def one_cycle(
    low: float,
    high: float,
    *,
    first_step_size: int = 2000,
    second_step_size: int | None = None,
    first_stair_count: int = 0,
    second_stair_count: int | None = None,
    decay_step_size: int = 0,
    decay_rate: float = 0.0,
    inverse: bool = False,
) -> Schedule:
    """DeepSpeed's `OneCycle` (arXiv:1708.07120): from `low` to `high` and back, then
    decay.

    Args:
        low, high: the ends of the cycle.
        first_step_size, second_step_size: iterations up and down; None means as many
            down as up.
        first_stair_count, second_stair_count: stairs up and down, 0 is a slope; None
            means as many down as up.
        decay_step_size: iterations per interval of the decay; 0 does not decay.
        decay_rate: the rate is divided by, and a momentum multiplied by,
            `1 + decay_rate · intervals`.
        inverse: True for a momentum, which goes from `high` to `low` and back (and is
            `low` in the first update).
    """
    num_down = first_step_size if second_step_size is None else second_step_size
    down_stairs = first_stair_count if second_stair_count is None else second_stair_count
    total = first_step_size + num_down

    def height(i: int) -> float:
        """0 at the ends of the cycle, 1 at its top."""
        done = (i + 1) % total
        up = done <= first_step_size
        part, length = (done, first_step_size) if up else (total - done, num_down)
        stairs = first_stair_count if up else down_stairs
        return math.floor(part * stairs / length) / stairs if stairs else part / length

    def value(i: int) -> float:
        if i < total:
            return high - (high - low) * height(i) if inverse else low + (high - low) * height(i)
        decay = 1 + (decay_rate * (i - total + 1) / decay_step_size if decay_step_size else 0.0)
        return high * decay if inverse else low / decay

    return _after(low, value)


def torch_classes() -> dict[str, type[LRScheduler]]:
    """The classes of `torch.optim.lr_scheduler` that are functions of the step, by
    name.
    """
    return {
        name: member
        for name, member in vars(torch.optim.lr_scheduler).items()
        if isinstance(member, type) and issubclass(member, LRScheduler) and name[0].isupper()
        # the base class, and one that depends on a metric
        if name not in ("LRScheduler", "ReduceLROnPlateau")
    }


def torch_schedule(name: str, lr: float, **params: Any) -> Schedule:
    """The class `torch.optim.lr_scheduler.<name>`, stepped once after every update.

    Each rate is computed once, in order, and cached.

    Raises:
        ValueError: `torch_classes` has no such class, or it does not accept these
            parameters.

    >>> halving = torch_schedule("StepLR", 1.0, step_size=2, gamma=0.5)
    >>> [halving(n) for n in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    if name not in torch_classes():
        raise ValueError(
            f"torch_schedule: must be one of {', '.join(torch_classes())}, got {name!r}; choose one"
        )
    optimizer = torch.optim.SGD([torch.zeros(())], lr=lr, momentum=0.5)
    try:
        scheduler = torch_classes()[name](optimizer, **params)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{name} does not take {params}: {error}; change the parameters") from None
    rates = [float(optimizer.param_groups[0]["lr"])]

    def schedule(n: int) -> float:
        while len(rates) <= n:
            optimizer.step()
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates[n]

    return schedule
