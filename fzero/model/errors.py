"""The errors for models and backwards that a step does not support.

Each function returns an error with the name of the parameter, the rule and the fix.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch


class ParameterError(ValueError):
    """The model uses its parameters in a way that a step does not support."""


ShapeAndDtype = tuple[torch.Size, torch.dtype] | None
"""A tensor's shape and dtype, or None for no tensor."""

UNRELATED = (
    "backward: the loss must depend on a trainable parameter of the model, through a forward of "
    "this step, and does not; compute it from the model's output (for a batch with nothing to "
    "learn from, from 0.0 * output)"
)
INSIDE = (
    "backward: must not be called inside the forward or loss_fn, because the step calls it for the "
    "returned loss, and was; return the loss, and take a gradient of activations with "
    "torch.autograd.grad(loss, activations)"
)
CONTROL_FLOW = (
    "model: the functions given to torch.cond, while_loop, map or scan must not read parameters or "
    "modules of the model, because these operators take no tensors that share memory, as the "
    "parameters of a unit do, and no replaced forward, and one does; clone each before the call "
    "(weight = self.layer.weight.clone(), and torch.nn.functional.linear(x, weight) in the "
    "function), or write a Python if or for"
)
STALE_VIEW = (
    "parameters of the model: must not be changed in place by the forward, or kept for a later one, "
    "and one of them, or a view of one (weight.t(), weight[0]), was used after its memory had "
    "changed; take it from the module anew in each forward, keep a copy "
    "(weight.detach().clone()), and compute with a changed value (linear(x, normalize(weight)))"
)
OVER = (
    "backward: the loss must come from the present step, and its forward belongs to a step that is "
    "over (updated, or ended by an error), whose parameters are gone; run the forward again, and "
    "take each parameter from its module in it, not from a list that an earlier forward has kept"
)
BETWEEN = (
    "backward: must be called through the engine or step, because it communicates on all ranks at "
    "once, and autograd was called directly; call engine.backward(loss) instead of "
    "loss.backward(), and take a gradient by inputs (torch.autograd.grad) with torch.func, or in "
    "stages 0 to 2"
)

CHANGES_FLAG = "you can only change requires_grad flags of leaf"
COMPILED_TWICE = "does not currently support double backward"
LEAF_WRITTEN = "a leaf Variable that requires grad is being used in an in-place operation"
CHANGED_BASE = "its base or another view of its base has been modified inplace"
UNCAPTURED = "higher order operator doesn't work unless it is captured"
"""Parts of PyTorch's messages. Errors with such a message get a clearer one here."""


def raise_named(error: RuntimeError, was_changed: Callable[[str], ValueError]) -> None:
    """Raises an error that names the parameter and the fix, instead of one of PyTorch
    about a parameter.
    """
    # the nodes of parameters: changed in place
    if " of UnitRoot" in str(error) or " of ParamLeaf" in str(error):
        raise was_changed("of the model") from error
    # a CompileError quotes PyTorch's own, and names the unit
    if CHANGED_BASE in str(error) and type(error) is RuntimeError:
        raise ParameterError(STALE_VIEW) from error
    if CHANGES_FLAG in str(error):
        raise flag_changed(None) from error
    if COMPILED_TWICE in str(error) or (LEAF_WRITTEN in str(error) and _is_of_tangent(error)):
        raise ValueError(
            "model: a gradient with create_graph=True must not go through code that torch.compile "
            "has compiled, because PyTorch's compiler has no second derivatives, and one did; "
            "leave compile='block' (or the model's own torch.compile) out, or pass compile='step', "
            "whose graph has them"
        ) from error
    if UNCAPTURED in str(error):
        raise ValueError(CONTROL_FLOW) from error


def _is_of_tangent(error: RuntimeError) -> bool:
    """Whether PyTorch raised an error while it prepared a gradient for a compiled
    backward: it copies one with other strides, which a second derivative forbids.
    """
    frames = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    return "coerce_to_expected_memory_format" in frames


def was_changed(name: str | None, where: str = "of the model") -> ParameterError:
    """The error for a parameter that a forward has changed: the change to a gathered
    one would be lost.
    """
    what = f"parameter {name!r}" if name else f"parameters {where}"
    was = ", and was" if name else ", or kept in a list for a later one, and were"
    return ParameterError(
        f"{what}: must not be changed in place by the forward (under no_grad, through .data, by "
        f"embedding(max_norm=...)){was}; the change is lost when the unit is released, so compute "
        f"with a changed value (linear(x, normalize(weight))), change the state between two steps, "
        f"or make it a buffer"
    )


def late(kind: str, name: str) -> ParameterError:
    """The error for a parameter or buffer of the model that the state does not have."""
    return ParameterError(
        f"{kind} {name!r}: must be there when the step is made, and was registered later; register "
        f"it before (in __init__, or with a forward before make_train_step), and do not replace "
        f"its module"
    )


def replaced(name: str, other: str | None) -> ParameterError:
    """The error for a parameter that a forward has replaced by another one, or removed."""
    return ParameterError(
        f"parameter {name!r}: must keep its place in the module, and the forward "
        f"{f'put {other!r} there' if other else 'removed it'}; the next forward would begin with "
        f"{name!r} again, unlike in a plain loop; put it back at the end of the forward "
        f"(torch.func.functional_call does), or change the module before make_train_step"
    )


def wrong_kind(name: str, before: ShapeAndDtype, now: ShapeAndDtype) -> ParameterError:
    """The error for a buffer that a forward creates, removes, or gives another shape or
    dtype.
    """
    then, there = ("None" if kind is None else kind_text(kind) for kind in (before, now))
    return ParameterError(
        f"buffer {name!r}: must keep its shape and dtype, or stay None, because the state is laid "
        f"out when the step is made, and the forward changed it from {then} to {there}; register "
        f"it at its largest size (or run a forward that creates it before make_train_step), or "
        f"keep it in a plain attribute"
    )


def kind_text(kind: ShapeAndDtype) -> str:
    """ "not there", or dtype and shape."""
    return "not there" if kind is None else f"{kind[1]} of shape {tuple(kind[0])}"


def not_a_view(name: str) -> ParameterError:
    """The error for a buffer to which a forward has assigned memory of a parameter."""
    return ParameterError(
        f"buffer {name!r}: must not share memory with a parameter, and the forward assigned a view "
        f"of one (weight.data, weight.detach()), which in a plain loop would follow the "
        f"parameter's updates; assign a .clone()"
    )


def has_hook(name: str) -> ParameterError:
    """The error for a gradient hook that the forward registers on a parameter."""
    return ParameterError(
        f"parameter {name!r}: must get no gradient hook in the forward, because the hook would be "
        f"lost when the parameter's unit is released, and got one; change the gradient in the "
        f"forward (a torch.autograd.Function around the parameter, or a hook on weight * 1), or "
        f"the parameter after the step"
    )


def flag_changed(name: str | None) -> ParameterError:
    """The error for a parameter that the forward freezes or unfreezes."""
    return ParameterError(
        f"{f'parameter {name!r}' if name else 'parameters of the model'}: must keep requires_grad "
        f"in the forward, because PyTorch fixes it for a tensor that belongs to a graph, and it "
        f"was changed; compute with weight.detach() where no gradient is wanted "
        f"(torch.func.functional_call with detached parameters), or change the flag between two "
        f"steps"
    )


def lost_again(name: str) -> ParameterError:
    """The error for a parameter that a backward reads by running its module again,
    after another backward inside it.
    """
    return ParameterError(
        f"parameter {name!r}: must get a gradient where the backward runs its module again (an own "
        f"torch.autograd.Function, such as an adjoint method), and cannot, because a backward "
        f"inside the same backward (a reentrant checkpoint) went through it before; give the "
        f"Function copies (weight = 1 * module.weight), and run the module with them "
        f"(torch.func.functional_call), or pass use_reentrant=False"
    )


def not_trained(name: str) -> ValueError:
    """The error for a gradient in the module's own parameter."""
    return ValueError(
        f"parameter {name!r}: must be used inside the forward (loss_fn included), and a loss used "
        f"it outside; that gradient is in its .grad and trains nothing; move that computation (a "
        f"penalty, a part of the module that the script calls itself) into the forward, or give "
        f"compiled code the parameter as an argument; module.zero_grad() drops that gradient"
    )


def marked(kind: str, name: str, attribute: str) -> ParameterError:
    """The error for a Python attribute that the forward sets on a parameter, or in one
    graph on a buffer.
    """
    return ParameterError(
        f"{kind} {name!r}: must get no attribute in the forward, because the state's tensor stands "
        f"in its place there, with which the attribute would be lost, and got {attribute!r}; set "
        f"it on the module (self.{attribute} = ...), or on the {kind} before the step"
    )


def of_own_class(name: str, kind: type) -> ParameterError:
    """The error for a parameter of a class of the user's, in a graph."""
    return ParameterError(
        f"parameter {name!r}: must be an nn.Parameter in one graph, whose tensors have no methods "
        f"of other classes, got {kind.__name__}; leave compile='step' and by='vmap' out, or make "
        f"functions of the methods"
    )
