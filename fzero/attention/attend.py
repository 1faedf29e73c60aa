"""`sparse_attention`: attention over the blocks that a layout keeps; the layout is a
value, the kernel is chosen.

- "sdpa": PyTorch's `scaled_dot_product_attention` with a mask: the reference. It trains
  anywhere, in the time of dense attention.
- "blocks": kept blocks alone (`fzero.attention.blocks`), on any device: time and memory
  fall with the density.
- "flex": FlexAttention, on CUDA. On the CPU PyTorch has no backward for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from fzero.attention.blocks import attend_blocks
from fzero.attention.layouts import Layout, density
from fzero.attention.masks import dense_mask, mask_mod

Backend = Literal["auto", "sdpa", "blocks", "flex"]

BREAK_EVEN = 0.6
"""The density above which SDPA with a mask is not slower than blocks on a CPU:
benchmarks/sparse_attention.py measures it.
"""

FLEX_BLOCK = 128
"""FlexAttention's tile, whatever the block of the layout is: a tile that holds one kept
block costs as much as a full one.
"""


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    block: int,
    causal: bool | None = None,
    key_mask: Tensor | None = None,
    biases: Sequence[Tensor] = (),
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(query · keyᵀ · scale + biases) · value over the blocks that `layout`
    keeps, (B, H, L, D).

    Ranks do not communicate; heads may be divided among ranks (`Layout.of_heads`).

    Args:
        query, key, value: (B, H, L, D) of one dtype, L = N · block for the N blocks of
            the layout.
        layout: for all heads, or with H of its own; every row keeps a block.
        block: tokens of a block.
        causal: whether no token attends to a later one. None is so for a unidirectional
            layout. False keeps all tokens of the blocks on the diagonal, as DeepSpeed
            does.
        key_mask: bool (B, L), False for keys that nobody attends to, such as padding.
        biases: added to the scaled scores, each broadcastable to (B, H, L, L); -inf
            drops a key. A query whose keys are all dropped gets 0.
        scale: None is D^-½.
        backend: the kernel; "auto" is `choose_backend`'s.

    Raises:
        ValueError: shapes or layout do not fit, or the kernel cannot compute this.

    >>> from fzero.attention.patterns import Local
    >>> x = torch.ones(1, 2, 8, 4)
    >>> sparse_attention(x, x, x, Local().layout(4), block=2).shape
    torch.Size([1, 2, 8, 4])
    """
    device = query.device.type
    in_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if in_autocast:  # as for scaled_dot_product_attention
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    _check_shapes(query, key, value, layout, block)
    causal = layout.attention == "unidirectional" if causal is None else causal
    (layout.lower_triangle() if causal else layout).check_rows()
    given = [_four_dims(bias, query, f"biases[{index}]") for index, bias in enumerate(biases)]
    if key_mask is not None:
        given.append(_bias_of_mask(key_mask, query))
    if backend == "auto":
        backend = choose_backend(
            layout,
            device,
            has_biases=bool(given),
            biases_need_grad=any(bias.requires_grad for bias in given),
            in_graph=torch.compiler.is_compiling(),
        )
    run = _KERNELS.get(backend)
    if run is None:
        raise ValueError(
            f"sparse_attention: backend must be one of {', '.join(get_args(Backend))}, got "
            f"{backend!r}"
        )
    if not query.numel():  # an empty batch
        return query + key + value
    with torch.autocast(device, enabled=False) if in_autocast else nullcontext():
        return run(
            query,
            key,
            value,
            layout,
            block,
            causal,
            given,
            query.shape[-1] ** -0.5 if scale is None else scale,
        )


def choose_backend(
    layout: Layout,
    device: str,
    *,
    has_biases: bool = False,
    biases_need_grad: bool = False,
    in_graph: bool = False,
) -> Literal["sdpa", "blocks", "flex"]:
    """The kernel for a layout: a pure function.

    Args:
        device: the type of the device, such as "cpu".
        has_biases: whether biases or a mask of keys are given.
        biases_need_grad: whether a bias is trained, which only the reference does.
        in_graph: whether a graph is captured, which must not hold FlexAttention's mask
            as a tensor of its own.

    >>> from fzero.attention.patterns import Dense, Local
    >>> choose_backend(Local().layout(32), "cpu"), choose_backend(Dense().layout(32), "cpu")
    ('blocks', 'sdpa')
    """
    if biases_need_grad or density(layout) > BREAK_EVEN:
        return "sdpa"
    return "flex" if device == "cuda" and not has_biases and not in_graph else "blocks"


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, layout: Layout, block: int) -> None:
    if query.dim() != 4 or not query.shape == key.shape == value.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(
            f"sparse_attention: query, key and value must have one shape (B, H, L, D), got {shapes}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"sparse_attention: query, key and value must have one dtype, got {query.dtype}, "
            f"{key.dtype}, {value.dtype}; cast them"
        )
    _, heads, length, _ = query.shape
    check_length(length, block)
    if length != layout.num_blocks * block:
        raise ValueError(
            f"sparse_attention: layout must have {length // block} blocks for {length} tokens in "
            f"blocks of {block}, got {layout.num_blocks}; make it for this length, or take "
            f"layout.corner({length // block})"
        )
    if layout.num_heads not in (1, heads):
        raise ValueError(
            f"sparse_attention: layout must be for 1 or all {heads} heads, got {layout.num_heads}; "
            f"make it with heads={heads}, or take layout.of_heads"
        )


def check_length(length: int, block: int) -> None:
    """Raises a ValueError for a length that blocks do not divide."""
    if block < 1 or length % block:
        raise ValueError(
            f"sparse attention: the sequence length must be a multiple of block, {block}, got "
            f"{length}; pad the batch with "
            f"fzero.deepspeed.ops.sparse_attention.SparseAttentionUtils.pad_to_block_size, or "
            f"choose another block"
        )


def _four_dims(bias: Tensor, query: Tensor, name: str) -> Tensor:
    batch, heads, length, _ = query.shape
    shape = (*[1] * (4 - bias.dim()), *bias.shape)
    fits = all(
        size in (1, full) for size, full in zip(shape, (batch, heads, length, length), strict=False)
    )
    if len(shape) != 4 or not fits or shape[3] != length:
        raise ValueError(
            f"sparse_attention: {name} must be broadcastable to (B, H, L, L), "
            f"{(batch, heads, length, length)}, with L keys, got {tuple(bias.shape)}"
        )
    return bias.reshape(shape).to(query.dtype)


def _bias_of_mask(key_mask: Tensor, query: Tensor) -> Tensor:
    """-inf for dropped keys, (B, 1, 1, L)."""
    batch, _, length, _ = query.shape
    if key_mask.dtype != torch.bool or key_mask.shape != (batch, length):
        raise ValueError(
            f"sparse_attention: key_mask must be bool of shape (B, L), {(batch, length)}, got "
            f"{key_mask.dtype} of shape {tuple(key_mask.shape)}; pass attention_mask != 0"
        )
    return torch.zeros_like(key_mask, dtype=query.dtype).masked_fill(~key_mask, float("-inf"))[
        :, None, None
    ]


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    block: int,
    causal: bool,
    biases: list[Tensor],
    scale: float,
) -> Tensor:
    # PyTorch skips the upper half of a causal layout
    if not biases and causal and layout.keeps_triangle:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    mask: Tensor | None = None
    if causal or density(layout) < 1:
        mask = dense_mask(layout, block, causal=causal, device=query.device)
    if biases:
        summed = sum(biases[1:], biases[0])
        mask = summed if mask is None else torch.where(mask, summed, float("-inf"))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    block: int,
    causal: bool,
    biases: list[Tensor],
    scale: float,
) -> Tensor:
    if any(bias.requires_grad for bias in biases):
        raise ValueError(
            "sparse_attention: backend 'blocks' has no gradient for biases, and one requires it; "
            "pass backend='sdpa', or bias.detach()"
        )
    return attend_blocks(query * scale, key, value, layout, causal=causal, biases=biases)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    block: int,
    causal: bool,
    biases: list[Tensor],
    scale: float,
) -> Tensor:
    if biases:
        raise ValueError(
            "sparse_attention: backend 'flex' takes no biases or key_mask, got some; pass "
            "backend='blocks'"
        )
    on_cuda = query.device.type == "cuda"
    if (
        not on_cuda
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in (query, key, value))
    ):
        raise ValueError(
            f"sparse_attention: backend 'flex' needs CUDA for gradients, got tensors on "
            f"{query.device.type!r}, where PyTorch has no backward for it; pass backend='blocks'"
        )
    mask = _block_mask(layout, block, causal, str(query.device))
    run: Callable[..., Any] = _compiled_flex() if on_cuda else flex_attention
    attended: Tensor = run(query, key, value, block_mask=mask, scale=scale)
    return attended


@lru_cache(maxsize=32)
def _block_mask(layout: Layout, block: int, causal: bool, device: str) -> Any:
    length = layout.num_blocks * block
    keeps = mask_mod(layout, block, causal=causal, device=device)
    heads = None if layout.num_heads == 1 else layout.num_heads
    return create_block_mask(
        keeps, None, heads, length, length, device=device, BLOCK_SIZE=FLEX_BLOCK
    )


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


_KERNELS: dict[str, Callable[..., Tensor]] = {"sdpa": _sdpa, "blocks": _blocks, "flex": _flex}
