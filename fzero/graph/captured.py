"""`Captured`: one graph of a step, captured in a dry run, with its schedule, its
records of collectives and its timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.comms.records import CommRecord
from fzero.graph.remat import rematerialise
from fzero.graph.schedule import PassOptions, run_passes
from fzero.graph.timeline import Along, StepTimeline, make_timeline
from fzero.graph.traffic import sent_in
from fzero.plans.machine_model import MachineModel


class Captured(NamedTuple):
    """One graph of a step, captured in a dry run."""

    graph: torch.fx.Graph
    """The aten graph; `meta["val"]` of every node holds its tensors, without memory."""
    units: dict[str, str]
    """The unit of each tensor that belongs to a flat buffer, by the name of its
    placeholder.
    """
    options: PassOptions
    checkpoint: Sequence[str]
    """The modules that the backward runs again."""
    axes: Mapping[str, Along]
    """The mesh axis of each process group, by the group's name in the graph."""

    def scheduled(self) -> Captured:
        """The graph as it runs: checkpointed operators appear twice, and all nodes are
        in the scheduled order.
        """
        return self._replace(
            graph=run_passes(rematerialise(self.graph, self.checkpoint), self.options)
        )

    def sent(self) -> list[CommRecord]:
        """One record per collective and flat buffer, in order."""
        return sent_in(self.graph, self.axes)

    def timeline(
        self, machine: MachineModel | None = None, *, title: str = "one step"
    ) -> StepTimeline:
        """The timeline of the graph in its present order."""
        return make_timeline(self.graph, machine, axes=self.axes, title=title)
