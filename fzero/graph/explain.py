"""`explain`: the timeline of a train step, from the graphs that `compile="step"` captures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fzero.common.arguments import check_kind
from fzero.graph.timeline import Timeline, joined, make_timeline
from fzero.plans.machine_model import MachineModel
from fzero.plans.mesh_axes import describe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from torch.fx import Graph

    from fzero.graph.captured import Captured
    from fzero.plans.plan import Plan

    class Explained(Protocol):
        """The members of a train step that are read here."""

        @property
        def plan(self) -> Plan: ...
        @property
        def graphs(self) -> Sequence[Graph]: ...
        @property
        def graph_axes(self) -> Any: ...
        def trace(self, batch: Any) -> list[Captured]: ...


def explain(step: Explained, batch: Any, *, machine: MachineModel | None) -> Timeline:
    """See `TrainStep.explain`."""
    check_kind(
        "machine",
        machine,
        MachineModel | None,
        "a fzero.graph.MachineModel",
        "pass fzero.graph.MachineModel(flops=1e13), say",
    )
    title = f"stage {step.plan.stage} on {describe(step.plan.mesh)}"
    if batch is None:
        if not step.graphs:
            raise ValueError(
                "explain: needs a batch where no graph of the full step has run, got none; pass one, explain(batch), or "
                "make the step with compile='step' and call the step once"
            )
        graph = max(step.graphs, key=lambda graph: len(graph.nodes))
        return make_timeline(graph, machine, axes=step.graph_axes, title=title)
    captured = step.trace(batch)
    different = {id(c.graph): c for c in captured}  # micro-steps share a graph
    timelines = {key: c.scheduled().timeline(machine, title=title) for key, c in different.items()}
    return joined([timelines[id(c.graph)] for c in captured])
