"""`deepspeed.utils.tensor_fragment`: weights, gradients and optimizer state of single
parameters, in full or this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fzero.deepspeed.engine.param_views import engine_of
from fzero.resharding import parameters as whole


def _found(param: Tensor) -> tuple[Any, str]:
    engine = engine_of(param)
    if engine is None:
        raise ValueError(
            f"param: must be a parameter of a module that an engine trains, got a tensor of shape "
            f"{tuple(param.shape)}; take it from engine.module"
        )
    engine.active_step()
    return engine, engine.live.name_of(param)


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The full master weight; None for a frozen parameter, which has none.
    *Collective:* every rank.
    """
    engine, name = _found(param)
    return (
        None if _is_frozen(engine, name) else whole.weight_of(engine.train_step, engine.state, name)
    )


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets the master weight, to the same value on all ranks. *Collective:* every rank."""
    engine, name = _found(param)
    engine.state = whole.with_weight(engine.train_step, engine.state, name, value)
    engine.show_state()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The full mean gradient since the last update; None if none was collected.
    *Collective:* every rank.

    Before the end of an accumulation it is the mean over the ranks of what has been
    collected so far.
    """
    engine, name = _with_grads(param)
    if engine is None or _is_frozen(engine, name):
        return None
    read = whole.unreduced_grad_of if _awaits_reduction(engine) else whole.grad_of
    return read(engine.train_step, engine.state, name)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Sets the mean gradient of the next update, to the same value on all ranks.
    *Collective:* every rank.
    """
    engine, name = _grads_to_set("safe_set_full_grad", param)
    engine.state = whole.with_grad(engine.train_step, engine.state, name, value)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The full optimizer state of a parameter (`exp_avg`, `exp_avg_sq`); None for a
    frozen one.

    *Collective:* every rank.
    """
    engine, name = _found(param)
    if _is_frozen(engine, name):
        return None
    return whole.optimizer_state_of(engine.train_step, engine.state, name, optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets an optimizer state of a parameter, to the same value on all ranks.
    *Collective:* every rank.
    """
    engine, name = _found(param)
    engine.state = whole.with_optimizer_state(
        engine.train_step, engine.state, name, optim_state_key, value
    )


def safe_update_full_grad_vectorized(
    param_list: Sequence[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Sets the mean gradient of each parameter to `update_func(gradient, parameter)`.
    *Collective:* every rank.

    Parameters that are frozen, or outside an engine without a `.grad`, are left out.
    """
    for param in param_list:
        if param.grad is not None:
            param.grad.copy_(update_func(param.grad, param))
        elif param.requires_grad and (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's elements of the master weight (1-d, possibly none): those of the
    parameter inside its shard. None for a frozen parameter."""
    engine, name = _found(param)
    return (
        None
        if _is_frozen(engine, name)
        else whole.local_weight_of(engine.train_step, engine.state, name)
    )


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets this rank's elements of the master weight. *Collective:* every rank, with
    its own values.
    """
    engine, name = _found(param)
    engine.state = whole.with_local_weight(engine.train_step, engine.state, name, value)
    engine.show_state()


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's elements of the mean gradient since the last update (1-d); None if
    none was collected.
    """
    engine, name = _with_grads(param)
    if engine is None or _is_frozen(engine, name):
        return None
    engine, name = _grads_to_set("safe_get_local_grad", param)
    return whole.local_grad_of(engine.train_step, engine.state, name)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Sets this rank's elements of the mean gradient of the next update."""
    engine, name = _grads_to_set("safe_set_local_grad", param)
    engine.state = whole.with_local_grad(engine.train_step, engine.state, name, value)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's elements of an optimizer state (1-d); None for a frozen parameter."""
    engine, name = _found(param)
    if _is_frozen(engine, name):
        return None
    return whole.local_optimizer_state_of(engine.train_step, engine.state, name, optim_state_key)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets this rank's elements of an optimizer state."""
    engine, name = _found(param)
    engine.state = whole.with_local_optimizer_state(
        engine.train_step, engine.state, name, optim_state_key, value
    )


def _is_frozen(engine: Any, name: str) -> bool:
    return not whole.is_trained(engine.train_step, name)


def _with_grads(param: Tensor) -> tuple[Any, str]:
    engine, name = _found(param)
    has_some = engine.open_window is not None and bool(engine.open_window.loss_stats)
    return (engine if has_some else None), name


def _awaits_reduction(engine: Any) -> bool:
    """Whether each rank still holds gradients of its own."""
    return not engine.grads_are_reduced and not engine.train_step.plan.row.shards("grads")


def _grads_to_set(function: str, param: Tensor) -> tuple[Any, str]:
    """The engine, which has reduced gradients, and the parameter's name."""
    engine, name = _with_grads(param)
    if engine is None:
        raise RuntimeError(
            f"{function}: must follow a backward since the last update; call engine.backward(loss) "
            f"first"
        )
    if _awaits_reduction(engine):
        raise RuntimeError(
            f"{function}: must follow the last backward of an accumulation in stages 0 and 1, "
            f"which reduces the gradients; call it between that and step()"
        )
    return engine, name
