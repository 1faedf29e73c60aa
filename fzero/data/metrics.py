"""`Metric`: the samples of a dataset in ascending order of a number, and how many of
them a difficulty admits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Metric"]

Integers = NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric of N samples. The arrays may be memory maps: a sampler reads the
    elements that it needs.

    Attributes:
        order: the samples in ascending order of their values, equal values in the order
            of samples (N).
        values: the distinct values, ascending (V); empty if only percentiles are asked
            for.
        stops: the number of samples up to each value (V).

    >>> metric = Metric.of([5, 3, 5, 9])
    >>> metric.order.tolist(), metric.values.tolist(), metric.stops.tolist()
    ([1, 0, 2, 3], [3, 5, 9], [1, 3, 4])
    >>> [metric.up_to(value) for value in (2, 3, 4, 5, 9)]
    [0, 1, 1, 3, 4]
    >>> [metric.percentile(share, of=2) for share in (0, 1, 2)]
    [0, 2, 4]
    """

    order: Integers
    values: Integers
    stops: Integers

    @classmethod
    def of(cls, values: object) -> Metric:
        """The metric of samples with these values, in the order of samples (N)."""
        of_samples = np.asarray(values).reshape(-1)
        distinct, counts = np.unique(of_samples, return_counts=True)
        return cls(np.argsort(of_samples, kind="stable"), distinct, np.cumsum(counts))

    @property
    def num_samples(self) -> int:
        return len(self.order)

    def up_to(self, value: float) -> int:
        """The number of samples whose value is at most `value`."""
        index = int(np.searchsorted(self.values, value, side="right"))
        return int(self.stops[index - 1]) if index else 0

    def percentile(self, share: int, *, of: int) -> int:
        """The number of samples in `share` of `of` equal parts, ⌊N / of⌋ · share; all
        of them where `share` is `of`.
        """
        return self.num_samples if share >= of else max(0, self.num_samples // of * share)

    def of_each_sample(self) -> Integers:
        """The value of every sample, in the order of samples (N)."""
        found = np.empty(self.num_samples, self.values.dtype)
        found[self.order] = np.repeat(self.values, np.diff(self.stops, prepend=0))
        return found
