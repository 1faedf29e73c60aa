"""`SparseSelfAttention`: sparse attention as a module without parameters, with
DeepSpeed's name and arguments.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fzero.attention.attend import Backend, check_length, sparse_attention
from fzero.attention.layouts import Layout
from fzero.attention.masks import from_tensor
from fzero.deepspeed.ops.sparse_attention.sparsity_config import layout_of, tensor_of

Mode = Literal["add", "mul"]
"""How a mask works: it is added to the scores, or drops keys where it is 0."""


class SparseSelfAttention(nn.Module):
    """Attention over the blocks that a `SparsityConfig` keeps, in any dtype and on any
    device.

    Args:
        sparsity_config: makes the layout; any object with `block`, `num_heads` and
            `make_layout`.
        key_padding_mask_mode, attn_mask_mode: see `Mode`.
        max_seq_length: the layout is made for this length; shorter sequences have its
            first rows and columns.
        layer: its number; random blocks differ from layer to layer.
        causal: whether no token attends to a later one. False is DeepSpeed's rule: the
            blocks alone decide.
        backend: see `sparse_attention`.

    Raises:
        ValueError: a mode is unknown, or the block does not divide `max_seq_length`.
    """

    def __init__(
        self,
        sparsity_config: Any,
        key_padding_mask_mode: Mode = "add",
        attn_mask_mode: Mode = "mul",
        max_seq_length: int = 2048,
        *,
        layer: int = 0,
        causal: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        for name, mode in (
            ("key_padding_mask_mode", key_padding_mask_mode),
            ("attn_mask_mode", attn_mask_mode),
        ):
            if mode not in ("add", "mul"):
                raise ValueError(
                    f"SparseSelfAttention: {name} must be 'add' or 'mul', got {mode!r}"
                )
        self.sparsity_config, self.causal, self.backend = sparsity_config, causal, backend
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.max_seq_length = max_seq_length
        self.layout: Layout = layout_of(sparsity_config, max_seq_length, layer=layer)
        self.register_load_state_dict_pre_hook(take_master_layout)  # type: ignore[no-untyped-call]

    @property
    def master_layout(self) -> Tensor:
        """The layout of the longest sequence, int64 (heads, N, N)."""
        return tensor_of(self.layout, self.sparsity_config.num_heads)

    def get_layout(self, L: int) -> Tensor:
        """The layout of a sequence of L tokens, int64 (heads, N, N)."""
        return tensor_of(self.layout_for(L), self.sparsity_config.num_heads)

    def layout_for(self, length: int) -> Layout:
        """The layout of a sequence of this length, as a value.

        Raises:
            ValueError: the block does not divide the length, or it is above
                `max_seq_length`.
        """
        check_length(length, self.sparsity_config.block)
        if length > self.max_seq_length:
            raise ValueError(
                f"SparseSelfAttention: a sequence must have at most max_seq_length tokens, "
                f"{self.max_seq_length}, got {length}; pass "
                f"SparseSelfAttention(max_seq_length={length})"
            )
        return self.layout.corner(length // self.sparsity_config.block)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention with scale D^-½, (B, H, L, D).

        Args:
            query, key, value: (B, H, L, D); the key may be transposed, (B, H, D, L).
            rpe: added to the scores, broadcastable to (B, H, L, L): relative positions.
            key_padding_mask: (B, L) or (B, 1, 1, L); see `key_padding_mask_mode`.
            attn_mask: (L, L); see `attn_mask_mode`.

        Raises:
            ValueError: shapes, modes or lengths do not fit.
        """
        batch, _, length, _ = query.shape
        if key.shape[2] != length:
            key = key.transpose(2, 3)
        biases, key_mask = [] if rpe is None else [rpe], None
        if key_padding_mask is not None:
            mask = _of_shape(
                key_padding_mask, (batch, length), "key_padding_mask", "(B, L) or (B, 1, 1, L)"
            )
            if self.key_padding_mask_mode == "mul":
                key_mask = mask != 0
            else:
                biases.append(_added(mask, "key_padding_mask")[:, None, None])
        if attn_mask is not None:
            mask = _of_shape(attn_mask, (length, length), "attn_mask", "(L, L)")
            if self.attn_mask_mode == "mul":
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
                    mask == 0, float("-inf")
                )
            biases.append(_added(mask, "attn_mask"))
        layout = self.layout_for(length)
        if layout.attention == "unidirectional" and attn_mask is None and not self.causal:
            warnings.warn(
                "SparseSelfAttention: a unidirectional layout is causal by blocks only, as in "
                "DeepSpeed: a token sees the later ones of its block; pass causal=True, or an "
                "attn_mask",
                stacklevel=2,
            )
        return sparse_attention(
            query,
            key,
            value,
            layout,
            block=self.sparsity_config.block,
            causal=self.causal,
            key_mask=key_mask,
            biases=biases,
            backend=self.backend,
        )


def take_master_layout(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Takes the layout from a state dict of DeepSpeed, which stores it as a tensor;
    fzero stores none.
    """
    blocks = state.pop(f"{prefix}master_layout", None)
    if blocks is not None:
        assert isinstance(module, SparseSelfAttention)
        module.layout = from_tensor(blocks, module.layout.attention)
        module.max_seq_length = module.layout.num_blocks * module.sparsity_config.block


def _of_shape(mask: Tensor, shape: tuple[int, int], name: str, words: str) -> Tensor:
    squeezed = (
        mask.reshape(shape)
        if mask.numel() == shape[0] * shape[1] and mask.shape[-1] == shape[1]
        else mask
    )
    if squeezed.shape != shape:
        raise ValueError(
            f"SparseSelfAttention: {name} must have the shape {words}, {shape}, got "
            f"{tuple(mask.shape)}"
        )
    return squeezed


def _added(mask: Tensor, name: str) -> Tensor:
    if not mask.is_floating_point():
        raise ValueError(
            f"SparseSelfAttention: {name} is added to the scores, so it must be floating, got "
            f"{mask.dtype}; pass {name}_mode='mul', or (1 - mask) * -10000.0"
        )
    return mask
