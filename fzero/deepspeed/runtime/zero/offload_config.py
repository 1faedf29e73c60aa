"""`deepspeed.runtime.zero.offload_config`: the blocks of offload, and names of places
and of state, for `offload_states`.
"""

from __future__ import annotations

from enum import Enum

from fzero.config.deepspeed_models import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042 - its str() is DeepSpeed's
    """What `offload_states(include=…)` may name."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
