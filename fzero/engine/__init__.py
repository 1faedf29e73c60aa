"""The stateful facade for DeepSpeed's scripts (`fzero.deepspeed.engine`): `initialize`,
and the engines that it returns.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine as Engine
    from fzero.deepspeed.engine.initialize import initialize as initialize
    from fzero.deepspeed.engine.pipeline_engine import PipelineEngine as PipelineEngine
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            ".deepspeed.engine.engine": "Engine",
            ".deepspeed.engine.initialize": "initialize",
            ".deepspeed.engine.pipeline_engine": "PipelineEngine",
        },
    )
