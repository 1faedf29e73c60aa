"""Optimizers under DeepSpeed's names, and which of them a configuration names in
DeepSpeed.

Given to `initialize`, Adam and Adagrad become fzero's own on the state's shards, and
Lion runs on them as it is. The configuration says where their state lives
(`offload_optimizer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fzero.deepspeed.engine.live_optimizer import OptimizerState
from fzero.deepspeed.engine.settings_table import look_up


class FusedAdam(torch.optim.Adam):
    """Adam, or AdamW with `adam_w_mode`, which is the default."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adam_w_mode)
        _finish(self, bias_correction, amsgrad)


class DeepSpeedCPUAdam(torch.optim.Adam):
    """The same, with DeepSpeed's other signature; where the state lives says the
    configuration (`offload_optimizer`).
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError(
                "DeepSpeedCPUAdam: fp32_optimizer_states must be True, got False; "
                "bf16.bf16_optimizer_states of the configuration says otherwise"
            )
        super().__init__(
            model_params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode
        )
        _finish(self, bias_correction, amsgrad)


def _finish(optimizer: torch.optim.Adam, bias_correction: bool, amsgrad: bool) -> None:
    """Puts DeepSpeed's flag into the groups, where `initialize` reads it."""
    name = type(optimizer).__name__
    if amsgrad:
        raise ValueError(
            f"{name}: amsgrad must be False, as in DeepSpeed, got {amsgrad}; torch.optim.Adam has "
            f"it"
        )
    optimizer.defaults["bias_correction"] = bias_correction
    for group in optimizer.param_groups:
        group.setdefault("bias_correction", bias_correction)
    optimizer.register_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    is_an_engines = isinstance(optimizer.state, OptimizerState)
    if not is_an_engines and not all(group["bias_correction"] for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__}.step: bias_correction must be True where the optimizer "
            f"steps by itself, got False; give the optimizer to initialize, and call engine.step()"
        )


class Lion(torch.optim.Optimizer):
    """Lion, for FP32 state: the sign of an average of gradient and momentum, and
    decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                update = torch.lerp(param.grad, momentum, first).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(param.grad, 1 - second)
        return loss


class FusedLion(Lion):
    """Lion with DeepSpeed's signature."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(Lion):
    """The same, with DeepSpeed's other signature; the configuration says where its
    state lives (`offload_optimizer`).
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError(
                "DeepSpeedCPULion: fp32_optimizer_states must be True, got False; leave it out"
            )
        super().__init__(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad with DeepSpeed's signature; the configuration says where its state lives
    (`offload_optimizer`).
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ValueError(
                f"DeepSpeedCPUAdagrad: amsgrad must be False and fp32_optimizer_states True, got "
                f"{amsgrad} and {fp32_optimizer_states}; leave them out"
            )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def configured_class(config: Mapping[str, Any], *, offloads: bool) -> type[torch.optim.Optimizer]:
    """The class of the optimizer that DeepSpeed makes of a configuration; torch's base
    class where fzero has no such class.

    >>> configured_class(
    ...     {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, offloads=False
    ... ).__name__
    'AdamW'
    """
    kind = str(look_up(config, "optimizer.type", "AdamW"))
    given = look_up(config, "optimizer.params", {})
    if kind.lower() in ("adam", "adamw"):
        if given.get("torch_adam"):
            is_decoupled = kind.lower() == "adamw" or given.get("adam_w_mode", True)
            return torch.optim.AdamW if is_decoupled else torch.optim.Adam
        return DeepSpeedCPUAdam if offloads else FusedAdam
    if kind.lower() == "lion":
        return DeepSpeedCPULion if offloads else FusedLion
    if kind.lower() == "adagrad":
        return DeepSpeedCPUAdagrad if offloads else torch.optim.Adagrad
    found = None if kind.lower() in ("lamb", "muon") else getattr(torch.optim, kind, None)
    return (
        found
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
        else torch.optim.Optimizer
    )
