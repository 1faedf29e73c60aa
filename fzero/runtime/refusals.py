"""Texts of the errors for backwards and models that a step cannot follow."""

from __future__ import annotations

UNRELATED = (
    "backward: the loss must depend on a trainable parameter of the model, through a forward of this step, and does not; make "
    "it of what the model returned (where a batch has nothing to learn from, of 0.0 * that)"
)
INSIDE = (
    "backward: must not be called inside the forward or loss_fn, for the step calls it for what these return, and was; return "
    "the loss, and take a gradient of activations with torch.autograd.grad(loss, activations)"
)
TRANSFORMED = (
    "model: must not call torch.func.grad, vjp, jacrev or hessian in the forward of a step that gathers parameters (stage 3), "
    "for PyTorch allows them no hooks on saved tensors, and one was called; use torch.autograd.grad(..., create_graph=True), or "
    "stages 0 to 2"
)
OVER = (
    "backward: the forward that this loss is of belongs to a step that is over (it was updated, or an error ended it), so that "
    "its gradients would be of other parameters; run the forward again"
)
BETWEEN = (
    "backward: must be that of the engine or step, for it sends and gathers on all ranks at once, and autograd was called by "
    "itself; call engine.backward(loss) in place of loss.backward(), and make a gradient of inputs (torch.autograd.grad) with "
    "torch.func, or in stages 0 to 2"
)

CHANGES_FLAG = "you can only change requires_grad flags of leaf"
HOOKS_SAVED = "don't yet support saved tensor hooks"
"""Parts of messages of PyTorch, in errors that get another text here."""
