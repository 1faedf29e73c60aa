"""Sparse attention in BERT and RoBERTa of transformers: `SparseAttentionUtils` and its
functions, with DeepSpeed's names.

Change the model before a step or engine is made of it. Parameters keep their names, so
checkpoints of the dense model fit.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fzero.attention.attend import Backend
from fzero.deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from fzero.deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig

MASKS = "fzero_sparse"
"""The attention implementation of transformers whose mask is that of the keys alone,
(B, L), instead of (B, 1, L, L).
"""


class _SelfAttention(nn.Module):
    """Queries, keys and values of a BERT layer, and sparse attention; without dropout
    of probabilities, as in DeepSpeed.

    Args:
        config: BERT's configuration.
        sparsity_config: see `SparseSelfAttention`; None is `FixedSparsityConfig` with
            the configuration's heads.
        max_seq_length: the longest sequence; None is that of the positions.
        more: `layer`, `causal`, `backend` and the mode of the mask, as
            `SparseSelfAttention` takes them.

    Raises:
        ValueError: heads do not fit.
    """

    def __init__(
        self,
        config: Any,
        sparsity_config: Any = None,
        *,
        max_seq_length: int | None = None,
        layer: int = 0,
        backend: Backend = "auto",
        **more: Any,
    ) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.hidden_size
        sparsity = (
            FixedSparsityConfig(num_heads=heads) if sparsity_config is None else sparsity_config
        )
        if width % heads:
            raise ValueError(
                f"BertSparseSelfAttention: num_attention_heads must divide hidden_size, {width}, "
                f"got {heads}"
            )
        if sparsity.num_heads != heads:
            raise ValueError(
                f"BertSparseSelfAttention: sparsity_config.num_heads must be the model's {heads}, "
                f"got {sparsity.num_heads}"
            )
        self.num_attention_heads, self.attention_head_size, self.all_head_size = (
            heads,
            width // heads,
            width,
        )
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        longest = (
            max_seq_length
            or max(config.max_position_embeddings // sparsity.block, 1) * sparsity.block
        )
        self.sparse_self_attention = SparseSelfAttention(
            sparsity, max_seq_length=longest, layer=layer, backend=backend, **more
        )

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """(B, L, H · D) as (B, H, L, D)."""
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).transpose(
            1, 2
        )

    def context(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The context, (B, L, H · D); the mask is `SparseSelfAttention`'s
        `key_padding_mask`.
        """
        parts = [
            self.transpose_for_scores(of(hidden_states))
            for of in (self.query, self.key, self.value)
        ]
        context: Tensor = self.sparse_self_attention(*parts, key_padding_mask=attention_mask)
        return context.transpose(1, 2).flatten(-2)


class BertSparseSelfAttention(_SelfAttention):
    __doc__ = _SelfAttention.__doc__

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.context(hidden_states, attention_mask)


class LayerSelfAttention(_SelfAttention):
    """The same in a layer of transformers 5, whose mask of keys is bool, (B, L), and
    which wants probabilities, too: None.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        if past_key_values is not None:
            raise ValueError(
                "sparse attention: has no cache of keys, and past_key_values is given; pass "
                "use_cache=False"
            )
        return self.context(hidden_states, attention_mask), None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _register_masks()  # in the process that the model was sent to


def replace_model_self_attention_with_sparse_self_attention(
    model: nn.Module, max_position: int, sparsity_config: Any = None, *, backend: Backend = "auto"
) -> nn.Module:
    """The model itself, with sparse attention in every layer of its encoder. Random
    blocks differ from layer to layer.

    Args:
        model: a BERT or RoBERTa of transformers, with any head.
        max_position: the longest sequence, a multiple of the block; see
            `extend_position_embedding`.
        sparsity_config: None is `FixedSparsityConfig` with the model's heads.
        backend: see `sparse_attention`.

    Raises:
        ValueError: the model is another one or a decoder, or the heads or the length do
            not fit.
    """
    base, first = _base_of(model, "replace_model_self_attention_with_sparse_self_attention")
    replace_self_attention_layer_with_sparse_self_attention_layer(
        base.config, base.encoder.layer, sparsity_config, max_position=max_position, backend=backend
    )
    base.config.max_position_embeddings = max_position + first
    _register_masks()
    base.config = copy(base.config)  # other models may be made of the one that was given
    base.config._attn_implementation = MASKS
    return model


def replace_self_attention_layer_with_sparse_self_attention_layer(
    config: Any,
    layers: Any,
    sparsity_config: Any = None,
    *,
    max_position: int | None = None,
    backend: Backend = "auto",
) -> Any:
    """The layers themselves, with sparse attention that has their queries, keys and
    values.
    """
    for index, layer in enumerate(layers):
        old = layer.attention.self
        with torch.device("meta"):  # no new memory: it gets the old module's parameters
            made = LayerSelfAttention(
                config,
                sparsity_config,
                max_seq_length=max_position,
                layer=index,
                backend=backend,
                key_padding_mask_mode="mul",
            )
        made.query, made.key, made.value = old.query, old.key, old.value
        layer.attention.self = made.train(old.training)
    return layers


def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
    """The model itself, with its positions repeated up to `max_position`; RoBERTa's
    first two rows are kept.

    Raises:
        ValueError: the model is another one, or has as many positions already.
    """
    base, first = _base_of(model, "extend_position_embedding")
    table = base.embeddings.position_embeddings
    old = table.weight.detach()
    if not old.numel():
        raise ValueError(
            "extend_position_embedding: model must have its values, and is divided over the ranks "
            "(zero.Init); call it inside `with "
            "deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0)`"
        )
    if max_position <= len(old) - first:
        raise ValueError(
            f"extend_position_embedding: max_position must be above the model's {len(old) - first} "
            f"positions, got {max_position}"
        )
    rows = first + torch.arange(max_position, device=old.device) % (len(old) - first)
    weight = torch.cat([old[:first], old[rows]])
    table.weight, table.num_embeddings = (
        nn.Parameter(weight, requires_grad=table.weight.requires_grad),
        len(weight),
    )
    ids = torch.arange(len(weight), device=old.device).expand(1, -1)
    base.embeddings.position_ids, base.embeddings.token_type_ids = ids, torch.zeros_like(ids)
    base.config.max_position_embeddings = len(weight)
    return model


def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
    """The tokenizer itself, which takes up to `max_position` tokens."""
    tokenizer.model_max_length = tokenizer.init_kwargs["model_max_length"] = max_position
    return tokenizer


def pad_to_block_size(
    block_size: int,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    pad_token_id: int,
    model_embeddings: Any = None,
) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """A batch whose length is a multiple of the block.

    Args:
        block_size: that of the layout.
        input_ids, attention_mask, token_type_ids, position_ids: (B, L) each, or None,
            which stays None; but where the batch is padded without a mask, one is made.
        inputs_embeds: (B, L, width) or None; `model_embeddings` makes its padding of
            ids.
        pad_token_id: the padding of ids and positions.

    Returns:
        The number of new tokens, and the five tensors in this order. Cut the result
        with `unpad_sequence_output`.

    >>> added, ids, mask, *_ = pad_to_block_size(
    ...     4, torch.ones(1, 3, dtype=torch.int64), None, None, None, None, 0
    ... )
    >>> added, ids.tolist(), mask.tolist()
    (1, [[1, 1, 1, 0]], [[1, 1, 1, 0]])
    """
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None:
        raise ValueError("pad_to_block_size: needs input_ids or inputs_embeds, got neither")
    batch, length = given.shape[:2]
    more = -length % block_size
    if not more:
        return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
    if attention_mask is None:
        attention_mask = given.new_ones((batch, length), dtype=torch.int64)
    if inputs_embeds is not None:
        if model_embeddings is None:
            raise ValueError(
                "pad_to_block_size: inputs_embeds are padded with model_embeddings, got None; pass "
                "the embeddings"
            )
        ids = torch.full(
            (batch, more), pad_token_id, dtype=torch.int64, device=inputs_embeds.device
        )
        inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids)], 1)
    values = (
        (input_ids, pad_token_id),
        (attention_mask, 0),
        (token_type_ids, 0),
        (position_ids, pad_token_id),
    )
    padded = [x if x is None else pad(x, (0, more), value=value) for x, value in values]
    return more, padded[0], padded[1], padded[2], padded[3], inputs_embeds


def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
    """(B, L, …) without the last `pad_len` tokens."""
    return sequence_output[:, : sequence_output.shape[1] - pad_len]


class SparseAttentionUtils:
    """The functions of this module, under DeepSpeed's name."""

    extend_position_embedding = staticmethod(extend_position_embedding)
    update_tokenizer_model_max_length = staticmethod(update_tokenizer_model_max_length)
    replace_model_self_attention_with_sparse_self_attention = staticmethod(
        replace_model_self_attention_with_sparse_self_attention
    )
    replace_self_attention_layer_with_sparse_self_attention_layer = staticmethod(
        replace_self_attention_layer_with_sparse_self_attention_layer
    )
    pad_to_block_size = staticmethod(pad_to_block_size)
    unpad_sequence_output = staticmethod(unpad_sequence_output)


def _base_of(model: nn.Module, function: str) -> tuple[Any, int]:
    """The BERT or RoBERTa inside a model, and its first position: 0, or the one behind
    RoBERTa's padding.
    """
    for name in ("bert", "roberta"):
        own = getattr(getattr(model, "config", None), "model_type", "") == name and hasattr(
            model, "encoder"
        )
        base: Any = getattr(model, name, model if own else None)
        if base is None:
            continue
        if base.config.is_decoder:
            raise ValueError(
                f"{function}: model must be an encoder, and its config.is_decoder is set; pass "
                f"is_decoder=False"
            )
        padding = base.embeddings.position_embeddings.padding_idx
        return base, 0 if padding is None else padding + 1
    raise ValueError(
        f"{function}: model must be a BERT or RoBERTa of transformers, got {type(model).__name__}; "
        f"use SparseSelfAttention in the model's own attention"
    )


def _register_masks() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(MASKS, mask_of_keys)


def mask_of_keys(*sizes: Any, attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:
    """The mask that the layers get: the batch's own, bool (B, L), or None."""
    return attention_mask
