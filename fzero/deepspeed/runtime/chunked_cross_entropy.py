"""`deepspeed.runtime.chunked_cross_entropy` (0.19.8): the loss of logits that exist,
whose copies in fp32 never exist whole. `fzero.linear_cross_entropy` needs no logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fzero.common.optional import package

Backend = Literal["auto", "triton", "torch"]
Reduction = Literal["none", "sum", "mean"]
BACKENDS = ("auto", "triton", "torch")
BLOCK_NUMEL = 1 << 26
"""The elements of a block of rows: 256 MiB in fp32."""


def triton_backend_available() -> bool:
    """False: there is no kernel of Triton here."""
    return False


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    block_rows: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`F.cross_entropy(logits.float(), target, …)`, one block of rows at a time: the
    forward keeps the logits alone, and the backward computes each block again. Sends
    nothing.

    Args:
        logits: (rows, V).
        target: (rows,), int64; `ignore_index` counts nothing.
        reduction: "none" is one loss for each row; "mean" is over those that count.
        block_rows: the rows of a block; by default it has at most 2²⁶ elements.
        backend: "auto" or "torch", which are the same.

    Returns:
        fp32: (rows,), or 0-d.

    Raises:
        ValueError: shapes, `reduction`, `block_rows` or `backend` do not fit.
        RuntimeError: `backend="triton"`.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"chunked_cross_entropy: logits must be (rows, classes) and target (rows,), got "
            f"{tuple(logits.shape)} and {tuple(target.shape)}; flatten both"
        )
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(
            f"chunked_cross_entropy: reduction must be 'none', 'sum' or 'mean', got {reduction!r}; "
            f"pass one"
        )
    if target.dtype != torch.int64:
        raise RuntimeError(
            f"chunked_cross_entropy: target must be of torch.int64, got {target.dtype}; cast it"
        )
    _check_backend(backend)
    rows = _checked_rows(block_rows) or max(1, BLOCK_NUMEL // logits.shape[-1])
    of_block = partial(F.cross_entropy, ignore_index=ignore_index, reduction="none")
    blocks = zip(torch.split(logits, rows), torch.split(target, rows), strict=True)
    losses = torch.cat(
        [checkpoint(_in_fp32, of_block, *block, use_reentrant=False) for block in blocks]
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


def _in_fp32(of_block: Any, logits: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = of_block(logits.float(), target)
    return loss


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(
            f"chunked_cross_entropy: backend must be one of {BACKENDS}, got {backend!r}; pass "
            f"'auto'"
        )
    if backend == "triton":
        raise RuntimeError(
            "chunked_cross_entropy: backend must be 'auto' or 'torch', because there is no kernel "
            "of Triton here, got 'triton'; pass 'auto'"
        )


def _checked_rows(block_rows: int | None) -> int | None:
    if block_rows is None:
        return None
    if isinstance(block_rows, bool) or not isinstance(block_rows, int) or block_rows < 1:
        raise ValueError(
            f"chunked_cross_entropy: block_rows must be a whole number, at least 1, or None, got "
            f"{block_rows!r}; leave it out"
        )
    return block_rows


class ChunkedCausalLMLoss:
    """The loss of causal models of transformers (`ForCausalLMLoss`), by
    `chunked_cross_entropy`.
    """

    def __init__(self, block_rows: int | None = None, backend: Backend = "auto") -> None:
        _check_backend(backend)
        self.block_rows, self.backend = _checked_rows(block_rows), backend

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mean over labels, or the sum divided by `num_items_in_batch`.

        Args:
            logits: (…, L, V).
            labels: (…, L), of the tokens themselves; unused where `shift_labels`, those
                of the next tokens, are given.
        """
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
        target = shift_labels.reshape(-1).to(logits.device)
        reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
        loss = chunked_cross_entropy(
            logits.reshape(-1, vocab_size),
            target,
            ignore_index,
            reduction,
            self.block_rows,
            self.backend,
        )
        if num_items_in_batch is None:
            return loss
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device)


def install_chunked_causal_lm_loss(
    model: Any, block_rows: int | None = None, backend: Backend = "auto"
) -> ChunkedCausalLMLoss:
    """Gives a causal model of transformers this loss.

    Raises:
        ValueError: its loss is another than `ForCausalLMLoss`.
    """
    losses = package("transformers", needed_by="the loss", module="transformers.loss.loss_utils")
    found = getattr(model, "loss_function", None)
    if found is not losses.ForCausalLMLoss:
        raise ValueError(
            f"install_chunked_causal_lm_loss: the model's loss must be transformers' "
            f"ForCausalLMLoss, which this replaces, got {found!r}; leave that one"
        )
    model.loss_function = ChunkedCausalLMLoss(block_rows, backend)
    return model.loss_function  # type: ignore[no-any-return]
