"""`deepspeed.runtime.zero.parameter_offload`: the class of `optimizer.parameter_offload`, for isinstance."""

from fzero.deepspeed.engine.optimizer import ParameterOffload as DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
