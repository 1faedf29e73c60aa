"""The global batch that can be trained on many numbers of ranks: the arithmetic of
DeepSpeed's `elasticity` block.

A job that loses hosts keeps its global batch: the micro-batch and the number of
micro-steps adapt. So the batch is chosen to have as many divisors as possible:

1. Bases: each micro-batch size, and their least common multiple.
2. Each base, times the largest *highly composite number* (with more divisors than any
   smaller one) that keeps it within the cap, is a candidate.
3. The candidate that the most numbers of ranks divide is taken; among equals the larger
  one, or the smaller one on request.

That is version 0.1. Version 0.2 counts nodes instead of ranks. Where the present number
of ranks is none of those that can train the batch, it takes a batch for this number
alone. With model parallelism, a node has as many data-parallel ranks as it has groups
of `model_parallel_size` GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile


def highly_composite_numbers() -> Iterator[int]:
    """Numbers with more divisors than any smaller one.

    >>> from itertools import islice
    >>> [*islice(highly_composite_numbers(), 12)]
    [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240]
    """
    most = 0
    for number in count(1):
        if (num_divisors := len(_divisors(number))) > most:
            most = num_divisors
            yield number


def _divisors(number: int) -> set[int]:
    lows = [low for low in range(1, math.isqrt(number) + 1) if number % low == 0]
    return {*lows, *(number // low for low in lows)}


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
        """The largest micro-batch that fits `world_size` ranks, and the number of
        micro-steps.

        Raises:
            ValueError: `world_size` is not one of `world_sizes`.
        """
        if world_size not in self.world_sizes:
            raise ValueError(
                f"elasticity: a batch of {self.batch_size} cannot be trained on {world_size} ranks "
                f"with micro-batches of {[*self.micro_batches]}; take one of {[*self.world_sizes]} "
                f"ranks"
            )
        micro_batch = max(
            size for size in self.micro_batches if self.batch_size % (size * world_size) == 0
        )
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
        micro_batches: sizes that a rank has memory for, in samples.
        most: the cap, `max_train_batch_size`.
        min_ranks: smaller numbers of ranks are not counted.
        max_ranks: larger numbers of ranks are not counted.
        prefer_larger: among batches that equally many numbers of ranks can train, true
            chooses the largest, false the smallest.

    Raises:
        ValueError: no batch fits, or a number is not positive.
    """
    best = _best(micro_batches, most, min_ranks, max_ranks, prefer_larger=prefer_larger)
    if not best.world_sizes:
        raise ValueError(
            f"elasticity: no batch of at most {most} samples can be trained on {min_ranks} to "
            f"{max_ranks} ranks with micro-batches of {[*best.micro_batches]}; raise "
            f"max_train_batch_size or lower min_gpus"
        )
    return best


def _best(
    micro_batches: Sequence[int], most: int, min_ranks: int, max_ranks: int, *, prefer_larger: bool
) -> ElasticBatch:
    """The best of the candidates; its `world_sizes` are empty where no number of ranks
    can train any.
    """
    sizes = tuple(sorted({*micro_batches}))
    if not sizes or sizes[0] < 1:
        raise ValueError(
            f"elasticity.micro_batch_sizes: must be positive numbers, at least one, got "
            f"{[*micro_batches]}"
        )
    if sizes[-1] > most:
        raise ValueError(
            f"elasticity.max_train_batch_size: must be at least the largest micro-batch size, "
            f"{sizes[-1]}, got {most}"
        )
    if not 1 <= min_ranks <= max_ranks:
        raise ValueError(
            f"elasticity.min_gpus, max_gpus: must be 1 <= min <= max, got {min_ranks} and "
            f"{max_ranks}"
        )
    candidates = [
        ElasticBatch(batch, sizes, valid_world_sizes(batch, sizes, min_ranks, max_ranks))
        for batch in sorted(
            {_scaled(base, most) for base in (*sizes, math.lcm(*sizes)) if base <= most}
        )
    ]
    return max(
        candidates,
        key=lambda one: (
            len(one.world_sizes),
            one.batch_size if prefer_larger else -one.batch_size,
        ),
    )


def elastic_batch_of_nodes(
    micro_batches: Sequence[int],
    *,
    most: int,
    world_size: int,
    ranks_per_node: int = 1,
    model_parallel_size: int = 1,
    min_ranks: int = 1,
    max_ranks: int = 10_000,
    prefer_larger: bool = True,
) -> ElasticBatch:
    """The batch that the most numbers of nodes can train (version 0.2), or one for
    `world_size` ranks if they cannot train it.

    The `world_sizes` of the result count data-parallel ranks: ranks divided by
    `model_parallel_size`.

    >>> elastic_batch_of_nodes([2, 4], most=64, world_size=8, ranks_per_node=4, max_ranks=32)
    ElasticBatch(batch_size=64, micro_batches=(2, 4), world_sizes=(4, 8, 16, 32))
    >>> elastic_batch_of_nodes([2, 4], most=64, world_size=20, ranks_per_node=4, max_ranks=32)
    ElasticBatch(batch_size=40, micro_batches=(2, 4), world_sizes=(20,))
    >>> elastic_batch_of_nodes(
    ...     [2, 4], most=64, world_size=8, ranks_per_node=4, model_parallel_size=2, max_ranks=32
    ... )
    ElasticBatch(batch_size=48, micro_batches=(2, 4), world_sizes=(2, 4, 6, 8, 12))

    Args:
        world_size: the present number of ranks, those of a model-parallel group counted
            one by one.
        ranks_per_node: a job has full nodes of so many ranks.
        model_parallel_size: the ranks that hold one copy of the model together; a node
            has whole groups of them.
        micro_batches, most, min_ranks, max_ranks, prefer_larger: see `elastic_batch`.

    Raises:
        ValueError: a number is not positive; `max_ranks` is less than a node; a node or
            the job has no whole number of groups; or not even one micro-batch fits.
    """
    if ranks_per_node % model_parallel_size:
        raise ValueError(
            f"elasticity.num_gpus_per_node: must be a multiple of model_parallel_size, "
            f"{model_parallel_size}, got {ranks_per_node}; change one of them"
        )
    if max_ranks < ranks_per_node:
        raise ValueError(
            f"elasticity.max_gpus: must be at least num_gpus_per_node, {ranks_per_node}, in "
            f"version 0.2, got {max_ranks}"
        )
    fewest, largest = max(1, min_ranks // ranks_per_node), max_ranks // ranks_per_node
    groups_per_node = ranks_per_node // model_parallel_size
    node = _best(
        micro_batches, most // groups_per_node, fewest, largest, prefer_larger=prefer_larger
    )
    world_sizes = tuple(number * groups_per_node for number in node.world_sizes)
    num_groups, num_left = divmod(world_size, model_parallel_size)
    if num_groups in world_sizes:
        return ElasticBatch(node.batch_size * groups_per_node, node.micro_batches, world_sizes)
    if num_left:
        raise ValueError(
            f"elasticity.model_parallel_size: the number of ranks must be a multiple of "
            f"{model_parallel_size}, got {world_size}; take whole nodes of {ranks_per_node}"
        )
    batches = [
        most - most % (size * num_groups)
        for size in node.micro_batches
        if size * num_groups <= most
    ]
    if not batches:
        raise ValueError(
            f"elasticity.max_train_batch_size: {most} samples are less than one micro-batch of "
            f"{min(node.micro_batches)} on each of {num_groups} ranks; raise it, or take fewer "
            f"ranks"
        )
    return ElasticBatch(
        max(batches) if prefer_larger else min(batches), node.micro_batches, (num_groups,)
    )


def micro_batch_of_gpus(
    batch_size: int, micro_batches: Sequence[int], num_gpus: int, *, prefer_larger: bool = True
) -> int:
    """The micro-batch that DeepSpeed's version 0.2 returns without a `world_size`; it
    divides the batch among all GPUs.

    Beside model parallelism this is not a data-parallel rank's micro-batch: that is
    `ElasticBatch.steps_on`.

    >>> (
    ...     micro_batch_of_gpus(48, [2, 4, 6], num_gpus=4),
    ...     micro_batch_of_gpus(48, [2, 4, 6], num_gpus=4, prefer_larger=False),
    ... )
    (6, 2)

    Args:
        num_gpus: those of model-parallel groups are counted one by one.
        prefer_larger: true returns the largest that fits, false the first.

    Raises:
        ValueError: none fits.
    """
    fitting = [size for size in micro_batches if batch_size // num_gpus % size == 0]
    if not fitting:
        raise ValueError(
            f"elasticity.micro_batch_sizes: one must divide {batch_size // num_gpus} samples, a "
            f"batch of {batch_size} on {num_gpus} GPUs, got {[*micro_batches]}; pass world_size, "
            f"the number of data-parallel ranks"
        )
    return max(fitting) if prefer_larger else fitting[0]


def valid_world_sizes(
    batch_size: int, micro_batches: Sequence[int], min_ranks: int, max_ranks: int
) -> tuple[int, ...]:
    """All numbers of ranks that divide the batch into micro-batches of one of the
    sizes, without remainder.

    >>> valid_world_sizes(12, [4, 6], 1, 10)
    (1, 2, 3)
    """
    found = set[int]().union(
        *(_divisors(batch_size // size) for size in micro_batches if batch_size % size == 0)
    )
    return tuple(sorted(number for number in found if min_ranks <= number <= max_ranks))


def _scaled(base: int, most: int) -> int:
    """`base` times the largest highly composite number that keeps it within `most`."""
    return base * max(takewhile(lambda number: base * number <= most, highly_composite_numbers()))
