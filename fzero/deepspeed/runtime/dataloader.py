"""`deepspeed.runtime.dataloader`: the engine's loaders."""

from fzero.deepspeed.engine.dataloader import RepeatingLoader, ResumableLoader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
