"""`deepspeed.runtime.pipe.module`: layers and the model that is a list of them."""

from __future__ import annotations

from fzero.pipeline.layers import LayerSpec, TiedLayerSpec
from fzero.pipeline.module import PipelineError, PipelineModule

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
