"""`deepspeed.runtime.pipe.engine`: the engine of a `PipelineModule`."""

from __future__ import annotations

from fzero.deepspeed.engine.pipeline_engine import PipelineEngine
from fzero.pipeline.module import PipelineError

__all__ = ["PipelineEngine", "PipelineError"]
