"""Lion as an optimizer of torch.optim. Given to `initialize`, it runs on the state's shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion, for FP32 state: the sign of an average of gradient and momentum, and decoupled weight decay."""

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
    """The same, with DeepSpeed's other signature; the configuration says where its state lives (`offload_optimizer`)."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPULion: fp32_optimizer_states must be True, got False; leave it out")
        super().__init__(model_params, lr, betas, weight_decay)
