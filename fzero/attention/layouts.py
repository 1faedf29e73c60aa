"""`Layout`: which blocks of an attention matrix are kept, as a value.

A sequence of L tokens is cut into N blocks; block row r of the attention matrix has the
queries of block r, block column c the keys of block c. A layout says for each head (or
once for all) which columns each row attends to. It holds integers alone: a kernel is
chosen elsewhere (`fzero.attention.attend`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Attention = Literal["bidirectional", "unidirectional"]


@dataclass(frozen=True)
class Layout:
    """The kept blocks of an attention matrix of N × N blocks.

    Attributes:
        rows: for each head, or once for all heads, N integers: bit c of
            `rows[head][row]` is set where the queries of block `row` attend to the keys
            of block c.
        attention: "unidirectional" where no token shall attend to a later one. The
            blocks alone do not ensure that: see `causal` of `sparse_attention`.

    >>> layout = Layout(((0b001, 0b011, 0b111),), "unidirectional")
    >>> print(layout)
    #..
    ##.
    ###
    >>> layout.columns(1), layout.num_blocks, layout.num_heads
    ((0, 1), 3, 1)
    """

    rows: tuple[tuple[int, ...], ...]
    attention: Attention = "bidirectional"

    def __post_init__(self) -> None:
        sizes = {len(head) for head in self.rows}
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(
                f"Layout: every head must have the same number of rows, 1 or more, got "
                f"{sorted(sizes)}"
            )
        if any(bits < 0 or bits >> self.num_blocks for head in self.rows for bits in head):
            raise ValueError(
                f"Layout: columns must be in 0 to {self.num_blocks - 1}; a row has others"
            )

    @property
    def num_blocks(self) -> int:
        """N, rows and columns."""
        return len(self.rows[0])

    @property
    def num_heads(self) -> int:
        """The heads with a layout of their own; 1 is one layout for all heads."""
        return len(self.rows)

    @property
    def num_kept(self) -> int:
        """Kept blocks of the heads with a layout of their own."""
        return sum(bits.bit_count() for head in self.rows for bits in head)

    @property
    def keeps_triangle(self) -> bool:
        """Whether every block on and below the diagonal is kept, as in dense causal
        attention.
        """
        return all(
            rows == tuple((2 << row) - 1 for row in range(self.num_blocks))
            for rows in self.lower_triangle().rows
        )

    def columns(self, row: int, head: int = 0) -> tuple[int, ...]:
        """The columns that a row attends to, in ascending order."""
        return columns_of(self.rows[head][row])

    def __str__(self) -> str:
        pictures = (self.picture(head) for head in range(self.num_heads))
        return "\n\n".join(pictures)

    def picture(self, head: int = 0) -> str:
        """A line for each row: `#` is a kept block, `.` is none."""
        lines = (f"{bits:0{self.num_blocks}b}"[::-1] for bits in self.rows[head])
        return "\n".join(line.replace("0", ".").replace("1", "#") for line in lines)

    def corner(self, num_blocks: int) -> Layout:
        """The layout of a shorter sequence: the first rows and columns.

        >>> print(Layout(((0b101, 0b010, 0b111),)).corner(2))
        #.
        .#
        """
        if not 1 <= num_blocks <= self.num_blocks:
            raise ValueError(
                f"Layout.corner: num_blocks must be in 1 to {self.num_blocks}, got {num_blocks}"
            )
        inside = (1 << num_blocks) - 1
        return replace(
            self,
            rows=tuple(tuple(bits & inside for bits in head[:num_blocks]) for head in self.rows),
        )

    def lower_triangle(self) -> Layout:
        """Without the blocks whose keys are all later than the queries."""
        return replace(self, rows=tuple(lower_triangle(head) for head in self.rows))

    def of_heads(self, heads: range) -> Layout:
        """The layout of some of the heads, as a rank has them that holds a part of the
        heads; one for all heads is kept.
        """
        return (
            self
            if self.num_heads == 1
            else replace(self, rows=tuple(self.rows[head] for head in heads))
        )

    def coarsened(self, factor: int) -> Layout:
        """The layout in blocks of `factor` times the size that contains this one: what
        a kernel with larger tiles computes.

        >>> print(Layout(((0b0001, 0b0010, 0b0100, 0b1001),)).coarsened(2))
        #.
        ##
        """
        if factor < 1 or self.num_blocks % factor:
            raise ValueError(
                f"Layout.coarsened: factor must divide {self.num_blocks} blocks, got {factor}"
            )
        return replace(self, rows=tuple(_coarsened(head, factor) for head in self.rows))

    def check_rows(self) -> None:
        """Raises a ValueError for a row that attends to nothing, whose softmax has no
        value.
        """
        for head, rows in enumerate(self.rows):
            if 0 in rows:
                raise ValueError(
                    f"layout: every row must keep a block, but row {rows.index(0)} of head {head} "
                    f"keeps none; keep its diagonal block, for example with a window"
                )


def density(layout: Layout) -> float:
    """The share of blocks that are kept: the time of a sparse kernel over that of a
    dense one.

    >>> density(Layout(((0b01, 0b11),)))
    0.75
    """
    return layout.num_kept / (layout.num_heads * layout.num_blocks**2)


def columns_of(bits: int) -> tuple[int, ...]:
    """The positions of set bits.

    >>> columns_of(0b1011)
    (0, 1, 3)
    """
    return tuple(column for column, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def span(start: int, stop: int, num_blocks: int) -> int:
    """The columns of a slice, by Python's rules: negative ends count from the last
    column, and the rest is cut off.

    >>> bin(span(1, 3, 8)), bin(span(-1, 9, 4))
    ('0b110', '0b1000')
    """
    first, last, _ = slice(start, stop).indices(num_blocks)
    return (1 << max(last, first)) - (1 << first)


def lower_triangle(rows: tuple[int, ...]) -> tuple[int, ...]:
    """The rows without columns above the diagonal."""
    return tuple(bits & ((2 << row) - 1) for row, bits in enumerate(rows))


def _coarsened(rows: tuple[int, ...], factor: int) -> tuple[int, ...]:
    made = []
    for start in range(0, len(rows), factor):
        together = 0
        for bits in rows[start : start + factor]:
            together |= bits
        columns = {column // factor for column in columns_of(together)}
        made.append(sum(1 << column for column in columns))
    return tuple(made)
