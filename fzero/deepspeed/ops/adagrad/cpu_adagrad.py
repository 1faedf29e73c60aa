"""`deepspeed.ops.adagrad.cpu_adagrad`. Given to `initialize`, it becomes fzero's own Adagrad on the state's shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad with DeepSpeed's signature; the configuration says where its state lives (`offload_optimizer`)."""

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
                f"DeepSpeedCPUAdagrad: amsgrad must be False and fp32_optimizer_states True, got {amsgrad} and "
                f"{fp32_optimizer_states}; leave them out"
            )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
