"""`deepspeed.runtime.pipe`: pipelines under DeepSpeed's names; what they do is in
`fzero.pipeline`.
"""

from __future__ import annotations

from fzero.deepspeed.runtime.pipe import module, schedule, topology
from fzero.deepspeed.runtime.pipe.module import PipelineModule
from fzero.deepspeed.topology import ProcessTopology
from fzero.pipeline.layers import LayerSpec, TiedLayerSpec

__all__ = [
    "LayerSpec",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
    "module",
    "schedule",
    "topology",
]
