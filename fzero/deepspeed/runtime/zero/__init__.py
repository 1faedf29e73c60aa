"""`deepspeed.runtime.zero`: parameters that are sharded, and DeepSpeed's estimates of
memory.
"""

from __future__ import annotations

from fzero.deepspeed.engine.optimizer import ParameterOffload as DeepSpeedZeRoOffload
from fzero.deepspeed.runtime.zero import (
    config,
    mics,
    offload_config,
    parameter_offload,
    partition_parameters,
    stage3,
    stage_1_and_2,
    tiling,
    utils,
)
from fzero.deepspeed.runtime.zero.mics import MiCS_Init
from fzero.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from fzero.deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from fzero.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "config",
    "mics",
    "offload_config",
    "parameter_offload",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "tiling",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
    "utils",
]
