"""Fragments: the parts of parameters in a flat tensor, and sums over a parameter whose
parts are on several ranks.

An optimizer that is not elementwise reads full parameters: their norms, their rows and
columns, their singular values. In stage 0 its flat tensor is the full buffer, in stages
1-3 one shard, whose ends cut parameters. `ShardContents` lists the fragments in it.
Every stage must give the same bits, so sums are made in one way only: a partial sum for
each shard and parameter, and then the W partial sums of a parameter in rank order.

Shape letters: P padded = W * S, S shard, W ranks, K partial sums of one shard.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from fzero.optim.owner_calls import Exchange, alone
from sharding.flat_runs import Box, boxes
from sharding.layout import FlatLayout
from sharding.owners import Matrices

if TYPE_CHECKING:
    from fzero.optim.transforms import Transform

CHUNK = 2**18
"""Elements whose squares are in memory at once, in double precision."""


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class FragmentSlice:
    """Elements [start, stop) of the flattened parameter `index`: they are at `offset`
    of the flat tensor, in its shard `row`.
    """

    row: int
    index: int
    start: int
    stop: int
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """These elements, as a view."""
        return flat[self.offset : self.offset + self.stop - self.start]

    def box_of(self, flat: Tensor, box: Box) -> Tensor:
        """The elements of a box of the parameter, which lies in the fragment, as a view
        of the sizes of the box.
        """
        return self.of(flat)[box.start - self.start :][: box.numel].view(box.sizes)


@dataclass(frozen=True, slots=True)
class ShardContents:
    """The parameters that a flat tensor holds, and the collectives that reach the ranks
    with the rest.

    Args:
        layout: the layout of the full buffer.
        ranks: the ranks whose shards the tensor holds, one after another: all W in
            stage 0 (see `whole`), one in stages 1-3.
        stack: the partial sums (len(ranks), K) -> those of all ranks (W, K), in rank
            order. *Collective* for one shard: sends (W-1) · K.
        owners: the rank that computes with each matrix of the layout
            (`sharding.owners`); None if this rank computes with all.
        places: by rank of the job, the number of its replica and the index of its
            shard.
        rank: this rank, as an index of `places`.
        exchange: the collective with owners, see `fzero.optim.owner_calls`.

    Raises:
        ValueError: the ranks are neither all nor one.

    >>> layout = FlatLayout(names=("w", "b"), shapes=((2, 3), (3,)), world_size=2)
    >>> ShardContents(layout, ranks=(1,)).parts
    (FragmentSlice(row=0, index=0, start=5, stop=6, offset=0), FragmentSlice(row=0, index=1, start=0, stop=3, offset=1))
    >>> [part.row for part in ShardContents.whole(layout).parts]
    [0, 1, 1]
    """

    layout: FlatLayout
    ranks: tuple[int, ...]
    stack: Callable[[Tensor], Tensor] = _same
    owners: tuple[int, ...] | None = None
    places: tuple[tuple[int, int], ...] = ((0, 0),)
    rank: int = 0
    exchange: Exchange = alone

    def __post_init__(self) -> None:
        world = range(self.layout.world_size)
        # tested first: a plan makes contents for many buffers
        is_one = len(self.ranks) == 1 and self.ranks[0] in world
        if not is_one and self.ranks != tuple(world):
            raise ValueError(
                f"ShardContents: ranks must be all {self.layout.world_size} in order, or one of "
                f"them, got {self.ranks}; pass ShardContents.whole(layout) for a full buffer and "
                f"ranks=(rank,) for a shard"
            )

    @classmethod
    def whole(cls, layout: FlatLayout) -> Self:
        """The contents of a full buffer (P,), which sends nothing."""
        return cls(layout, tuple(range(layout.world_size)))

    @property
    def holds(self) -> Literal["shard", "full"]:
        """Whether the tensor is one of several shards, or the full buffer."""
        return "full" if len(self.ranks) == self.layout.world_size else "shard"

    @property
    def numel(self) -> int:
        """The elements of the flat tensor, padding included."""
        return len(self.ranks) * self.layout.partition.shard_numel

    @property
    def parts(self) -> tuple[FragmentSlice, ...]:
        """The fragments in the flat tensor, in order."""
        index_of = {name: index for index, name in enumerate(self.layout.names)}
        numel = self.layout.partition.shard_numel
        return tuple(
            FragmentSlice(
                row, index_of[part.name], part.start, part.stop, row * numel + part.offset
            )
            for row, rank in enumerate(self.ranks)
            for part in self.layout.fragments(rank)
        )

    def add_up(self, partial: Tensor) -> Tensor:
        """The sums (K,) over all ranks, from partial sums (len(ranks), K).
        *Collective:* sends as much as `stack`.
        """
        rows_WK = self.stack(partial)
        assert rows_WK.shape == (self.layout.world_size, partial.shape[1])
        total = rows_WK[0].clone()
        for row in rows_WK[1:]:
            total += row
        return total

    def squares(self, flat: Tensor) -> Tensor:
        """The sum of squares of every parameter, for each shard of the tensor:
        (len(ranks), parameters), float64.
        """
        sums = torch.zeros(
            len(self.ranks), len(self.layout.names), dtype=torch.float64, device=flat.device
        )
        for part in self.parts:
            for chunk in torch.split(part.of(flat), CHUNK):
                sums[part.row, part.index] += chunk.to(torch.float64, copy=True).square_().sum()
        return sums

    def check(self, owner: str, flat: Tensor) -> None:
        """Raises unless the tensor has the shape that these contents describe."""
        if tuple(flat.shape) != (self.numel,):
            raise ValueError(
                f"{owner}: the flat tensor must have {self.numel} elements, those of ranks "
                f"{self.ranks} of the layout, got shape {tuple(flat.shape)}; pass the "
                f"ShardContents of this tensor"
            )


class ByContents(ABC):
    """A function of a learning rate and of the contents of a flat tensor that makes a
    transform, for optimizers that look at full parameters.
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, lr: Any, contents: ShardContents | None = None, kind: str = "") -> Transform:
        """The transform of a flat tensor whose parameters have the update rule `kind`;
        without contents, that of a flat tensor of 32 elements, by which ranks compare
        optimizers.
        """

    @abstractmethod
    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """The update rule of a parameter."""

    @abstractmethod
    def is_elementwise(self, kind: str) -> bool:
        """Whether an update rule treats each element separately."""

    @abstractmethod
    def matrices(self, layout: FlatLayout, kind: str) -> Matrices | None:
        """The matrices of a flat buffer that are computed by one owner each, if any."""

    @abstractmethod
    def check(self, field: str) -> None:
        """Raises a ValueError, which begins with `field`, unless it keeps the laws that
        shards rely on.
        """


@dataclass(frozen=True, slots=True)
class Grid:
    """A parameter as a stack of matrices, and the indices of its first row and column
    in the statistics of all parameters.
    """

    matrices: int
    rows: int
    columns: int
    first_row: int
    first_column: int

    def all_rows(self, statistics: Tensor) -> Tensor:
        """The entries of this parameter: (matrices, rows)."""
        return statistics[self.first_row :][: self.matrices * self.rows].view(
            self.matrices, self.rows
        )

    def all_columns(self, statistics: Tensor) -> Tensor:
        """The entries of this parameter: (matrices, columns)."""
        return statistics[self.first_column :][: self.matrices * self.columns].view(
            self.matrices, self.columns
        )

    def rows_of(self, box: Box, statistics: Tensor) -> Tensor:
        """The entries of a box: (matrices, rows, 1)."""
        matrices, rows, _ = box.sizes
        return statistics[self.first_row + box.start // self.columns :][: matrices * rows].view(
            matrices, rows, 1
        )

    def columns_of(self, box: Box, statistics: Tensor) -> Tensor:
        """The entries of a box: (matrices, 1, columns)."""
        matrices, _, columns = box.sizes
        matrix, _, column = box.offsets
        first = self.first_column + matrix * self.columns + column
        return statistics[first:][: matrices * columns].view(matrices, 1, columns)

    def matrices_of(self, box: Box, values: Tensor) -> Tensor:
        """One value for each matrix of a box: (matrices, 1, 1)."""
        return values[box.offsets[0] :][: box.sizes[0]].view(box.sizes[0], 1, 1)


def grids_of(layout: FlatLayout) -> dict[int, Grid]:
    """Every parameter that has rows and columns, by its index in the layout."""
    grids: dict[int, Grid] = {}
    first_row = first_column = 0
    for index, shape in enumerate(layout.shapes):
        if len(shape) >= 2 and layout.numels[index]:
            *stack, rows, columns = shape
            grids[index] = Grid(math.prod(stack), rows, columns, first_row, first_column)
            first_row += math.prod(stack) * rows
            first_column += math.prod(stack) * columns
    return grids


def boxes_of(
    parts: tuple[FragmentSlice, ...], grids: dict[int, Grid]
) -> Iterator[tuple[FragmentSlice, Grid, Box]]:
    """The fragments of matrices, cut into boxes: full matrices, full rows of a matrix,
    and parts of a row.
    """
    for part in parts:
        if part.index in grids:
            grid = grids[part.index]
            for box in boxes(part.start, part.stop, (grid.matrices, grid.rows, grid.columns)):
                yield part, grid, box
