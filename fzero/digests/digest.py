"""`Digest`: sums of a tensor's bits that show whether and where two tensors differ.

The bits are read as words of 64 bits and laid out in rows of about √n words. The digest
is the sum of each row and of each column (a product code; Huang and Abraham,
"Algorithm-based fault tolerance for matrix operations", 1984). A single different bit
changes one of each, so digests that differ name the element, although neither tensor is
kept.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.storage.file_tensor import StoredTensor

_WORD = 8  # bytes
_SMALL = 1 << 18  # bytes
ELEMENTS_OF_FILE = 1 << 24
"""Elements of a file that are in memory at a time."""


class Digest(NamedTuple):
    """The digest of a tensor of n words, with rows of C words.

    Sums are of 64 bits and wrap around, so every single flipped bit changes them. Other
    changes can cancel, if they do so in their row and in their column.
    """

    row_sums: Tensor
    """(⌈n/C⌉,), int64."""
    column_sums: Tensor
    """(C,), int64."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def same_as(self, other: Digest) -> bool:
        """Whether both are of equal tensors, as far as sums show. Waits for the device."""
        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and torch.equal(self.row_sums, other.row_sums)
            and torch.equal(self.column_sums, other.column_sums)
        )

    def first_difference(self, other: Digest) -> str:
        """The element, or the range of elements, where two tensors of one shape first
        differ; "" if nothing shows it.

        >>> x = torch.arange(12.0).view(3, 4)
        >>> y = x.clone()
        >>> y[1, 2] = 9.0
        >>> digest(x).first_difference(digest(y))
        'element (1, 2)'
        """
        if self.shape != other.shape or self.dtype != other.dtype:
            return ""
        by_row, by_column = self.row_sums - other.row_sums, self.column_sums - other.column_sums
        rows, columns = (x.nonzero().flatten().tolist() for x in (by_row, by_column))
        if not rows or not columns:
            return ""
        width, nbytes = len(by_column), self.dtype.itemsize
        if len(rows) == 1 or len(columns) == 1:
            change = int(by_column[columns[0]] if len(rows) == 1 else by_row[rows[0]])
            # Carries change higher bits only. A word begins with its lowest bits.
            lowest = (change & -change).bit_length() - 1
            byte = _WORD * (rows[0] * width + columns[0]) + lowest // 8
            return f"element {_index(byte // nbytes, self.shape)}"
        first, last = (_WORD * width * row // nbytes for row in (rows[0], rows[0] + 1))
        last = min(last, math.prod(self.shape)) - 1
        return f"elements {_index(first, self.shape)} to {_index(last, self.shape)}"

    def number(self) -> int:
        """A checksum of the digest, to be compared between ranks. Waits for the device."""
        sums = torch.cat([self.row_sums, self.column_sums]).cpu()
        kind = zlib.crc32(repr((self.shape, self.dtype)).encode())
        return zlib.crc32(sums.numpy().tobytes(), kind)

    def plain(self) -> tuple[Any, ...]:
        """The digest as plain values, which ranks can exchange; see `of_plain`."""
        return self.row_sums.tolist(), self.column_sums.tolist(), self.shape, str(self.dtype)

    @classmethod
    def of_plain(cls, values: Any) -> Digest:
        """The inverse of `plain`."""
        rows, columns, shape, dtype = values
        return cls(
            torch.tensor(rows, dtype=torch.int64),
            torch.tensor(columns, dtype=torch.int64),
            tuple(shape),
            getattr(torch, dtype.removeprefix("torch.")),
        )


def digest(x: StoredTensor) -> Digest:
    """The digest of a tensor's bits. It reads the tensor twice, and does not wait for the
    device. A tensor in a file is read in parts.

    >>> x = torch.ones(5)
    >>> digest(x).same_as(digest(x.clone())), digest(x).same_as(digest(-x))
    (True, False)
    """
    width = max(1, math.isqrt(x.numel() * x.dtype.itemsize // _WORD))
    if isinstance(x, Tensor):
        return Digest(*_sums(x, width), tuple(x.shape), x.dtype)
    per_row = width * _WORD // x.dtype.itemsize
    length = per_row * max(1, ELEMENTS_OF_FILE // per_row)
    parts = [_sums(x[at : at + length], width) for at in range(0, max(x.numel(), 1), length)]
    row_sums = torch.cat([of_rows for of_rows, _ in parts])
    return Digest(row_sums, sum(of_columns for _, of_columns in parts), x.shape, x.dtype)  # type: ignore[arg-type]


def _sums(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The sums of the rows and of the columns of a tensor, in rows of `width` words."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    missing = -flat.numel() % (_WORD * width)
    if missing and flat.numel() <= _SMALL:  # a copy takes less time than the calls below
        flat, missing = F.pad(flat, (0, missing)), 0
    if not missing:
        table = flat.view(torch.int64).view(-1, width)
        return table.sum(1), table.sum(0)
    whole = flat.numel() // (_WORD * width) * _WORD * width
    table, last = flat[:whole].view(torch.int64).view(-1, width), flat.new_zeros(_WORD * width)
    last[: flat.numel() - whole] = flat[whole:]
    row = last.view(torch.int64)
    return torch.cat([table.sum(1), row.sum().view(1)]), table.sum(0).add_(row)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...] | int:
    """A flat index as an index of the shape; a number for one dim."""
    if len(shape) < 2:
        return flat
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))
