"""Progressive layer drop (Zhang & He 2020, arXiv:2010.13369): the probability to keep
layers, and which layers are kept.
"""

from __future__ import annotations

import math

from fzero.data.keys import key_of, uniform

__all__ = ["kept_layers", "theta"]


def theta(n: int, *, limit: float = 0.5, gamma: float = 0.001) -> float:
    """θ(n) = (1 − limit) · e^(−gamma · n) + limit, which falls from 1 to `limit`
    (DeepSpeed's `theta`).

    >>> [round(theta(n), 4) for n in (0, 100, 1000, 10000)]
    [1.0, 0.9524, 0.6839, 0.5]
    """
    return (1.0 - limit) * math.exp(-gamma * n) + limit


def kept_layers(seed: int, n: int, num_layers: int, theta: float) -> tuple[bool, ...]:
    """Whether each layer runs in update n: layer i with probability 1 − (i /
    num_layers)(1 − θ), the first one always.

    The choice is a function of its arguments, so that it is the same on all ranks
    without a message, and in a layer that runs again in the backward.

    >>> kept_layers(seed=1, n=3, num_layers=6, theta=1.0)
    (True, True, True, True, True, True)
    >>> kept_layers(seed=1, n=3, num_layers=6, theta=0.0)[0]
    True
    """
    chances = (1.0 - layer / num_layers * (1.0 - theta) for layer in range(num_layers))
    return tuple(
        uniform(int(key_of(seed, n, layer))) < chance for layer, chance in enumerate(chances)
    )
