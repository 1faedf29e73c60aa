"""`deepspeed.runtime.base_optimizer`: the class of `engine.optimizer`, for isinstance."""

from fzero.engine.optimizer import EngineOptimizer as DeepSpeedOptimizer, EngineOptimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
