"""The captured step: capture, passes on the graph, backends, timeline. The only user of
torch._dynamo and torch._inductor.

May import: runtime and below. Begin with `fzero.graph.step_functions`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.graph import blocks as blocks, explain as explain, program as program
    from fzero.graph.schedule import CompileError as CompileError
    from fzero.graph.timeline import StepTimeline as StepTimeline
    from fzero.plans.machine_model import MachineModel as MachineModel
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "schedule": "CompileError",
            "timeline": "StepTimeline",
            ".plans.machine_model": "MachineModel",
            # importing Dynamo takes longer than all of fzero
            "": "blocks explain program",
        },
    )
