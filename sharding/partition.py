"""Partitions: the division of a flat buffer among ranks.

`Partition` gives every rank an equal, contiguous shard, because collectives need equal
messages. The length of a shard is the smallest multiple of `multiple_of` with which
`world_size` shards cover the buffer; the rest of the last shards is padding.
`NearEqualSplit` has no padding: the first ranks get one element more.

Shape letters: N elements, P padded = W * S, S shard, W ranks. ZeRO section 5 divides
each state this way.
"""

from dataclasses import dataclass, field

from sharding.checks import check_at_least, check_index


@dataclass(frozen=True, slots=True)
class Partition:
    """A flat buffer cut into equal contiguous shards, one per rank; padding sits at the
    end. Lengths count elements.

    Args:
        numel: N, the elements of the buffer without padding; 0 is allowed.
        world_size: W, the number of ranks among which the buffer is divided.
        multiple_of: the length of every shard is a multiple of this, for aligned
            kernels and messages.

    Raises:
        ValueError: a number is too small.

    >>> partition = Partition(numel=10, world_size=4, multiple_of=2)
    >>> partition.shard_numel, partition.padded_numel, partition.padding
    (4, 16, 6)
    >>> [partition.bounds(rank) for rank in range(4)]
    [(0, 4), (4, 8), (8, 12), (12, 16)]
    """

    numel: int
    world_size: int
    multiple_of: int = 1
    shard_numel: int = field(init=False, repr=False, compare=False)
    """S, the elements of one shard, padding included."""
    padded_numel: int = field(init=False, repr=False, compare=False)
    """P = W * S, the elements of all shards together."""

    def __post_init__(self) -> None:
        check_at_least("Partition", "numel", self.numel, 0)
        check_at_least("Partition", "world_size", self.world_size, 1)
        check_at_least("Partition", "multiple_of", self.multiple_of, 1)
        shard_numel = -(-self.numel // (self.world_size * self.multiple_of)) * self.multiple_of
        object.__setattr__(self, "shard_numel", shard_numel)
        object.__setattr__(self, "padded_numel", self.world_size * shard_numel)

    @property
    def padding(self) -> int:
        """P - N, the elements at the end of the buffer that belong to no parameter."""
        return self.padded_numel - self.numel

    def bounds(self, rank: int) -> tuple[int, int]:
        """Where the shard of `rank` starts and stops in the padded buffer."""
        check_index("Partition", "rank", rank, self.world_size)
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


@dataclass(frozen=True, slots=True)
class NearEqualSplit:
    """A flat buffer cut without padding: the first `numel % world_size` ranks get one
    element more than the others.

    >>> split = NearEqualSplit(numel=10, world_size=4)
    >>> split.sizes
    (3, 3, 2, 2)
    >>> [split.bounds(rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """

    numel: int
    world_size: int

    def __post_init__(self) -> None:
        check_at_least("NearEqualSplit", "numel", self.numel, 0)
        check_at_least("NearEqualSplit", "world_size", self.world_size, 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each rank, in rank order.

        >>> NearEqualSplit(numel=2, world_size=3).sizes
        (1, 1, 0)
        """
        size, num_larger = divmod(self.numel, self.world_size)
        return (size + 1,) * num_larger + (size,) * (self.world_size - num_larger)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Where the elements of `rank` start and stop in the buffer."""
        check_index("NearEqualSplit", "rank", rank, self.world_size)
        size, num_larger = divmod(self.numel, self.world_size)
        return size * rank + min(rank, num_larger), size * (rank + 1) + min(rank + 1, num_larger)
