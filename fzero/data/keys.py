"""Random numbers from a key: a pure function of integers, with the same bits on every
device, in eager and in captured code.

A key is a list of integers such as (seed, n, layer). Each is mixed into 32 bits by
multiplications and shifts; products stay below 2^63, so that int64 tensors never
overflow and the function needs no generator, no state and no agreement between ranks.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", int, Tensor, int | Tensor)

_BITS = 0xFFFF_FFFF


def mixed(x: Number) -> Number:
    """32 random bits of the 32 lowest bits of an integer or of each element of an int64
    tensor: a bijection.

    >>> mixed(0), mixed(1), mixed(2)
    (0, 3979630085, 65356255)
    """
    x = x & _BITS
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _BITS
    x = ((x ^ (x >> 12)) * 0x297A2D39) & _BITS
    return x ^ (x >> 15)


def key_of(*parts: int | Tensor) -> int | Tensor:
    """32 bits of a list of integers, each of any size; a tensor if one of them is a 0-d
    int64 tensor.

    >>> key_of(1234, 0, 1) == key_of(1234, 1, 0)
    False
    """
    key: int | Tensor = 0x9E3779B9
    for part in parts:
        for word in (part, part >> 32):
            key = mixed(mixed(key + (word & _BITS)) + 0x7F4A7C15)
    return key


def uniform(key: int) -> float:
    """A number in [0, 1) of 32 bits.

    >>> 0 <= uniform(key_of(7)) < 1
    True
    """
    return mixed(key) / 2**32
