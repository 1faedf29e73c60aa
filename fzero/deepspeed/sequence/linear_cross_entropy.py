"""`deepspeed.sequence.linear_cross_entropy` (0.19.8): the loss of a head whose logits
never exist whole, on `fzero.linear_cross_entropy`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fzero.tiling.cross_entropy import linear_cross_entropy

Reduction = Literal["none", "sum", "mean"]


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """The cross entropy of `F.linear(hidden, weight, bias)`. *Collective* with
    `sp_group`: its ranks add up their numbers of labels and their losses; each has the
    gradient of its own tokens.

    Args:
        hidden: (…, D), this rank's tokens.
        weight: (V, D), the whole head.
        target: (…), int64.
        tp_group: must be None, or of one rank.
        sp_group: the ranks that share sequences, for "sum" and "mean".
        vocab_start_index, vocab_end_index: must be 0 and V.
        reduction: "none" is one loss for each token, 0 for those without a label.
        chunk_size: the tokens of a chunk; by default a chunk has as many logits as
            `hidden` has elements.

    Returns:
        fp32: 0-d, or of the shape of `target`. A mean over no labels is 0.

    Raises:
        ValueError: shapes or `reduction` do not fit, or the head is divided.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(
            f"vocab_parallel_linear_cross_entropy: reduction must be 'none', 'sum' or 'mean', got "
            f"{reduction!r}; pass one"
        )
    bounds = (vocab_start_index, vocab_end_index)
    if _size(tp_group) > 1 or bounds not in ((None, None), (0, weight.shape[0])):
        raise ValueError(
            f"vocab_parallel_linear_cross_entropy: weight must be of the whole vocabulary, because "
            f"fzero divides no layer among ranks, got a tp_group of {_size(tp_group)} and bounds "
            f"{bounds} with {weight.shape[0]} rows; leave both out, and pass all rows"
        )
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"vocab_parallel_linear_cross_entropy: target must be of the tokens of hidden, got "
            f"{tuple(target.shape)} for {tuple(hidden.shape)}; shift both in the same way"
        )
    num_tokens, num_classes = target.numel(), weight.shape[0]
    rows = chunk_size or max(1, -(-num_tokens * hidden.shape[-1] // num_classes))
    if reduction == "none":
        return _losses(hidden, weight, target, bias, ignore_index, rows)
    total, count = linear_cross_entropy(
        hidden,
        weight,
        target,
        bias=bias,
        chunk_tokens=rows,
        ignore_index=ignore_index,
        reduction="sum_and_count",
    )
    if reduction == "mean":
        count = count.float()
        if _size(sp_group) > 1:
            dist.all_reduce(count, group=sp_group)
        total = total / count.clamp(min=1)
    if _size(sp_group) == 1:
        return total
    whole = total.detach().clone()
    dist.all_reduce(whole, group=sp_group)
    return total + (whole - total.detach())


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _losses(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignored: int, rows: int
) -> Tensor:
    """The loss of each token; each chunk runs again in the backward."""

    def of_chunk(hidden: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, weight, bias).float()
        return F.cross_entropy(logits, target, ignore_index=ignored, reduction="none")

    flat = hidden.reshape(-1, hidden.shape[-1])
    chunks = zip(torch.split(flat, rows), torch.split(target.reshape(-1), rows), strict=True)
    losses = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat(losses).view(target.shape)
