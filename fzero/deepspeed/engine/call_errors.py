"""Calls of an engine that do not fit its state, and losses that no backward can begin
with.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class CallError(RuntimeError, AssertionError):
    """A call that does not fit the engine's state. DeepSpeed asserts these, and its
    scripts catch that.
    """


class LossError(ValueError, AssertionError):
    """A loss that no backward can begin with; also an AssertionError, as in DeepSpeed."""


NO_FORWARD = (
    "must follow a forward since the last update, or be given a loss that uses the module's own "
    "parameters; call engine(...) first, and compute the loss from its outputs (a checkpoint of a "
    "part hides its parameters, unless use_reentrant=False)"
)


def check_loss(where: str, loss: Any) -> None:
    """Raises LossError unless a loss is a scalar that depends on something with a
    gradient; `where`: the engine's method.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        is_tensor = isinstance(loss, Tensor)
        given = (
            f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            if is_tensor
            else type(loss)
        )
        raise LossError(
            f"engine.{where}: needs a scalar loss that depends on the module's parameters, got "
            f"{given}; output.backward(gradient) takes another tensor"
        )
