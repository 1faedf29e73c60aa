"""Patterns: the options from which a `Layout` of any length is made, with DeepSpeed's
names and bits.

`Fixed(num_local_blocks=4).layout(8)` is the layout of 8 blocks. Random blocks are drawn
from (seed, layer, head) by a generator of their own, so that all ranks have the same
and layers have different ones. Papers: Child et al. 2019 (arXiv:1904.10509) for fixed,
Zaheer et al. 2020 (arXiv:2007.14062) for BigBird, Beltagy et al. 2020
(arXiv:2004.05150) for Longformer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import get_args

from fzero.attention.layouts import Attention, Layout, lower_triangle, span


@dataclass(frozen=True, kw_only=True)
class Pattern(ABC):
    """A rule that makes layouts of any length.

    Attributes:
        different_layout_per_head: whether each head has a layout of its own; otherwise
            head 0's is that of all.
    """

    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        known = get_args(Attention)
        wrong = (
            f"must be {' or '.join(map(repr, known))}, got {self.direction!r}"
            if self.direction not in known
            else ""
        )
        for name, rule in ({"attention": wrong} | self.rules()).items():
            if rule:
                raise ValueError(f"{type(self).__name__}.{name}: {rule}")

    @property
    def direction(self) -> Attention:
        """Whether tokens attend to later ones."""
        given: Attention = getattr(self, "attention", "bidirectional")
        return given

    @abstractmethod
    def rules(self) -> dict[str, str]:
        """By option of its own what is wrong with it; an empty text is nothing."""

    def layout(self, num_blocks: int, *, heads: int = 1, seed: int = 0, layer: int = 0) -> Layout:
        """The layout of `num_blocks` blocks.

        Args:
            num_blocks: N, tokens / block.
            heads: layouts to make where every head has its own.
            seed, layer: random blocks depend on these two and the head.

        Raises:
            ValueError: there are fewer blocks than the options need.
        """
        for name in ("num_random_blocks", "num_sliding_window_blocks"):
            self._needs(name, num_blocks)
        made = []
        for head in range(heads if self.different_layout_per_head else 1):
            rows = self.head_rows(num_blocks, head, Random(f"{seed}/{layer}/{head}"))
            made.append(tuple(rows))
        return Layout(tuple(made), self.direction)

    def _needs(self, name: str, num_blocks: int) -> None:
        given = getattr(self, name, 0)
        if given > num_blocks:
            raise ValueError(
                f"{type(self).__name__}.{name}: must be at most the number of blocks, "
                f"{num_blocks}, got {given}; use a longer sequence, a smaller block or fewer of "
                f"them"
            )

    @abstractmethod
    def head_rows(self, num_blocks: int, head: int, random: Random) -> Sequence[int]:
        """The rows of one head, as bits."""


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """Every block.

    >>> print(Dense().layout(2))
    ##
    ##
    """

    def rules(self) -> dict[str, str]:
        return {}

    def head_rows(self, num_blocks: int, head: int, random: Random) -> Sequence[int]:
        return [span(0, num_blocks, num_blocks)] * num_blocks


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Windows of `num_local_blocks`, whose last `num_global_blocks` every row attends
    to.

    Attributes:
        horizontal_global_attention: the global blocks' rows attend to everything, too.
        num_different_global_patterns: with a layout per head, heads take turns with the
            last, second last, … of each window.

    >>> print(Fixed().layout(8))
    ####...#
    ####...#
    ####...#
    ####...#
    ...#####
    ...#####
    ...#####
    ...#####
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: Attention = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def rules(self) -> dict[str, str]:
        local, glob, patterns = (
            self.num_local_blocks,
            self.num_global_blocks,
            self.num_different_global_patterns,
        )
        found = at_least(
            1, self, "num_local_blocks", "num_global_blocks", "num_different_global_patterns"
        )
        if any(found.values()):
            return found
        if local % glob:
            found["num_global_blocks"] = f"must divide num_local_blocks, {local}, got {glob}"
        if patterns > 1 and not self.different_layout_per_head:
            found["num_different_global_patterns"] = (
                f"needs different_layout_per_head: true beside it, got {patterns}"
            )
        if patterns > local // glob:
            found["num_different_global_patterns"] = (
                f"must be at most num_local_blocks / num_global_blocks, {local} / {glob}, got "
                f"{patterns}"
            )
        return found | _both_ways(self)

    def head_rows(self, num_blocks: int, head: int, random: Random) -> Sequence[int]:
        size, glob = self.num_local_blocks, self.num_global_blocks
        rows = windows(num_blocks, [size], self.attention)
        first = size - (1 + head % self.num_different_global_patterns) * glob
        full = num_blocks - num_blocks % size
        starts = list(range(first, full, size))
        if full < num_blocks:  # a short last window
            starts.append(min(full + first, num_blocks - glob))
        for start in starts:
            add_global(
                rows, start, start + glob, self.attention, across=self.horizontal_global_attention
            )
        return rows


@dataclass(frozen=True, kw_only=True)
class Variable(Pattern):
    """Windows of given sizes, global blocks by index, and random blocks.

    Attributes:
        num_random_blocks: random blocks of each row, at any column, even if `attention`
            is "unidirectional".
        local_window_blocks: the size of each window; the last one is repeated.
        global_block_indices: the blocks that every row attends to; with
            `global_block_end_indices` the starts of ranges.
        global_block_end_indices: their ends, exclusive.

    >>> print(Variable(local_window_blocks=(1, 2), global_block_indices=(0,)).layout(5))
    #....
    ###..
    ###..
    #..##
    #..##
    """

    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: Attention = "bidirectional"
    horizontal_global_attention: bool = False

    def rules(self) -> dict[str, str]:
        sizes = self.local_window_blocks
        found = at_least(0, self, "num_random_blocks") | _ranges(self) | _both_ways(self)
        if not sizes or min(sizes) < 1:
            found["local_window_blocks"] = (
                f"must be sizes of at least 1, one or more, got {list(sizes)}"
            )
        return found

    def head_rows(self, num_blocks: int, head: int, random: Random) -> Sequence[int]:
        drawn = [_drawn(random, num_blocks, self.num_random_blocks) for _ in range(num_blocks)]
        local = windows(num_blocks, self.local_window_blocks, self.attention)
        rows = [a | b for a, b in zip(drawn, local, strict=True)]
        for start, stop in global_ranges(
            num_blocks, self.global_block_indices, self.global_block_end_indices
        ):
            add_global(rows, start, stop, self.attention, across=self.horizontal_global_attention)
        return rows


@dataclass(frozen=True, kw_only=True)
class BigBird(Pattern):
    """Random blocks, a sliding window, and the first blocks as global rows and columns.

    Where `attention` is "unidirectional", a row draws from the columns up to its own,
    as many as there are.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: Attention = "bidirectional"

    def rules(self) -> dict[str, str]:
        names = ("num_random_blocks", "num_global_blocks")
        return at_least(0, self, *names) | at_least(1, self, "num_sliding_window_blocks")

    def head_rows(self, num_blocks: int, head: int, random: Random) -> Sequence[int]:
        self._needs("num_global_blocks", num_blocks)
        whole = self.attention == "bidirectional"
        sizes = [num_blocks if whole else row + 1 for row in range(num_blocks)]
        drawn = [_drawn(random, size, min(self.num_random_blocks, size)) for size in sizes]
        rows = [
            a | b
            for a, b in zip(drawn, sliding(num_blocks, self.num_sliding_window_blocks), strict=True)
        ]
        add_global(rows, 0, self.num_global_blocks, "bidirectional", across=True)
        return rows if whole else lower_triangle(tuple(rows))


@dataclass(frozen=True, kw_only=True)
class BSLongformer(Pattern):
    """A sliding window, and global rows and columns by index or by ranges (see
    `Variable`): Longformer in blocks.

    >>> print(BSLongformer(attention="unidirectional").layout(4))
    #...
    ##..
    ###.
    #.##
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: Attention = "bidirectional"

    def rules(self) -> dict[str, str]:
        return at_least(1, self, "num_sliding_window_blocks") | _ranges(self)

    def head_rows(self, num_blocks: int, head: int, random: Random) -> Sequence[int]:
        rows = sliding(num_blocks, self.num_sliding_window_blocks)
        for start, stop in global_ranges(
            num_blocks, self.global_block_indices, self.global_block_end_indices
        ):
            add_global(rows, start, stop, "bidirectional", across=True)
        return rows if self.attention == "bidirectional" else lower_triangle(tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Local(Pattern):
    """A sliding window alone; by default its half before each row.

    >>> print(Local().layout(3))
    #..
    ##.
    .##
    """

    num_sliding_window_blocks: int = 3
    attention: Attention = "unidirectional"

    def rules(self) -> dict[str, str]:
        return at_least(1, self, "num_sliding_window_blocks")

    def head_rows(self, num_blocks: int, head: int, random: Random) -> Sequence[int]:
        rows = sliding(num_blocks, self.num_sliding_window_blocks)
        return rows if self.attention == "bidirectional" else lower_triangle(tuple(rows))


PATTERNS: dict[str, type[Pattern]] = {
    "dense": Dense,
    "fixed": Fixed,
    "variable": Variable,
    "bigbird": BigBird,
    "bslongformer": BSLongformer,
    "local": Local,
}
"""The patterns by DeepSpeed's names of modes; `local` has none there."""


# --- parts of patterns ----------------------------------------------------------------------------


def windows(num_blocks: int, sizes: Sequence[int], attention: Attention) -> list[int]:
    """Rows that attend to their window; the last size is repeated, and unidirectional
    rows end at the diagonal.
    """
    rows, start, given = list[int](), 0, iter(sizes)
    size = sizes[-1]
    while start < num_blocks:
        size = next(given, size)
        for row in range(start, min(start + size, num_blocks)):
            rows.append(
                span(start, row + 1 if attention == "unidirectional" else start + size, num_blocks)
            )
        start += size
    return rows


def sliding(num_blocks: int, size: int) -> list[int]:
    """Rows that attend to the blocks at most size // 2 away."""
    half = size // 2
    return [span(max(row - half, 0), row + half + 1, num_blocks) for row in range(num_blocks)]


def add_global(
    rows: list[int], start: int, stop: int, attention: Attention, *, across: bool
) -> None:
    """Adds columns to all rows, or unidirectionally to those from `start` on; `across`
    also fills the rows of that range.
    """
    num_blocks = len(rows)
    columns = span(start, stop, num_blocks)
    if across:
        for row in range(num_blocks)[start:stop]:
            rows[row] = span(0, num_blocks, num_blocks)
    for row in range(num_blocks)[0 if attention == "bidirectional" else start :]:
        rows[row] |= columns


def global_ranges(
    num_blocks: int, starts: Sequence[int], ends: Sequence[int] | None
) -> list[tuple[int, int]]:
    """The ranges of global blocks that begin inside the sequence; a negative index
    alone counts from the end.
    """
    if ends is None:
        return [
            (start % num_blocks, start % num_blocks + 1)
            for start in starts
            if -num_blocks <= start < num_blocks
        ]
    return [
        (start, min(stop, num_blocks))
        for start, stop in zip(starts, ends, strict=True)
        if start < num_blocks
    ]


def _drawn(random: Random, population: int, count: int) -> int:
    return sum(1 << column for column in random.sample(range(population), count))


# --- rules of options -----------------------------------------------------------------------------


def at_least(least: int, pattern: Pattern, *names: str) -> dict[str, str]:
    """By option what is wrong with it where it must be at least `least`; an empty text
    is nothing.
    """
    given = {name: getattr(pattern, name) for name in names}
    return {
        name: f"must be at least {least}, got {value}" if value < least else ""
        for name, value in given.items()
    }


def _both_ways(pattern: Fixed | Variable) -> dict[str, str]:
    wrong = pattern.horizontal_global_attention and pattern.attention != "bidirectional"
    return {
        "horizontal_global_attention": "needs attention 'bidirectional', got 'unidirectional'"
        if wrong
        else ""
    }


def _ranges(pattern: Variable | BSLongformer) -> dict[str, str]:
    starts, ends = pattern.global_block_indices, pattern.global_block_end_indices
    if ends is None:
        return {}
    wrong = ""
    if len(starts) != len(ends):
        wrong = f"must have as many as global_block_indices, {len(starts)}, got {len(ends)}"
    elif any(start >= stop for start, stop in zip(starts, ends, strict=True)):
        wrong = f"must each be above its start, {list(starts)}, got {list(ends)}"
    return {"global_block_end_indices": wrong}
