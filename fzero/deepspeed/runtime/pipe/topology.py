"""`deepspeed.runtime.pipe.topology`: which rank is at which coordinate of named axes."""

from __future__ import annotations

from fzero.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
