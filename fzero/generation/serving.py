"""Weights for an inference server: pairs of name and tensor, a flat buffer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from fzero.comms.hangs.failures import store_barrier
from fzero.generation.gathered_model import check_whole
from fzero.state import TrainState
from fzero.step import TrainStep


def server_weights(
    step: TrainStep,
    state: TrainState[Tensor],
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    to: Literal["all", "rank0"] = "all",
) -> Iterator[tuple[str, Tensor]]:
    """The full weights by the model's names, in the form that the loaders of vLLM
    (`model.load_weights`) and SGLang (`update_weights_from_tensor`) take; of the
    masters, if there are any. Tied weights come under their first name.

    At most one flat buffer is held in full; each tensor is a copy that the caller may
    keep.

    *Collective:* every rank must take all pairs; in stage 3, and with masters, each
    sends `(W-1)/W` of the weights.

    Args:
        dtype: the dtype of floating-point weights; None keeps the weights' own (fp32
            for masters).
        to: `"rank0"` yields on rank 0 alone; the other ranks take part when they are
            asked for the first pair.
    """
    if to not in ("all", "rank0"):
        raise ValueError(
            f"server_weights: to must be 'all' or 'rank0', got {to!r}; pass one of these"
        )
    check_whole(step, "server_weights")
    step.runtime.check_state(state)
    store_barrier("server_weights", step.runtime.mesh.world)
    for views in step.runtime.full_weights(state):
        if to == "rank0" and step.rank != 0:
            continue
        for name, view in views.items():
            yield (
                name,
                view.detach().to(
                    dtype if dtype and view.is_floating_point() else view.dtype, copy=True
                ),
            )
