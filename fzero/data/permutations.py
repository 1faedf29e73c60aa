"""`permuted`: a permutation of 0 … N−1 as a pure function of a key and a place, without
memory of N elements.

A Feistel network of keyed rounds is a bijection of 2h bits; a result outside 0 … N−1
goes through it again (Black & Rogaway 2002, cycle walking), at most four times on
average. So a sampler can begin at any place of an epoch of any size at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fzero.data.keys import key_of

__all__ = ["permuted"]

_ROUNDS = 6


def permuted(places: NDArray[np.integer], num: int, *key: int) -> NDArray[np.int64]:
    """The elements at some places of a permutation of `range(num)`, which is a function
    of the key.

    >>> sorted(permuted(np.arange(10), 10, 1234, 0).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = max(1, (max(num - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    rounds = [np.uint64(key_of(*key, number)) for number in range(_ROUNDS)]
    found = np.asarray(places).astype(np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        left, right = found[outside] >> np.uint64(half), found[outside] & mask
        for round_key in rounds:
            left, right = right, left ^ (_mixed(right ^ round_key) & mask)
        found[outside] = (left << np.uint64(half)) | right
        outside = found >= num
    return found.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits of each element (splitmix64)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
