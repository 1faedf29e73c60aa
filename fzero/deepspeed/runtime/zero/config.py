"""`deepspeed.runtime.zero.config`: the stages."""

from __future__ import annotations

from enum import IntEnum

from fzero.config.config import Config
from fzero.config.zero import ZeroOptimization as DeepSpeedZeroConfig

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(IntEnum):
    """The stages by what they shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def get_zero_config(param_dict: dict[str, object]) -> DeepSpeedZeroConfig:
    """The block `zero_optimization` of a configuration, checked."""
    return Config.load({ZERO_OPTIMIZATION: param_dict.get(ZERO_OPTIMIZATION, {})}).zero_optimization


__all__ = ["ZERO_OPTIMIZATION", "DeepSpeedZeroConfig", "ZeroStageEnum", "get_zero_config"]
