"""SGD, Adagrad, Lion and the scaling of a gradient as transforms
(`fzero.optim.transforms`).

Adam, which most runs use, is in `fzero.optim.adam_kernels`. Optimizers that are not
elementwise are in `fzero.optim.matrix`.
"""

from __future__ import annotations

from functools import partial
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from fzero.optim.transforms import (
    Leaf,
    Rate,
    Transform,
    add_times,
    check_betas,
    check_range,
    is_traced,
    lerp,
    no_steps,
    run_fused,
    step_spec,
)
from sharding import TensorSpec


class ScaleState(NamedTuple):
    """The state of `scale`, which is empty."""


def scale(factor: float) -> Transform:
    """Multiplies the gradient by `factor`."""
    if not isinstance(factor, int | float):
        raise ValueError(f"scale: factor must be a number, got {factor!r}; pass 0.5, say")

    def init(param: Tensor) -> ScaleState:
        return ScaleState()

    def update(grad: Tensor, param: Tensor, state: ScaleState) -> tuple[Tensor, Tensor, ScaleState]:
        return grad.mul_(factor), param, state

    def specs(param: TensorSpec) -> ScaleState:
        return ScaleState()

    return Transform(init, update, specs)


class SGDState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); `momentum` is the running direction, None
    when the factor is 0.
    """

    step: Leaf
    momentum: Leaf | None


def sgd(
    lr: Rate,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Transform:
    """`torch.optim.SGD`: weight decay joins the gradient (L2).

    Raises:
        ValueError: a value is negative, or nesterov comes without momentum or with
            dampening.
    """
    check_range("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"sgd: nesterov needs momentum > 0 and dampening = 0, got {momentum} and {dampening}; "
            f"change one of them"
        )

    def init(param: Tensor) -> SGDState[Tensor]:
        return SGDState(no_steps(param), torch.zeros_like(param) if momentum else None)

    def update(
        grad: Tensor, param: Tensor, state: SGDState[Tensor]
    ) -> tuple[Tensor, Tensor, SGDState[Tensor]]:
        if weight_decay:
            grad.add_(param, alpha=weight_decay)
        direction = grad
        if state.momentum is not None:
            # torch.optim dampens every gradient but the first. The step is a tensor, so that this
            # is data and not a branch.
            kept = torch.where(state.step == 0, 1.0, 1.0 - dampening) if dampening else None
            state.momentum.mul_(momentum).add_(grad if kept is None else grad.mul_(kept))
            direction = grad.add_(state.momentum, alpha=momentum) if nesterov else state.momentum
        add_times(param, direction, -lr)
        return grad, param, SGDState(state.step.add_(1), state.momentum)

    def specs(param: TensorSpec) -> SGDState[TensorSpec]:
        return SGDState(step_spec(param), param if momentum else None)

    return Transform(init, update, specs)


class AdagradState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); `sum` is the sum of the squared gradients."""

    step: Leaf
    sum: Leaf


def adagrad(
    lr: Rate,
    *,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Transform:
    """`torch.optim.Adagrad` (Duchi et al. 2011; weight decay joins the gradient), by
    PyTorch's fused kernel.
    """
    given = {"initial_accumulator_value": initial_accumulator_value, "eps": eps}
    check_range("adagrad", lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, **given)

    def init(param: Tensor) -> AdagradState[Tensor]:
        return AdagradState(no_steps(param), torch.full_like(param, initial_accumulator_value))

    def update(
        grad: Tensor, param: Tensor, state: AdagradState[Tensor]
    ) -> tuple[Tensor, Tensor, AdagradState[Tensor]]:
        step = state.step.add_(1)
        if is_traced():
            decayed = grad.add(param, alpha=weight_decay) if weight_decay else grad
            state.sum.addcmul_(decayed, decayed)
            param.sub_(
                decayed / (state.sum.sqrt() + eps) * (lr / (1 + (step.double() - 1) * lr_decay))
            )
        elif param.numel():
            kernel = partial(
                torch._fused_adagrad_,
                lr=lr,
                lr_decay=lr_decay,
                weight_decay=weight_decay,
                eps=eps,
                maximize=False,
                state_steps=[step],
            )
            run_fused(kernel, [param], [grad], [state.sum])
        return grad, param, AdagradState(step, state.sum)

    def specs(param: TensorSpec) -> AdagradState[TensorSpec]:
        return AdagradState(step_spec(param), param)

    return Transform(init, update, specs)


class LionState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); `exp_avg` is the momentum."""

    step: Leaf
    exp_avg: Leaf


def lion(
    lr: Rate, *, betas: tuple[Rate, float] = (0.9, 0.99), weight_decay: float = 0.0
) -> Transform:
    """Lion (Chen et al., arXiv:2302.06675, algorithm 2): the sign of a momentum, with
    decoupled weight decay.
    """
    check_range("lion", lr=lr, weight_decay=weight_decay)
    check_betas("lion", betas)

    def init(param: Tensor) -> LionState[Tensor]:
        return LionState(no_steps(param), torch.zeros_like(param))

    def update(
        grad: Tensor, param: Tensor, state: LionState[Tensor]
    ) -> tuple[Tensor, Tensor, LionState[Tensor]]:
        # The mix of gradient and momentum, whose sign is the direction, overwrites the gradient.
        # The new momentum b1·m + (1 - b1)·g follows from the mix, because g = (mix - b0·m) / (1 -
        # b0). So no other memory is needed.
        mix, weight = lerp(grad, state.exp_avg, betas[0]), (1 - betas[1]) / (1 - betas[0])
        add_times(state.exp_avg.mul_(betas[1] - betas[0] * weight), mix, weight)
        add_times(param.mul_(1 - lr * weight_decay), mix.sign_(), -lr)
        return grad, param, LionState(state.step.add_(1), state.exp_avg)

    def specs(param: TensorSpec) -> LionState[TensorSpec]:
        return LionState(step_spec(param), param)

    return Transform(init, update, specs)
