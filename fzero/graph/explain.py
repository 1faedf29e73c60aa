"""`trace` and `explain`: the graphs that `compile="step"` captures, and the timeline of
a train step from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fzero.common.arguments import check_kind
from fzero.comms.mesh import unfolded
from fzero.graph.program import GraphProgram
from fzero.graph.timeline import StepTimeline, joined, make_timeline
from fzero.plans.machine_model import MachineModel
from fzero.plans.mesh_axes import describe

if TYPE_CHECKING:
    from typing import Protocol

    from fzero.graph.captured import Captured
    from fzero.plans.plan import Plan
    from fzero.runtime.step_runtime import StepRuntime

    class Explained(Protocol):
        """The members of a train step that are read here."""

        runtime: StepRuntime
        plan: Plan

        @property
        def program(self) -> GraphProgram | None: ...


def trace(step: Explained, batch: Any) -> list[Captured]:
    """See `TrainStep.trace`."""
    if step.runtime.spec.is_part:
        raise ValueError(
            "trace: a pipeline runs in no graph, got one; explain(batch) predicts its stages over "
            "time"
        )
    micro_batches, program = list(step.runtime.batches.split(batch)), step.program
    if program is None or program.until == "gradients":  # in a dry run all state is on the device
        program = GraphProgram.make(step.runtime, "aot_eager", until="update")
    return program.trace(step.runtime, micro_batches)


def explain(step: Explained, batch: Any, *, machine: MachineModel | None) -> StepTimeline:
    """See `TrainStep.explain`."""
    check_kind(
        "machine",
        machine,
        MachineModel | None,
        "a fzero.graph.MachineModel",
        "pass fzero.graph.MachineModel(flops=1e13), say",
    )
    title = f"stage {step.plan.stage} on {describe(unfolded(step.plan.mesh, step.plan.seq_size))}"
    if batch is None:
        graphs = step.program.compiled.graphs if step.program else []
        if step.program is None or not graphs:
            raise ValueError(
                "explain: needs a batch where no graph of the full step has run, got none; pass "
                "one, explain(batch), or make the step with compile='step' and call the step once"
            )
        graph = max(graphs, key=lambda graph: len(graph.nodes))
        return make_timeline(graph, machine, axes=step.program.compiled.axes, title=title)
    captured = trace(step, batch)
    different = {id(c.graph): c for c in captured}  # micro-steps share a graph
    timelines = {key: c.scheduled().timeline(machine, title=title) for key, c in different.items()}
    return joined([timelines[id(c.graph)] for c in captured])
