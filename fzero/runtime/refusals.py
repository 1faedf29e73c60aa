"""Error messages for backwards and models that a step does not support."""

from __future__ import annotations

import torch


class ParameterError(ValueError):
    """The model uses its parameters in a way that a step does not support."""


ShapeAndDtype = tuple[torch.Size, torch.dtype] | None
"""A tensor's shape and dtype, or None for no tensor."""

UNRELATED = (
    "backward: the loss must depend on a trainable parameter of the model, through a forward of this step, and does not; "
    "compute it from the model's output (for a batch with nothing to learn from, from 0.0 * output)"
)
INSIDE = (
    "backward: must not be called inside the forward or loss_fn, because the step calls it for the returned loss, and was; "
    "return the loss, and take a gradient of activations with torch.autograd.grad(loss, activations)"
)
TRANSFORMED = (
    "model: must not call torch.func.grad, vjp, jacrev or hessian in the forward of a step that gathers parameters (stage 3), "
    "because PyTorch allows no saved-tensor hooks in them, and one was called; use torch.autograd.grad(..., create_graph=True), "
    "or stages 0 to 2"
)
OVER = (
    "backward: the loss must come from the present step, and its forward belongs to a step that is over (updated, or ended by "
    "an error), whose parameters are gone; run the forward again"
)
BETWEEN = (
    "backward: must be called through the engine or step, because it communicates on all ranks at once, and autograd was called "
    "directly; call engine.backward(loss) instead of loss.backward(), and take a gradient by inputs (torch.autograd.grad) "
    "with torch.func, or in stages 0 to 2"
)

CHANGES_FLAG = "you can only change requires_grad flags of leaf"
HOOKS_SAVED = "don't yet support saved tensor hooks"
NOT_USED = "appears to not have been used in the graph"
"""Parts of PyTorch's messages. Errors with such a message get a clearer one here."""
