"""`deepspeed.zero`: the names of `deepspeed.runtime.zero`."""

from __future__ import annotations

from fzero.deepspeed.runtime.zero import (
    DeepSpeedZeRoOffload,
    GatheredParameters,
    Init,
    MiCS_Init,
    ZeroParamStatus,
    ZeroParamType,
    config,
    mics,
    offload_config,
    parameter_offload,
    partition_parameters,
    register_external_parameter,
    stage3,
    stage_1_and_2,
    unregister_external_parameter,
    unwrap_model_for_generation,
    utils,
)

__all__ = [
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "MiCS_Init",
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
    "unregister_external_parameter",
    "unwrap_model_for_generation",
    "utils",
]
