"""Stochastic rounding of fp32 to bf16, by a hash of the update and the element's index
(Gupta et al. 2015, arXiv:1502.02551).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from fzero.optim.transforms import Rounding


def salts_of(seed: int, num: int) -> list[int]:
    """Numbers that make the random bits of each update and tensor differ from those of
    others.
    """
    return [zlib.crc32(f"{seed}/{index}".encode()) for index in range(num)]


def stochastic(seed: int | Tensor, place: int | Tensor) -> Rounding:
    """Rounds fp32 to bf16 up or down, with probabilities given by the distances to the
    two neighbours.

    The random bits are a hash of `seed` (or of its `salts_of`, an int64 tensor) and of
    the element's index among all parameters, so that all ranks and stages round alike.
    The first element of the tensor has the index `place`. Other pairs of dtypes are
    rounded to the nearest.
    """

    def round_(wide: Tensor, narrow: Tensor, start: int, index: int) -> None:
        if wide.dtype != torch.float32 or narrow.dtype != torch.bfloat16 or not wide.numel():
            narrow.copy_(wide)
            return
        places = torch.arange(start, start + wide.numel(), device=wide.device) + place
        salt = seed[index] if isinstance(seed, Tensor) else zlib.crc32(f"{seed}/{index}".encode())
        noise = hashed(places + salt) & 0xFFFF
        bits = wide.contiguous().view(torch.int32) + noise.to(torch.int32)
        # The mask cuts off the 16 bits that bf16 does not have. Infinities and NaN are not changed.
        narrow.copy_(torch.where(wide.isfinite(), (bits & -0x10000).view(torch.float32), wide))

    return round_


def hashed(x: Tensor) -> Tensor:
    """Random-looking 32 bits of int64 numbers (the finalizer of MurmurHash3)."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
