"""`CurriculumSampler`: which samples are in which batch, as a pure function of (seed,
number of the batch).

1. The difficulty of every metric is a function of the batch's number. A *level* is a
  run of batches with equal difficulties.
2. A sample is admitted at a level if every metric admits it.
3. A level walks through permutations of its admitted samples, one for each epoch, which
   are functions of (seed, level, epoch). So each admitted sample is taken equally
   often, newly admitted ones as often as others.

The indices are those of the whole batch of all ranks, the same on all of them: a rank
takes its part, and nothing is sent. A job resumes at any batch, on any number of ranks.
Source: DeepSpeed's `DeepSpeedDataSampler`, whose draws follow a generator instead,
which a resumed run begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fzero.data.metrics import Integers, Metric
from fzero.data.permutations import permuted
from fzero.data.schedules import Discrete, Root, Schedule

__all__ = ["Admission", "CurriculumSampler"]


@dataclass(frozen=True)
class Admission:
    """One metric of a curriculum, and its difficulty as a function of the step, counted
    from 1.

    Attributes:
        metric: None admits all samples; the difficulty is then for the batch's own
            transform.
        by: whether a difficulty is a value of the metric, or a share of the samples.
        most: the difficulty that is all samples, for shares.
    """

    schedule: Schedule
    metric: Metric | None = None
    by: Literal["value", "percentile"] = "value"
    most: int = 100

    def num_admitted(self, difficulty: int) -> int | None:
        """The number of samples, the first ones in the metric's order; None is all of
        the dataset.
        """
        if self.metric is None:
            return None
        if self.by == "value":
            return self.metric.up_to(difficulty)
        return self.metric.percentile(difficulty, of=self.most)


@dataclass(frozen=True)
class CurriculumSampler:
    """Indices of batches.

    Args:
        num_samples: the number of samples of the dataset.
        admissions: the metrics by name; without any every sample is admitted.
        seed: the seed of the permutations.

    >>> metric = Metric.of([1, 2, 3, 4])
    >>> sampler = CurriculumSampler(4, {"length": Admission(lambda g: 2 if g < 3 else 4, metric)})
    >>> sorted(sampler(0, size=2).tolist()), sorted(sampler(2, size=4).tolist())
    ([0, 1], [0, 1, 2, 3])
    """

    num_samples: int
    admissions: Mapping[str, Admission] = field(default_factory=dict)
    seed: int = 1234
    _levels: dict[int, tuple[int, Callable[[NDArray[np.int64]], Integers], int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The level of the last batch, so that it is computed once: its first batch → (last
    batch known, samples, their number).
    """

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(
                "CurriculumSampler: the dataset must have samples, and is empty; pass another"
            )
        for name, admission in self.admissions.items():
            if admission.metric is not None and admission.metric.num_samples != self.num_samples:
                raise ValueError(
                    f"CurriculumSampler: metric {name!r} must be of the dataset's "
                    f"{self.num_samples} samples, got one of {admission.metric.num_samples}; "
                    f"analyze the dataset anew"
                )

    def difficulties(self, batch: int) -> dict[str, int]:
        """The difficulty of each metric in a batch, which is counted from 0:
        DeepSpeed's curriculum step is one more.
        """
        return {name: admission.schedule(batch + 1) for name, admission in self.admissions.items()}

    def __call__(self, batch: int, *, size: int) -> NDArray[np.int64]:
        """The samples of a batch of all ranks (size,), int64.

        Raises:
            ValueError: no sample is admitted, or a number is out of range.
        """
        if batch < 0 or size < 1:
            raise ValueError(
                f"CurriculumSampler: batch must be at least 0 and size at least 1, got {batch} and "
                f"{size}; count from 0"
            )
        start, samples, num = self._level(batch)
        places = np.arange(size, dtype=np.int64) + (batch - start) * size
        found = np.empty(size, np.int64)
        for epoch in range(int(places[0]) // num, int(places[-1]) // num + 1):
            inside = places // num == epoch
            found[inside] = samples(permuted(places[inside] % num, num, self.seed, start, epoch))
        return found

    def _level(self, batch: int) -> tuple[int, Callable[[NDArray[np.int64]], Integers], int]:
        """The first batch of a batch's level, the function from places to its admitted
        samples, and their number.
        """
        for start, (stop, samples, num) in self._levels.items():
            if start <= batch <= stop + 1 and self.difficulties(batch) == self.difficulties(start):
                self._levels[start] = max(stop, batch), samples, num
                return start, samples, num
        start = self._start(batch)
        samples, num = self._admitted(self.difficulties(batch))
        self._levels.clear()
        self._levels[start] = batch, samples, num
        return start, samples, num

    def _start(self, batch: int) -> int:
        """The first batch of the level."""
        now = self.difficulties(batch)
        if all(_never_falls(admission.schedule) for admission in self.admissions.values()):
            low, high = 0, batch
            while low < high:
                middle = (low + high) // 2
                low, high = (
                    (low, middle) if self.difficulties(middle) == now else (middle + 1, high)
                )
            return low
        while batch > 0 and self.difficulties(batch - 1) == now:
            batch -= 1
        return batch

    def _admitted(
        self, difficulties: Mapping[str, int]
    ) -> tuple[Callable[[NDArray[np.int64]], Integers], int]:
        """The function from places in 0 … num−1 to admitted samples, and num."""
        counts = {
            name: self.admissions[name].num_admitted(now) for name, now in difficulties.items()
        }
        cut = {name: num for name, num in counts.items() if num is not None}
        orders = {
            name: metric.order
            for name in cut
            if (metric := self.admissions[name].metric) is not None
        }
        if not cut:
            return lambda places: places, self.num_samples
        if len(cut) == 1:
            ((name, num),) = cut.items()
            order = orders[name]
        else:
            (smallest, *others) = sorted(cut, key=cut.__getitem__)
            common = np.sort(orders[smallest][: cut[smallest]])
            for name in others:
                common = np.intersect1d(common, orders[name][: cut[name]], assume_unique=True)
            order, num = common, len(common)
        if not num:
            shown = ", ".join(f"{name} {now}" for name, now in difficulties.items())
            raise ValueError(
                f"CurriculumSampler: a difficulty must admit samples, and none is admitted by "
                f"{shown}; raise min_difficulty"
            )
        return lambda places: order[places], num


def _never_falls(schedule: Schedule) -> bool:
    return isinstance(schedule, Root) or (
        isinstance(schedule, Discrete) and list(schedule.levels) == sorted(schedule.levels)
    )
