"""Dry runs of a step, without tensors: memory, bytes sent and seconds of a plan, and
the plan that fits.

May import: graph, runtime, storage, plans and below; not step. Begin with
`fzero.estimation.compare`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.estimation import pipelines as pipelines
    from fzero.estimation.compare import (
        Candidate as Candidate,
        Comparison as Comparison,
        compare_plans as compare_plans,
        plan_for as plan_for,
    )
    from fzero.estimation.fitting import Fit as Fit, fit as fit
    from fzero.estimation.generation import Answers as Answers
    from fzero.estimation.pipeline_layers import estimate_layers as estimate_layers
    from fzero.estimation.pipelines import (
        PipelinePlan as PipelinePlan,
        plan_pipeline as plan_pipeline,
    )
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "compare": "Candidate Comparison compare_plans plan_for",
            "fitting": "Fit fit",
            "generation": "Answers",
            "pipeline_layers": "estimate_layers",
            "pipelines": "PipelinePlan plan_pipeline",
            "": "pipelines",
        },
    )
