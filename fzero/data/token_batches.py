"""Batches of as many samples as their tokens allow, and learning rates that follow the
number of samples (DeepSpeed's `dynamic_batching`; the rates are those of Goyal et al.
2017, arXiv:1706.02677, and of Krizhevsky 2014, arXiv:1404.5997)."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["TokenBatch", "batches_by_tokens", "scaled_rate"]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The samples of one update: of each micro-batch of each rank.

    Attributes:
        parts: the samples of each micro-batch.
        longest: the length of the longest sample.
    """

    parts: tuple[tuple[int, ...], ...]
    longest: int

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.parts))


def batches_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    num_parts: int = 1,
    min_size: int = 1,
    max_size: int | None = None,
    order: Literal["dataloader", "random", "seqlen"] = "dataloader",
    same_size: bool = False,
    samples: Sequence[int] | None = None,
    seed: int | None = None,
) -> list[TokenBatch]:
    """Fills micro-batches, one after the other, with samples while their tokens are at
    most `max_tokens`.

    Samples at the end that do not fill a batch of all parts are left out. (DeepSpeed
    0.19 leaves out the last sample always.)

    Args:
        lengths: tokens of each sample.
        num_parts: micro-batches of a batch, on all ranks together.
        min_size, max_size: the fewest and the most samples of a micro-batch.
        order: that of the samples: as they are, shuffled by `seed`, or by length.
        same_size: whether all micro-batches of a batch have equally many samples, which
            they take in turns.
        samples: the samples to use, in this order; None uses all.

    Raises:
        ValueError: no batch can be filled, or a micro-batch of `min_size` samples has
            too many tokens.

    >>> [batch.parts for batch in batches_by_tokens([3, 3, 5, 1, 1, 6], 6)]
    [((0, 1),), ((2, 3),), ((4,),), ((5,),)]
    """
    found = [
        (lengths[index], index) for index in (range(len(lengths)) if samples is None else samples)
    ]
    if order == "random":
        random.Random(seed).shuffle(found)
    elif order == "seqlen":
        found.sort()
    fitting = [(length, index) for length, index in found if length <= max_tokens]
    if len(fitting) < len(found):
        warnings.warn(
            f"batches_by_tokens: {len(found) - len(fitting)} of {len(found)} samples are longer "
            f"than max_tokens {max_tokens} and are left out; raise max_tokens, or cut them",
            stacklevel=2,
        )
    together = num_parts if same_size else 1
    parts: list[list[tuple[int, int]]] = []
    start = 0
    while start < len(fitting):
        stop = _stop(fitting, start, together, max_tokens, max_size)
        size = (stop - start) // together
        if size < min_size:
            if start + together * min_size > len(fitting):
                break  # the samples left do not fill a batch
            raise ValueError(
                f"batches_by_tokens: micro-batches of min_size {min_size} must fit in max_tokens "
                f"{max_tokens}, and from sample {fitting[start][1]} on they do not; lower "
                f"min_batch_size, or raise max_tokens"
            )
        parts += [fitting[start + part : stop : together] for part in range(together)]
        start = stop
    if len(parts) < num_parts:
        raise ValueError(
            f"batches_by_tokens: must fill a batch of {num_parts} micro-batches, and fill "
            f"{len(parts)}; give more samples, or lower train_batch_size"
        )
    groups = (
        parts[i : i + num_parts] for i in range(0, len(parts) - len(parts) % num_parts, num_parts)
    )
    return [
        TokenBatch(
            tuple(tuple(index for _, index in part) for part in group),
            max(n for part in group for n, _ in part),
        )
        for group in groups
    ]


def _stop(
    found: Sequence[tuple[int, int]],
    start: int,
    together: int,
    max_tokens: int,
    max_size: int | None,
) -> int:
    """The end of the longest run of samples that `together` micro-batches can take in
    turns.
    """
    stop, tokens = start, [0] * together
    while stop + together <= len(found) and (
        max_size is None or (stop - start) // together < max_size
    ):
        more = [before + found[stop + part][0] for part, before in enumerate(tokens)]
        if max(more) > max_tokens:
            break
        stop, tokens = stop + together, more
    return stop


def scaled_rate(
    base_size: int, size: int, rate: float = 1.0, method: str | None = "linear"
) -> float:
    """The learning rate of a batch of `size` samples, from that of `base_size`: times
    their ratio, its root, or as it is.

    >>> scaled_rate(8, 16, 0.1), scaled_rate(4, 16, 0.1, "sqrt"), scaled_rate(8, 16, 0.1, "none")
    (0.2, 0.2, 0.1)
    """
    if method == "linear":
        return rate * size / base_size
    if method == "sqrt":
        return rate * math.sqrt(size / base_size)
    if method is None or method.lower() == "none":
        return rate
    raise ValueError(
        f"lr_scaling_method: must be 'linear', 'sqrt' or 'none', got {method!r}; pass one of these"
    )
