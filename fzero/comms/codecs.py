"""Codecs: flat tensors written in fewer bytes, with a bound on the error.

A codec is a pair of pure functions, `encode` and `decode`. It works along the last
dimension and keeps leading ones (ranks, rows). The number of bytes depends only on the
number of elements, so every rank knows how many bytes arrive.

Shape letters: N elements, B bytes that are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from sharding.dtypes import itemsize
from sharding.views import torch_dtype

FLOATS = ("float64", "float32", "float16", "bfloat16")


def no_bound(x: Tensor) -> Tensor:
    """The bound of a codec about whose error nothing is known: infinity."""
    return torch.full_like(x, torch.inf, dtype=torch.float64)


class Codec(NamedTuple):
    """A way to write numbers as bytes.

    Attributes:
        name: shown in tables.
        nbytes: B for N elements.
        encode: (…, N) of any floating dtype → (…, B) uint8.
        decode: (…, B) uint8, N and a dtype → (…, N) of that dtype.
        bound: (…, N) → (…, N) float64, the largest distance of each element from the
            decoded one (in fp32 or wider). Tests compare errors with it; no step reads
            it. Leave it out where no bound is known.
    """

    name: str
    nbytes: Callable[[int], int]
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int, torch.dtype], Tensor]
    bound: Callable[[Tensor], Tensor] = no_bound


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory, read along the last dimension as another dtype."""
    if torch.__version__ < "2.13" and is_batchedtensor(x):
        return _Bits.apply(x, dtype)  # type: ignore[no-untyped-call, no-any-return]
    if not x.numel():
        return x.new_empty((*x.shape[:-1], 0), dtype=dtype)
    # `x` or its rows may start at an address that the wider dtype does not allow
    if dtype.itemsize > x.element_size():
        return x.clone(memory_format=torch.contiguous_format).view(dtype)
    return x.contiguous().view(dtype)


class _Bits(torch.autograd.Function):
    """`_bits` inside of `torch.vmap`, which has no rule for it before PyTorch 2.13."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return _bits(x, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], x: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        return _bits(x.movedim(in_dims[0], 0), dtype), 0


def cast(dtype: str) -> Codec:
    """Sends numbers as `dtype`, rounded to the nearest.

    >>> halved = cast("bfloat16")
    >>> halved.nbytes(3), halved.decode(halved.encode(torch.tensor([1.0, 1 / 3])), 2, torch.float32)
    (6, tensor([1.0000, 0.3340]))
    """
    if dtype not in FLOATS:
        raise ValueError(
            f"cast: dtype must be one of {', '.join(FLOATS)}, got {dtype!r}; pass one of these"
        )
    narrow = torch_dtype(dtype)

    def encode(x: Tensor) -> Tensor:
        return _bits(x.to(narrow), torch.uint8)

    def decode(encoded: Tensor, numel: int, wide: torch.dtype) -> Tensor:
        return _bits(encoded, narrow)[..., :numel].to(wide)

    def bound(x: Tensor) -> Tensor:
        info = torch.finfo(narrow)
        near = x.double().abs() * (info.eps / 2) + info.smallest_normal * info.eps / 2
        return torch.where(x.double().abs() > info.max, torch.inf, near)

    return Codec(f"cast({dtype})", lambda numel: numel * itemsize(dtype), encode, decode, bound)


def quantize(bits: Literal[4, 8] = 8, block: int = 256) -> Codec:
    """Sends each element as a signed integer of `bits`, to be multiplied by its block's
    scale (ZeRO++ §4.1, §4.3).

    The scale is fp32: the largest magnitude in the block / (2^(bits-1) - 1). A block
    that is not finite (in fp32) is decoded as NaN, so that all ranks see an overflow; a
    finite block is decoded as finite numbers.

    Args:
        bits: 8, or 4 (two to a byte).
        block: elements that share a scale; the last block may be shorter.

    >>> eighth = quantize(8, block=4)
    >>> eighth.nbytes(6)
    14
    >>> eighth.decode(
    ...     eighth.encode(torch.tensor([127.0, -3.2, 0.0, 50.7, 1.0, 0.5])), 6, torch.float32
    ... )
    tensor([127.0000,  -3.0000,   0.0000,  51.0000,   1.0000,   0.5039])
    """
    if isinstance(bits, float) or bits not in (4, 8):
        raise ValueError(f"quantize: bits must be 4 or 8, got {bits!r}; pass one of these")
    if isinstance(block, bool) or not isinstance(block, int) or block < 2 or block % 2:
        raise ValueError(
            f"quantize: block must be an even number of elements, got {block!r}; 256 say"
        )
    most = 2 ** (bits - 1) - 1
    # most · steepest is finite, however it rounds
    steepest = torch.finfo(torch.float32).max / most * (1 - 2**-22)

    def num_blocks(numel: int) -> int:
        return -(-numel // block)

    def length(numel: int) -> int:
        """Bytes of the integers, without the scales."""
        return -(-numel * bits // 8)

    def scales_of(x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers in blocks (…, blocks, block), and the scale of each block (…,
        blocks, 1).
        """
        wide = torch.nn.functional.pad(
            x.float(), (0, num_blocks(x.shape[-1]) * block - x.shape[-1])
        )
        blocks = rearrange(wide, "... (blocks block) -> ... blocks block", block=block)
        scales = blocks.abs().amax(-1, keepdim=True) / most
        return blocks, torch.where(scales.isfinite(), scales.clamp(max=steepest), scales)

    def encode(x: Tensor) -> Tensor:
        blocks, scales = scales_of(x)
        rounded = torch.where(scales > 0, blocks / scales, 0.0).round().nan_to_num(0.0)
        integers = rounded.clamp(-most, most).to(torch.int8)
        codes = _bits(rearrange(integers, "... blocks block -> ... (blocks block)"), torch.uint8)
        if bits == 4:
            low, high = codes[..., ::2], codes[..., 1::2]
            codes = (low & 0xF) | ((high & 0xF) << 4)
        return torch.cat(
            [codes[..., : length(x.shape[-1])], _bits(scales.squeeze(-1), torch.uint8)], dim=-1
        )

    def decode(encoded: Tensor, numel: int, wide: torch.dtype) -> Tensor:
        codes, scales = (
            encoded[..., : length(numel)],
            _bits(encoded[..., length(numel) :], torch.float32),
        )
        codes = torch.nn.functional.pad(
            codes, (0, length(num_blocks(numel) * block) - length(numel))
        )
        if bits == 4:
            codes = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
            integers = ((codes ^ 0x8).to(torch.int8) - 8).float()  # two's complement in four bits
        else:
            integers = _bits(codes, torch.int8).float()
        blocks = (
            rearrange(integers, "... (blocks block) -> ... blocks block", block=block)
            * scales[..., None]
        )
        flat: Tensor = rearrange(blocks, "... blocks block -> ... (blocks block)")
        return flat[..., :numel].to(wide)

    def bound(x: Tensor) -> Tensor:
        blocks, scales = scales_of(x)
        # Half a rounding step, and the fp32 rounding errors of the quotient, the scale and the
        # product.
        largest = (scales.double() * (0.5 + 4 * most * 2**-24) + 2**-140).expand_as(blocks)
        bounds: Tensor = rearrange(largest, "... blocks block -> ... (blocks block)")
        return bounds[..., : x.shape[-1]]

    return Codec(
        f"quantize({bits}, {block})",
        lambda numel: length(numel) + 4 * num_blocks(numel),
        encode,
        decode,
        bound,
    )
