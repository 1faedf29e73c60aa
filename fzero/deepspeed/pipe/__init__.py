"""`deepspeed.pipe`: models as lists of layers, under DeepSpeed's names."""

from __future__ import annotations

from fzero.pipeline.layers import LayerSpec, TiedLayerSpec
from fzero.pipeline.module import PipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
