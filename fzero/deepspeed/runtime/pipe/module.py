"""`deepspeed.runtime.pipe.module`: layers and the model that is a list of them."""

from __future__ import annotations

from fzero import pipeline
from fzero.deepspeed.topology import PipelineParallelGrid, ProcessTopology, grid_of, topology_of
from fzero.pipeline.layers import LayerSpec, TiedLayerSpec
from fzero.pipeline.module import PipelineError


class PipelineModule(pipeline.PipelineModule):
    """fzero's own, with the methods of DeepSpeed's that answer for the ranks."""

    def topology(self) -> ProcessTopology:
        """The axes of all ranks."""
        return topology_of(self)

    def mpu(self) -> PipelineParallelGrid | None:
        """The grid of this rank; None outside a job."""
        return None if self.stage_id is None else grid_of(self)

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages


__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
