"""`deepspeed.runtime.pipe`: pipelines under DeepSpeed's names; what they do is in `fzero.pipeline`."""

from __future__ import annotations

from fzero.deepspeed.runtime.pipe import module, schedule, topology
from fzero.pipeline.layers import LayerSpec, TiedLayerSpec
from fzero.pipeline.module import PipelineModule
from fzero.pipeline.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec", "module", "schedule", "topology"]
