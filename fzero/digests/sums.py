"""`Sums`: a digest of a tensor that adds up over its parts, and that tells how far two
tensors are apart although neither is kept.

It has three sums over the elements, which depend on an element's value and its index in
the whole tensor, and not on how ranks divide the tensor:

- *bits*, mod 2^64: each element's bits times an odd number of its index (multilinear
  hashing; Carter and Wegman 1979). One different element always changes it.
- *square*: the sum of squares.
- *sketch*: each element, with a random sign of its index, is added to one of K numbers
  (count sketch; Charikar, Chen and Farach-Colton 2002). The squared distance of two
  sketches is that of the tensors, on average; its deviation is √(2/K) of it.

An element that is 0 adds nothing, so a missing tensor has the sums of zeros.

Shape letters: n elements of a part, B elements of a block, K numbers of a sketch.
"""

from __future__ import annotations

import base64
import math
import struct
from functools import lru_cache
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

K = 31
"""Numbers of a sketch: a prime, of which few matrices' widths are multiples."""
SEGMENT = 16 * K
"""Elements that are added to the numbers of a sketch in order. The next segment begins
with another number, for matrices whose width is a multiple of K."""
BLOCK = 2048 * K
"""Elements whose odd numbers and signs are kept in a table; another block has those of
the table, times a number of the block."""
NUMBERS = 2 + K
"""64-bit numbers of a tensor's sums: bits, square, sketch."""

_HALF = 0x1E3779B97F4A7C15  # an odd number, for the upper half of 64 bits
_GROUP = {"cpu": 1}  # blocks in one call of a kernel; those of a CPU fit its cache
_GROUP_ON_DEVICE = 128


class Sums(NamedTuple):
    """The sums of one tensor.

    >>> x = torch.arange(1000.0)
    >>> whole = Sums.of(sums_of(x, 0))
    >>> parts = Sums.of(sums_of(x[:300], 0)) + Sums.of(sums_of(x[300:], 300))
    >>> whole.bits == parts.bits, abs(whole.distance(parts)) < 1e-9
    (True, True)
    """

    bits: int
    square: float
    sketch: tuple[float, ...]

    @classmethod
    def of(cls, numbers: Tensor) -> Self:
        """The sums from the tensor that `sums_of` returns. Waits for the device."""
        return cls.of_bytes(struct.pack(f"<{NUMBERS}q", *numbers.tolist()))

    @classmethod
    def of_bytes(cls, packed: bytes) -> Self:
        bits, square, *sketch = struct.unpack(f"<q{len(packed) // 8 - 1}d", packed)
        return cls(bits, square, tuple(sketch) + (0.0,) * (K - len(sketch)))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The inverse of `text`."""
        return cls.of_bytes(base64.b64decode(text, validate=True))

    def text(self) -> str:
        """The sums in base64. Zeros at the end of a sketch are left out."""
        num = max((i + 1 for i, x in enumerate(self.sketch) if x), default=0)
        packed = struct.pack(f"<q{1 + num}d", self.bits, self.square, *self.sketch[:num])
        return base64.b64encode(packed).decode()

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        """The sums of two parts of a tensor."""
        bits = (self.bits + other.bits + 2**63) % 2**64 - 2**63
        sketch = tuple(map(sum, zip(self.sketch, other.sketch, strict=True)))
        return Sums(bits, self.square + other.square, sketch)

    @property
    def norm(self) -> float:
        """The 2-norm of the tensor."""
        return math.sqrt(self.square)

    def times(self, factor: float) -> Sums:
        """The sums of a multiple of the tensor, but for its bits."""
        return Sums(self.bits, self.square * factor**2, tuple(x * factor for x in self.sketch))

    def distance(self, other: Sums) -> float:
        """An estimate of the 2-norm of the difference of the tensors; of one different
        element, its difference. NaN or infinity where a tensor is not finite.
        """
        pairs = zip(self.sketch, other.sketch, strict=True)
        return math.sqrt(sum((x - y) ** 2 for x, y in pairs))


ZERO = Sums(0, 0.0, (0.0,) * K)


def sums_of(part_n: Tensor, start: int) -> Tensor:
    """The sums of a part of a tensor. They do not depend on the dtype of a floating
    tensor, as long as it holds the same values in 32 bits or less.

    Args:
        part_n: consecutive elements of the flattened tensor.
        start: the index of the first one.

    Returns:
        int64 (`NUMBERS`,), on the same device: `bits`, and the bits of the other numbers
        as float64. Does not wait for the device.
    """
    flat = part_n.detach().reshape(-1)
    if flat.is_complex():
        flat, start = torch.view_as_real(flat).reshape(-1), 2 * start
    if flat.is_floating_point() and flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    sums = torch.zeros(NUMBERS, dtype=torch.int64, device=flat.device)
    group, at, stop = _GROUP.get(flat.device.type, _GROUP_ON_DEVICE), start, start + flat.numel()
    while at < stop:
        block, offset = divmod(at, BLOCK)
        num_whole = 0 if offset else min((stop - at) // BLOCK, group)
        end = at + num_whole * BLOCK if num_whole else min(stop, (block + 1) * BLOCK)
        rows = flat[at - start : end - start].view(num_whole or 1, -1)
        sums, at = added(sums, _sums_of_rows(rows, block, offset)), end
    return sums


def added(x: Tensor, y: Tensor) -> Tensor:
    """The sums of two parts of a tensor, as `sums_of` returns them."""
    numbers = x[1:].view(torch.float64) + y[1:].view(torch.float64)
    return torch.cat([x[:1] + y[:1], numbers.view(torch.int64)])


def _sums_of_rows(rows: Tensor, block: int, offset: int) -> Tensor:
    """The sums of the same elements, from `offset` on, of adjacent blocks."""
    num, length = rows.shape
    odd, signs, order = _tables(rows.device)
    odd, signs = odd[offset : offset + length], signs[offset : offset + length]
    blocks = torch.tensor([_mixed(block + i) | 1 for i in range(num)], device=rows.device)
    if rows.dtype in (torch.float64, torch.int64):
        words = rows.view(torch.int64)
        words = (words & 0xFFFFFFFF) + (words >> 32) * _HALF  # so that no high bit is lost
    else:
        words = (rows.view(torch.int32) if rows.dtype == torch.float32 else rows).long()
    bits = ((words * odd).sum(1) * blocks).sum()
    values = rows.double()
    signed, pads = values * signs, (offset % SEGMENT, -(offset + length) % SEGMENT)
    signed = F.pad(signed, pads) if any(pads) else signed
    of_segments = signed.view(num, -1, SEGMENT // K, K).sum(2)
    first = offset // SEGMENT
    turned = order[first : first + of_segments.shape[1]].expand_as(of_segments)
    sketches = of_segments.gather(2, turned).sum(1)
    # blocks take turns, too, so that equal blocks do not meet
    turns = torch.arange(block, block + num, device=rows.device)[:, None]
    places = (torch.arange(K, device=rows.device) - turns) % K
    sketch = (sketches.gather(1, places) * (1 - 2 * (blocks < 0).double())[:, None]).sum(0)
    numbers = torch.cat([values.square().sum().view(1), sketch])
    return torch.cat([bits.view(1), numbers.view(torch.int64)])


@lru_cache(maxsize=4)
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The odd numbers and the signs of the elements of a block; by segment, the element
    that is added to each number of a sketch.
    """
    odd = torch.tensor([_mixed(~i) | 1 for i in range(BLOCK)])
    turns = torch.tensor([_mixed(-BLOCK - i) % K for i in range(BLOCK // SEGMENT)])
    order = (torch.arange(K) - turns[:, None]) % K
    return odd.to(device), (1 - 2 * (odd < 0).double()).to(device), order.to(device)


def _mixed(number: int) -> int:
    """A number of 64 bits, with a sign, that looks random (splitmix64; Steele, Lea and
    Flood 2014).
    """
    mask = 2**64 - 1
    x = (number + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) - (2**64 if (x ^ x >> 31) >> 63 else 0)
