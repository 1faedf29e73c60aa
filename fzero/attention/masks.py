"""A layout as tensors: blocks, a mask of tokens, and FlexAttention's function of
indices. H is 1 for one layout for all heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fzero.attention.layouts import Attention, Layout

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of the indices of batch, head, query and key: whether the query attends to
the key (FlexAttention's mask_mod).
"""


def to_tensor(layout: Layout, *, device: torch.device | str = "cpu") -> Tensor:
    """The blocks of a layout, bool (H, N, N).

    >>> to_tensor(Layout(((0b01, 0b11),))).int().tolist()
    [[[1, 0], [1, 1]]]
    """
    pictures = [layout.picture(head).replace("\n", "") for head in range(layout.num_heads)]
    kept = torch.tensor([*"".join(pictures).encode()], dtype=torch.uint8, device=device) == ord("#")
    return kept.view(layout.num_heads, layout.num_blocks, layout.num_blocks)


def from_tensor(blocks_HNN: Tensor, attention: Attention = "bidirectional") -> Layout:
    """The layout of a tensor (H, N, N), as DeepSpeed's `make_layout` returns it; heads
    that are all alike become one.

    Raises:
        ValueError: the tensor has another shape.

    >>> from_tensor(torch.ones(4, 2, 2).tril()).rows
    ((1, 3),)
    """
    if blocks_HNN.dim() != 3 or blocks_HNN.shape[1] != blocks_HNN.shape[2]:
        raise ValueError(
            f"layout: a tensor must have the shape (heads, blocks, blocks), got "
            f"{tuple(blocks_HNN.shape)}"
        )
    lines = [
        ["".join("01"[bit] for bit in reversed(row)) for row in head]
        for head in (blocks_HNN != 0).int().tolist()
    ]
    rows = tuple(tuple(int(line, 2) for line in head) for head in lines)
    return Layout(rows[:1] if len({*rows}) == 1 else rows, attention)


def dense_mask(
    layout: Layout, block: int, *, causal: bool = False, device: torch.device | str = "cpu"
) -> Tensor:
    """Which tokens attend to which, bool (1, H, L, L), for
    `scaled_dot_product_attention`.

    Args:
        block: tokens of a block; L is N times as many.
        causal: whether no token attends to a later one, inside the blocks of the
            diagonal, too.
    """
    mask = to_tensor(layout, device=device).repeat_interleave(block, 1).repeat_interleave(block, 2)
    return (mask.tril() if causal else mask).unsqueeze(0)


def mask_mod(
    layout: Layout, block: int, *, causal: bool = False, device: torch.device | str = "cpu"
) -> MaskMod:
    """The same as a function of indices, for
    `torch.nn.attention.flex_attention.create_block_mask`.
    """
    blocks_HNN = to_tensor(layout, device=device)
    is_shared = layout.num_heads == 1

    def keeps(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        kept = blocks_HNN[0 if is_shared else head, query // block, key // block]
        return kept & (key <= query) if causal else kept

    return keeps
