"""The memory of a running step, counted by the rule of a dry run."""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor, nn

import fzero
from fzero.estimation.activation_trace import ActivationCounter


def most_alive(model: nn.Module, cfg: dict[str, Any], batch: Any, **how: Any) -> int:
    """Bytes that an eager step on real tensors makes besides the state, counted by the
    same rule.
    """
    step = fzero.make_train_step(model, cfg, **how)
    state, _ = step(step.init(), batch)  # which takes what later steps keep
    alive = ActivationCounter()
    alive.ignore(x for x in optree.tree_leaves((state, batch)) if isinstance(x, Tensor))
    with alive:
        step(state, batch)
    return alive.most
