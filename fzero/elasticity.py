"""Which global batch can be trained on many numbers of ranks? The arithmetic of DeepSpeed's `elasticity` block, version 0.1.

A job that loses hosts keeps its global batch: the micro-batch and the number of micro-steps adapt. So the batch is chosen to
be divided in as many ways as possible:

1. Bases: each micro-batch size, and their least common multiple.
2. Each base, times the largest *highly composite number* (with more divisors than any smaller one) that keeps it within
   the cap, is a candidate.
3. The candidate that the most numbers of ranks divide is taken; of equals the larger one, or the smaller one if so wished.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count


def highly_composite_numbers() -> Iterator[int]:
    """Numbers with more divisors than any smaller one.

    >>> from itertools import islice
    >>> [*islice(highly_composite_numbers(), 12)]
    [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240]
    """
    most = 0
    for number in count(1):
        num_divisors = sum(2 - (low * low == number) for low in range(1, math.isqrt(number) + 1) if number % low == 0)
        if num_divisors > most:
            most = num_divisors
            yield number


@dataclass(frozen=True, slots=True)
class ElasticBatch:
    """A global batch, and the numbers of ranks that can train it.

    >>> elastic_batch([2, 4, 6], most=100, min_ranks=1, max_ranks=8)
    ElasticBatch(batch_size=96, micro_batches=(2, 4, 6), world_sizes=(1, 2, 3, 4, 6, 8))
    >>> elastic_batch([2, 4, 6], most=100, min_ranks=1, max_ranks=8).steps_on(4)
    (6, 4)
    """

    batch_size: int
    micro_batches: tuple[int, ...]
    world_sizes: tuple[int, ...]

    def steps_on(self, world_size: int) -> tuple[int, int]:
        """The largest micro-batch that fits so many ranks, and the number of micro-steps.

        Raises:
            ValueError: `world_size` is not one of `world_sizes`.
        """
        if world_size not in self.world_sizes:
            raise ValueError(
                f"elasticity: a batch of {self.batch_size} cannot be trained on {world_size} ranks with micro-batches of "
                f"{[*self.micro_batches]}; take one of {[*self.world_sizes]} ranks"
            )
        micro_batch = max(size for size in self.micro_batches if self.batch_size % (size * world_size) == 0)
        return micro_batch, self.batch_size // (micro_batch * world_size)


def elastic_batch(
    micro_batches: Sequence[int],
    *,
    most: int,
    min_ranks: int = 1,
    max_ranks: int = 10_000,
    prefer_larger: bool = True,
) -> ElasticBatch:
    """The batch of at most `most` samples that the most numbers of ranks can train.

    Args:
        micro_batches: sizes that a rank has memory for.
        most: the cap, `max_train_batch_size`.
        min_ranks: fewer are not counted.
        max_ranks: more are not counted.
        prefer_larger: which batch is taken of those with as many numbers of ranks.

    Raises:
        ValueError: no batch fits, or a number is not positive.
    """
    sizes = tuple(sorted({*micro_batches}))
    if not sizes or sizes[0] < 1:
        raise ValueError(
            f"elasticity.micro_batch_sizes: must be positive numbers, at least one, got {[*micro_batches]}"
        )
    if sizes[-1] > most:
        raise ValueError(
            f"elasticity.max_train_batch_size: must be at least the largest micro-batch size, {sizes[-1]}, got {most}"
        )
    if not 1 <= min_ranks <= max_ranks:
        raise ValueError(f"elasticity.min_gpus, max_gpus: must be 1 <= min <= max, got {min_ranks} and {max_ranks}")
    candidates = [
        ElasticBatch(batch, sizes, valid_world_sizes(batch, sizes, min_ranks, max_ranks))
        for batch in sorted({_scaled(base, most) for base in (*sizes, math.lcm(*sizes)) if base <= most})
    ]
    best = max(candidates, key=lambda one: (len(one.world_sizes), one.batch_size if prefer_larger else -one.batch_size))
    if not best.world_sizes:
        raise ValueError(
            f"elasticity: no batch of at most {most} samples can be trained on {min_ranks} to {max_ranks} ranks with "
            f"micro-batches of {[*sizes]}; raise max_train_batch_size or lower min_gpus"
        )
    return best


def valid_world_sizes(batch_size: int, micro_batches: Sequence[int], min_ranks: int, max_ranks: int) -> tuple[int, ...]:
    """All numbers of ranks that divide the batch into whole micro-batches of one of the sizes.

    >>> valid_world_sizes(12, [4, 6], 1, 10)
    (1, 2, 3)
    """
    found = {
        divisor
        for size in micro_batches
        if batch_size % size == 0
        for low in range(1, math.isqrt(batch_size // size) + 1)
        if batch_size // size % low == 0
        for divisor in (low, batch_size // size // low)
    }
    return tuple(sorted(number for number in found if min_ranks <= number <= max_ranks))


def _scaled(base: int, most: int) -> int:
    """`base` times the largest highly composite number that keeps it within `most`."""
    factor = 1
    for number in highly_composite_numbers():
        if base * number > most:
            return base * factor
        factor = number
    raise AssertionError("there is no end of highly composite numbers")
