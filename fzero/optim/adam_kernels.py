"""Adam and AdamW as transforms (`fzero.optim.transforms`): PyTorch's fused kernels, and
in a graph the same formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from fzero.optim.transforms import (
    Leaf,
    Rate,
    Transform,
    check_betas,
    check_range,
    is_traced,
    lerp,
    no_steps,
    run_fused,
    step_spec,
)
from sharding import TensorSpec


class AdamState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); the moments have the parameter's shape and
    dtype.
    """

    step: Leaf
    exp_avg: Leaf
    exp_avg_sq: Leaf


def adamw(
    lr: Rate,
    *,
    betas: tuple[Rate, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
) -> Transform:
    """`torch.optim.AdamW` (decoupled weight decay, arXiv:1711.05101), by PyTorch's
    fused kernel: one pass over memory.

    Without `bias_correction` (torch has no such flag) the moments are used as they are.
    """
    return _adam("adamw", torch._fused_adamw_, lr, betas, eps, weight_decay, bias_correction)


def adam(
    lr: Rate,
    *,
    betas: tuple[Rate, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> Transform:
    """`torch.optim.Adam` (weight decay joins the gradient), by PyTorch's fused kernel:
    one pass over memory.

    Without `bias_correction` (torch has no such flag) the moments are used as they are.
    """
    return _adam("adam", torch._fused_adam_, lr, betas, eps, weight_decay, bias_correction)


def _adam(
    name: str,
    kernel: Callable[..., None],
    lr: Rate,
    betas: tuple[Rate, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
) -> Transform:
    check_range(name, lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(name, betas)

    def init(param: Tensor) -> AdamState[Tensor]:
        return AdamState(no_steps(param), torch.zeros_like(param), torch.zeros_like(param))

    def update(
        grad: Tensor, param: Tensor, state: AdamState[Tensor], found_inf: Tensor | None = None
    ) -> tuple[Tensor, Tensor, AdamState[Tensor]]:
        return grad, param, update_fused([grad], [param], [state], found_inf)[0]

    def update_fused(
        grads: Sequence[Tensor],
        params: Sequence[Tensor],
        states: Sequence[AdamState[Tensor]],
        found_inf: Tensor | None = None,
    ) -> list[AdamState[Tensor]]:
        _advance([state.step for state in states], found_inf)
        full = [
            (grad, x, *state)
            for grad, x, state in zip(grads, params, states, strict=True)
            if x.numel()
        ]
        if is_traced():
            for grad, param, *leaves in full:
                _adam_by_element(
                    grad,
                    param,
                    AdamState(*leaves),
                    lr=lr,
                    betas=betas,
                    eps=eps,
                    weight_decay=weight_decay,
                    is_decoupled=kernel is torch._fused_adamw_,
                    bias_correction=bias_correction,
                )
        elif full:
            full_grads, full_params, steps, exp_avgs, exp_avg_sqs = zip(*full, strict=True)
            # after infinitely many updates the kernel corrects nothing: 1 - beta**inf is 1
            if not bias_correction:
                steps = tuple(torch.full_like(step, math.inf) for step in steps)
            run = partial(
                kernel, max_exp_avg_sqs=[], state_steps=steps,
                lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps,
                amsgrad=False, maximize=False, found_inf=found_inf,
            )  # fmt: skip
            run_fused(run, full_params, full_grads, exp_avgs, exp_avg_sqs)
        return list(states)

    def update_skip_if(
        skip: Tensor, grad: Tensor, param: Tensor, state: AdamState[Tensor]
    ) -> tuple[Tensor, Tensor, AdamState[Tensor]]:
        return update(grad, param, state, skip.float())

    def specs(param: TensorSpec) -> AdamState[TensorSpec]:
        return AdamState(step_spec(param), param, param)

    return Transform(init, update, specs, update_skip_if, (update, update_fused))


def _advance(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Counts an update, unless it is skipped."""
    if steps and found_inf is None and not is_traced():
        # There a number would become a tensor for each counter, and a tensor without `alpha` a
        # number.
        if steps[0].is_cpu:
            torch._foreach_add_(steps, torch.ones(()), alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)
        return
    for step in steps:
        step.add_(1 if found_inf is None else 1 - found_inf)


def _adam_by_element(
    grad: Tensor,
    param: Tensor,
    state: AdamState[Tensor],
    *,
    lr: Rate,
    betas: tuple[Rate, float],
    eps: float,
    weight_decay: float,
    is_decoupled: bool,
    bias_correction: bool,
) -> None:
    """The formula of the fused kernels, operation by operation; `is_decoupled` is
    AdamW's weight decay.
    """
    count = (
        state.step.double()
        if bias_correction
        else torch.full_like(state.step, math.inf, dtype=torch.float64)
    )
    first, second = (1 - beta**count for beta in betas)
    if is_decoupled:
        param.mul_(1 - lr * weight_decay)
    elif weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    lerp(state.exp_avg, grad, 1 - betas[0])
    state.exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    param.sub_(state.exp_avg / (state.exp_avg_sq.sqrt() / second.sqrt() + eps) * (lr / first))
