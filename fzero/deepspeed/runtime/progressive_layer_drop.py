"""`deepspeed.runtime.progressive_layer_drop`: θ as a function of the step; see docs/data.md."""

from fzero.deepspeed.engine.data_schedulers import ProgressiveLayerDrop

__all__ = ["ProgressiveLayerDrop"]
