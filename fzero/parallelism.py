"""How a model is divided among the ranks of a job, beside ZeRO. Here, and nowhere else,
one is picked.

`DataParallel`: every rank computes with the whole model, on its own part of the batch.
`Pipeline` (`fzero.pipeline.pipeline`): each rank has the layers of one stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from fzero import estimation, graph
from fzero.comms.axes import AbstractAxis, RankAxis
from fzero.pipeline.pipeline import Pipeline
from fzero.plans.plan import Plan
from fzero.plans.staged import StagedPlan
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.step_spec import Parallelism, StepSpec
from sharding import Mesh

if TYPE_CHECKING:
    from fzero.estimation.pipelines import PipelinePlan
    from fzero.graph.timeline import StepTimeline
    from fzero.plans.machine_model import MachineModel

    Explained = StepTimeline | PipelinePlan


class DataParallel:
    """Every rank computes with the whole model."""

    is_uniform: ClassVar[bool] = True

    def staged(self, spec: StepSpec, mesh: Mesh, own: Plan) -> StagedPlan:
        return StagedPlan.of(own)

    def runtime(self, spec: StepSpec, axis: RankAxis | AbstractAxis) -> StepRuntime:
        return StepRuntime.make(spec, axis)


DATA_PARALLEL = DataParallel()


def chosen(pipeline: Any, mesh: Any) -> Parallelism | None:
    """The parallelism that arguments of `make_train_step` ask for. A mesh with an axis
    "pipe" asks for the usual order.

    None is `DATA_PARALLEL`.
    """
    if pipeline is None and "pipe" not in getattr(getattr(mesh, "mesh", mesh), "names", ()):
        return None
    return Pipeline() if pipeline is None else Pipeline.of(pipeline)


def parallelism_of(spec: StepSpec) -> Parallelism:
    """The parallelism of a step."""
    return DATA_PARALLEL if spec.parallelism is None else spec.parallelism


def explain(step: Any, batch: Any, *, machine: MachineModel | None) -> Explained:
    """See `TrainStep.explain`."""
    if parallelism_of(step.spec).is_uniform:
        return graph.explain.explain(step, batch, machine=machine)
    return estimation.pipelines.explain_pipeline(step, batch, machine=machine)
