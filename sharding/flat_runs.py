"""Boxes of an n-dimensional tensor that together are the elements [start, stop) of its
flattened form.

A shard may end anywhere in a parameter, but files of chunks store boxes only: a first
index and a length along each dimension. A flat run consists of the rest of its first
row, full rows, and the beginning of its last row; the same holds for rows of rows. That
is at most 2·ndim - 1 boxes. Each is contiguous, so that its elements in the run are a
view of its shape.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sharding.checks import check_at_least, check_shape


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: its first index `offsets`, and its `sizes`. It begins at
    element `start` of the flattened tensor.

    >>> Box(offsets=(1, 0), sizes=(2, 3), start=3).numel
    6
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """The elements of the box."""
        return math.prod(self.sizes)


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The elements [start, stop) of a flattened tensor as boxes of the tensor, in
    order; no box for no elements.

    >>> for box in boxes(2, 11, (4, 3)):
    ...     print(box)
    Box(offsets=(0, 2), sizes=(1, 1), start=2)
    Box(offsets=(1, 0), sizes=(2, 3), start=3)
    Box(offsets=(3, 0), sizes=(1, 2), start=9)
    >>> list(boxes(0, 1, ()))
    [Box(offsets=(), sizes=(), start=0)]
    """
    check_shape("boxes", "shape", shape)
    check_at_least("boxes", "start", start, 0)
    check_at_least("boxes", "stop", stop, start)
    if stop > math.prod(shape):
        raise ValueError(
            f"boxes: stop must be at most the {math.prod(shape)} elements of shape {shape}, got "
            f"{stop}"
        )
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while start < stop:
        box = _first_box(start, stop, shape, strides)
        yield box
        start += box.numel


def _first_box(start: int, stop: int, shape: tuple[int, ...], strides: list[int]) -> Box:
    """The largest box that begins at `start`: as many slices as fit, along the first
    dimension of which one fits.
    """
    offsets = tuple(start // stride % size for stride, size in zip(strides, shape))
    for dim, stride in enumerate(strides):
        if start % stride == 0 and stop - start >= stride:
            count = min((stop - start) // stride, shape[dim] - offsets[dim])
            return Box(offsets, (1,) * dim + (count,) + shape[dim + 1 :], start)
    return Box((), (), start)  # a tensor without dimensions
