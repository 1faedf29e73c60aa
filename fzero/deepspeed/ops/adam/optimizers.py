"""Adam under DeepSpeed's names. Given to `initialize`, it becomes fzero's own on the state's shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


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
    """The same, with DeepSpeed's other signature; where the state lives says the configuration (`offload_optimizer`)."""

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
                "DeepSpeedCPUAdam: fp32_optimizer_states must be True, got False; bf16.bf16_optimizer_states of the "
                "configuration says otherwise"
            )
        super().__init__(model_params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode)
        _finish(self, bias_correction, amsgrad)


def _finish(optimizer: torch.optim.Adam, bias_correction: bool, amsgrad: bool) -> None:
    """Puts DeepSpeed's flag into the groups, where `initialize` reads it."""
    name = type(optimizer).__name__
    if amsgrad:
        raise ValueError(f"{name}: amsgrad must be False, as in DeepSpeed, got {amsgrad}; torch.optim.Adam has it")
    optimizer.defaults["bias_correction"] = bias_correction
    for group in optimizer.param_groups:
        group.setdefault("bias_correction", bias_correction)
    optimizer.register_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not all(group["bias_correction"] for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__}.step: bias_correction must be True where the optimizer steps by itself, got False; "
            f"give the optimizer to initialize, and call engine.step()"
        )
