"""`Swapping`: finds the calls of attention in a model, and makes them attend over the
tokens of all ranks (`fzero.sequence.exchange`).

It sees `F.scaled_dot_product_attention`, `nn.MultiheadAttention`, and transformers'
"sdpa". Masks of transformers are made for the whole sequence by the registered function
of `register`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fzero.common.optional import package
from fzero.sequence.exchange import Numbered, attend, number_of
from fzero.sequence.parts import Part

_NATIVE = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)


@dataclass
class Now:
    """The forward that runs, or whose backward runs.

    Attributes:
        part: the part of the batch; None where the caller has divided it.
        is_running: whether the loss function runs.
        packs: whether a model of transformers keeps several sequences in a row apart: it
            does so without a cache.
    """

    part: Part | None = None
    is_running: bool = False
    packs: bool = True
    length: int | None = None
    """The tokens of the whole sequence of `part`: a number that a compiled block reads."""

    def begin(self, part: Part | None) -> None:
        """A forward with this part begins."""
        self.part, self.length = part, None if part is None else part.length


class Swapping(TorchFunctionMode):
    """While it is active, attention is over the tokens of all ranks.

    Args:
        axis: the ranks that share tokens.
        now: the forward that runs.
        may_count: whether the model may count its own tokens (`torch.arange`).
    """

    def __init__(self, axis: Any, now: Now, *, may_count: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axis, self.now, self._may_count = axis, now, may_count
        self._size, self._rank, self._number = axis.size, axis.rank, number_of(axis)

    @property
    def part(self) -> Part | None:
        return self.now.part

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _multi_head(self._attend, *args, **kwargs)
        if func is torch.arange and not self._may_count:
            self._check_count(*args, **kwargs)
        if func in _NATIVE:
            raise ValueError(
                "ulysses: nn.TransformerEncoderLayer must not run as one kernel, which attends "
                "to this rank's tokens alone, and did; call torch.backends.mha."
                "set_fastpath_enabled(False)"
            )
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        length, size, num_own = self.now.length, self._size, query.shape[-2]
        if length is not None and num_own != -(-length // size):
            raise ValueError(
                f"ulysses: attention must be over the tokens of the divided sequence, "
                f"{-(-length // size)} on a rank, got {num_own} queries; leave a model "
                f"whose attention is over anything else (windows, patches) undivided"
            )
        axis = self.axis
        if torch.compiler.is_dynamo_compiling():  # its graph holds numbers, and guards on them
            axis = Numbered(size, self._rank, self._number)
        how: dict[str, Any] = {"axis": axis, "length": length}
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **how)

    def _check_count(self, *args: Any, **kwargs: Any) -> None:
        if self.part is None:
            return
        num_own = -(-self.part.length // self.axis.size)
        if args in ((num_own,), (0, num_own)) or kwargs.get("end") == num_own:
            raise ValueError(
                f"ulysses: a model must get the positions of its tokens with the batch, got "
                f"torch.arange({num_own}), which is as long as the part of a rank and the same on "
                f"all; divide position ids with the batch, or pass may_count=True if these are no "
                f"positions"
            )


def _multi_head(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """`F.multi_head_attention_forward` by `attend`, also where padding comes with
    `is_causal`.
    """
    if need_weights:
        raise ValueError(
            "ulysses: nn.MultiheadAttention must return no weights, which are of all tokens and "
            "heads, got need_weights=True; pass need_weights=False"
        )
    if bias_k is not None or add_zero_attn or static_k is not None:
        raise ValueError(
            "ulysses: nn.MultiheadAttention must have no keys besides those of tokens, got "
            "add_bias_kv, add_zero_attn or static keys; leave them out"
        )
    if query.dim() == 2:
        raise ValueError(
            "ulysses: nn.MultiheadAttention must get batches, got one sample; pass x[None]"
        )
    biases: Any = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    weights: Any = [q_proj_weight, k_proj_weight, v_proj_weight]
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight.chunk(3)
    heads = [
        rearrange(F.linear(x, weight, bias), "t b (h d) -> b h t d", h=num_heads)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]
    mask = attn_mask
    if is_causal or mask is None:  # the mask beside is_causal is that of this rank's tokens
        mask = None
    elif mask.dtype == torch.bool:  # here True hides, in the other function it shows
        mask = ~mask
    if mask is not None and mask.dim() == 3:
        mask = rearrange(mask, "(b h) q k -> b h q k", h=num_heads)
    if key_padding_mask is not None:
        is_bool = key_padding_mask.dtype == torch.bool
        if mask is not None:
            raise ValueError(
                "ulysses: nn.MultiheadAttention must get key_padding_mask or attn_mask, got both; "
                "pass is_causal=True, or one mask of both"
            )
        mask = (~key_padding_mask if is_bool else key_padding_mask)[:, None, None]
    attended = attend(*heads, mask, dropout_p if training else 0.0, is_causal)
    joined = rearrange(attended, "b h t d -> t b (h d)")
    return F.linear(joined, out_proj_weight, out_proj_bias), None


def active() -> Swapping | None:
    """The mode that is active in this thread."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode for mode in reversed(stack) if isinstance(mode, Swapping)), None)


# --- transformers ---------------------------------------------------------------------------------


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def register() -> None:
    """Makes transformers ask here for the masks of "sdpa"; where no `Swapping` is active,
    they are its own.
    """
    utils = package("transformers", needed_by="ulysses", module="transformers.masking_utils")
    masks = utils.ALL_MASK_ATTENTION_FUNCTIONS
    own = masks["sdpa"]
    if getattr(own, "func", None) is not _mask:
        masks.register("sdpa", partial(_mask, own, utils))


def _mask(own: Callable[..., Tensor | None], utils: Any, *args: Any, **kwargs: Any) -> Any:
    """The mask of transformers' attention, of the whole sequence where it is divided."""
    mode = active()
    if mode is None:
        return own(*args, **kwargs)
    part, size = mode.part, mode.axis.size
    kwargs["q_length"] *= size
    kwargs["kv_length"] *= size
    kwargs["attention_mask"] = None if part is None else part.kept
    if part is not None and part.packed is not None and mode.now.packs:
        begins = part.packed.diff(dim=-1, prepend=part.packed[:, :1] - 1) != 1
        kwargs["mask_function"] = utils.packed_sequence_compatibility_function(
            kwargs.get("mask_function", utils.causal_mask_function),
            part.packed,
            begins.cumsum(-1),
        )
        kwargs["allow_is_causal_skip"] = False
    return own(*args, **kwargs)
