"""`deepspeed.pipe`: models as lists of layers, under DeepSpeed's names."""

from __future__ import annotations

from fzero.deepspeed.runtime.pipe.module import PipelineModule
from fzero.pipeline.layers import LayerSpec, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
