"""The compute layout: whole matrices of a flat buffer, each with the rank that computes
with it.

A shard of a flat buffer cuts matrices anywhere, and some optimizers look at whole ones.
So each matrix has one owner among the W ranks, chosen once by its work: the heaviest
first, to the rank with the least work so far. Before an update the owner gets the
matrix from the shards, and afterwards the shards get the result (`OwnedBuffer`). The
choice is a function of shapes and W alone, so that it is the same on all ranks and in
all stages.

Shape letters: R rows, C columns of a matrix, W ranks, P padded elements of a buffer.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from sharding.checks import check_at_least
from sharding.layout import FlatLayout

Work = Callable[[int, int], int]
"""The work of a matrix of R rows and C columns, in any unit."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix: `rows` · `columns` elements of the flattened parameter `name`, from
    element `start` of it on; `work` is its share of the computation.
    """

    name: str
    start: int
    rows: int
    columns: int
    work: int

    def __post_init__(self) -> None:
        for name in ("start", "rows", "columns", "work"):
            check_at_least("Matrix", name, getattr(self, name), 0)

    @property
    def numel(self) -> int:
        """The elements of the matrix."""
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns


def newton_schulz_flops(rows: int, columns: int) -> int:
    """The multiplications and additions of one quintic Newton-Schulz step: A = X·Xᵀ,
    A·A, and their product with X, on the shorter side.

    >>> newton_schulz_flops(2, 3), newton_schulz_flops(3, 2)
    (64, 64)
    """
    short, long = min(rows, columns), max(rows, columns)
    return 4 * short * short * long + 2 * short**3


def matrices_of(
    layout: FlatLayout, *, parts: Mapping[str, int] = {}, work: Work = newton_schulz_flops
) -> tuple[Matrix, ...]:
    """The matrices of a layout, in its order. A parameter of more than two dims is a
    matrix of its first dim by all others; one without elements is none.

    Args:
        parts: the number of equal blocks of rows into which a parameter is cut, each a
            matrix of its own (the heads of q, k and v, say).

    Raises:
        ValueError: a parameter is not a matrix, or has no such blocks of rows.

    >>> layout = FlatLayout(("qkv", "out"), ((6, 2), (2, 2)), world_size=2)
    >>> [(m.name, m.start, m.shape) for m in matrices_of(layout, parts={"qkv": 3})]
    [('qkv', 0, (2, 2)), ('qkv', 4, (2, 2)), ('qkv', 8, (2, 2)), ('out', 0, (2, 2))]
    """
    found = []
    for name, shape, numel in zip(layout.names, layout.shapes, layout.numels, strict=True):
        number = parts.get(name, 1)
        if len(shape) < 2:
            raise ValueError(
                f"parameter {name!r} must be a matrix, got shape {shape}; give it to adamw"
            )
        check_at_least("matrices_of", f"parts[{name!r}]", number, 1)
        if shape[0] % number:
            raise ValueError(
                f"parts: {number} must divide the {shape[0]} rows of parameter {name!r}, got "
                f"shape {shape}; choose a number that does"
            )
        if numel:
            rows, columns = shape[0] // number, numel // shape[0]
            flops = work(rows, columns)
            found += [Matrix(name, i * rows * columns, rows, columns, flops) for i in range(number)]
    return tuple(found)


def assign_owners(matrices: Sequence[Matrix], world_size: int) -> tuple[int, ...]:
    """The owner of each matrix, by its work. The rank with the most work has as little
    as one of two rules finds.

    The first rule gives the heaviest matrix to the rank with the least work so far
    (then the fewest elements, then the first), and so on; the largest rank gets at most
    4/3 of the least possible work (Graham 1969). The second fills one rank after the
    other with the heaviest matrices that fit under a bound, and searches for the
    smallest bound (MULTIFIT, Coffman et al. 1978).

    >>> works = [18, 18, 14, 14, 14, 6]
    >>> assign_owners([Matrix(str(i), 0, 2, 2, work) for i, work in enumerate(works)], 2)
    (0, 0, 1, 1, 1, 0)
    """
    check_at_least("assign_owners", "world_size", world_size, 1)
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].work, i))
    owners = [0] * len(matrices)
    ranks = [(0, 0, rank) for rank in range(world_size)]
    for index in order:
        work, numel, rank = heapq.heappop(ranks)
        owners[index], matrix = rank, matrices[index]
        heapq.heappush(ranks, (work + matrix.work, numel + matrix.numel, rank))
    most = max(work for work, _, _ in ranks)
    by_work: dict[int, list[int]] = {}
    for index in order:
        by_work.setdefault(matrices[index].work, []).append(index)
    low = max(-(-sum(m.work for m in matrices) // world_size), max(by_work, default=0))
    while low < most:
        bound = (low + most) // 2
        if (filled := _filled(by_work, world_size, bound)) is None:
            low = bound + 1
        else:
            owners, most = filled, bound
    return tuple(owners)


def _filled(by_work: Mapping[int, Sequence[int]], world_size: int, bound: int) -> list[int] | None:
    """The owners, if one rank after the other takes the heaviest matrices that keep it
    within `bound`; None if some are left over. `by_work` has the heaviest first.
    """
    taken = dict.fromkeys(by_work, 0)
    owners = [0] * sum(map(len, by_work.values()))
    for rank in range(world_size):
        room = bound
        for work, indices in by_work.items():
            left = len(indices) - taken[work]
            number = min(left, room // work) if work else left
            for index in indices[taken[work] : taken[work] + number]:
                owners[index] = rank
            taken[work] += number
            room -= number * work
    return owners if all(len(by_work[work]) == taken[work] for work in by_work) else None


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of a flat buffer, and the dtypes in which tensors of their shapes
    (gradients, say) are sent to owners, and the result back.
    """

    matrices: tuple[Matrix, ...]
    there: tuple[str, ...]
    back: str


@dataclass(frozen=True, slots=True)
class MatrixMove:
    """A run of `numel` elements that lie in two places: in matrix number `matrix` of the
    rank `owner`, from element `start`, and in the flat tensor of `rank`, from `offset`.
    """

    matrix: int
    owner: int
    start: int
    rank: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class OwnedBuffer:
    """The matrices of one flat buffer with their owners, and the moves between the
    shards and the owners.

    Args:
        layout: the layout of the buffer, or of a tensor with other entries for each
            matrix (a state).
        matrices: in the order of the layout; no two share an element.
        owners: the rank that owns each of them.
        places: by rank, the number of its replica and the index of its shard. All
            shards of a replica are there once.
        holds: whether a rank holds its shard of the buffer, or all of it.

    Raises:
        ValueError: the owners are of another number of ranks, or of other matrices.

    >>> layout = FlatLayout(("w",), ((2, 3),), world_size=2)
    >>> owned = OwnedBuffer(layout, matrices_of(layout), (1,), places=((0, 0), (0, 1)))
    >>> for move in owned.to_owners(0):
    ...     print(move)
    MatrixMove(matrix=0, owner=1, start=0, rank=0, offset=0, numel=3)
    >>> len(owned.from_owners(1)), owned.num_sent(0), owned.num_sent(1)
    (2, 3, 3)
    """

    layout: FlatLayout
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    places: tuple[tuple[int, int], ...] = ((0, 0),)
    holds: Literal["shard", "full"] = "shard"
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where each matrix starts in the buffer."""
    _ranks: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """By shard, the ranks that hold it."""

    def __post_init__(self) -> None:
        size = len(self.places)
        if len(self.owners) != len(self.matrices):
            raise ValueError(
                f"OwnedBuffer: owners must name a rank for each of the {len(self.matrices)} "
                f"matrices, got {len(self.owners)}; call assign_owners(matrices, world_size)"
            )
        for matrix, owner in zip(self.matrices, self.owners):
            if not 0 <= owner < size:
                raise ValueError(
                    f"OwnedBuffer: the owner of {matrix.name!r} must be one of {size} ranks, got "
                    f"{owner}; the owners of another number of ranks do not fit: call "
                    f"assign_owners(matrices, {size})"
                )
        starts = tuple(self.layout.bounds(m.name)[0] + m.start for m in self.matrices)
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_ranks", _ranks_by_shard(self.places))

    def to_owners(self, rank: int) -> list[MatrixMove]:
        """The moves out of the memory of `rank`, or into that of `rank` as an owner, in
        the order of matrices and elements. A replica's owners get the matrix from its
        own ranks.
        """
        moves = []
        for index, owner in enumerate(self.owners):
            if self.holds == "full":
                of_matrix = [self._all_of(index, owner)] if owner == rank else []
            elif owner == rank:
                of_matrix = [
                    move
                    for shard in self._shards_of(index)
                    for move in self._moves(index, shard, replica=self.places[owner][0])
                ]
            elif self.places[owner][0] == self.places[rank][0]:
                of_matrix = self._own(index, rank)
            else:
                of_matrix = []
            moves += of_matrix
        return moves

    def from_owners(self, rank: int) -> list[MatrixMove]:
        """The moves of results back: into the memory of `rank`, or out of `rank` as an
        owner, to every rank that holds the elements.
        """
        moves = []
        for index, owner in enumerate(self.owners):
            if self.holds == "full":
                ranks = range(len(self.places)) if owner == rank else (rank,)
                moves += [self._all_of(index, to) for to in ranks]
            elif owner == rank:
                for shard in self._shards_of(index):
                    moves += self._moves(index, shard, replica=None)
            else:
                moves += self._own(index, rank)
        return moves

    def num_sent(self, rank: int) -> int:
        """The elements that `rank` sends to others for one update, in both directions."""
        return self.num_sent_there(rank) + self.num_sent_back(rank)

    def num_sent_there(self, rank: int) -> int:
        """The elements that `rank` sends to owners."""
        return sum(m.numel for m in self.to_owners(rank) if m.rank == rank != m.owner)

    def num_sent_back(self, rank: int) -> int:
        """The elements that `rank`, as an owner, sends to shards."""
        return sum(m.numel for m in self.from_owners(rank) if m.owner == rank != m.rank)

    def _all_of(self, index: int, rank: int) -> MatrixMove:
        matrix = self.matrices[index]
        return MatrixMove(index, self.owners[index], 0, rank, self._starts[index], matrix.numel)

    def _shards_of(self, index: int) -> range:
        """The shards that hold elements of a matrix."""
        start, numel = self._starts[index], self.matrices[index].numel
        shard_numel = self.layout.partition.shard_numel
        return (
            range(start // shard_numel, (start + numel - 1) // shard_numel + 1)
            if numel
            else range(0)
        )

    def _own(self, index: int, rank: int) -> list[MatrixMove]:
        """The elements of a matrix in the shard of `rank`, if any."""
        shard = self.places[rank][1]
        move = self._move(index, shard, rank) if shard in self._shards_of(index) else None
        return [] if move is None else [move]

    def _moves(self, index: int, shard: int, *, replica: int | None) -> list[MatrixMove]:
        """The elements of a matrix in a shard, for each rank (of a replica, or of all)
        that holds it.
        """
        return [
            self._move(index, shard, rank)
            for rank in self._ranks[shard]
            if replica in (None, self.places[rank][0])
        ]

    def _move(self, index: int, shard: int, rank: int) -> MatrixMove:
        start, numel = self._starts[index], self.matrices[index].numel
        first, last = self.layout.partition.bounds(shard)
        begin, end = max(start, first), min(start + numel, last)
        return MatrixMove(
            index, self.owners[index], begin - start, rank, begin - first, end - begin
        )


@lru_cache(maxsize=64)  # the buffers of a plan have the same places
def _ranks_by_shard(places: tuple[tuple[int, int], ...]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for rank, (_, shard) in enumerate(places):
        found[shard] = (*found.get(shard, ()), rank)
    return found
