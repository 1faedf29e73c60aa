"""`deepspeed.runtime.zero.config`: the block `zero_optimization`."""

from __future__ import annotations

from fzero.config.deepspeed_models import (
    DeepSpeedZeroConfig,
    ZenFlowConfig,
    ZeroStageEnum,
    zero_block as get_zero_config,
)
from fzero.deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from fzero.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

ZERO_OPTIMIZATION = "zero_optimization"

__all__ = [
    "ZERO_OPTIMIZATION",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZenFlowConfig",
    "ZeroStageEnum",
    "get_zero_config",
]
