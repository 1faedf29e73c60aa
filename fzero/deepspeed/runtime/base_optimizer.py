"""`deepspeed.runtime.base_optimizer`: the classes of `engine.optimizer`, for isinstance."""

from fzero.deepspeed.engine.optimizer import WrappingOptimizer as DeepSpeedOptimizer, ZeroOptimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
