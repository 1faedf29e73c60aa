"""`Captured`: one graph of a step, captured without running it, and what can be read from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from fzero.comms.records import CommRecord
from fzero.graph.remat import rematerialise
from fzero.graph.schedule import PassOptions, run_passes
from fzero.graph.timeline import Along, Timeline, make_timeline
from fzero.graph.traffic import sent_in
from fzero.plans.machine_model import MachineModel


class Captured(NamedTuple):
    """One graph of a step, captured on paper."""

    graph: torch.fx.Graph
    """Of aten operators; every node has its tensors, without memory, in `meta["val"]`."""
    units: dict[str, str]
    """The unit of each tensor that belongs to a flat buffer, by the name of its placeholder."""
    options: PassOptions
    checkpoint: dict[str, str]
    """The modules that the backward runs again."""
    axes: Mapping[str, Along]
    """The axis of each group, by its name in the graph."""

    def scheduled(self) -> Captured:
        """The graph as it runs: what is checkpointed is there twice, and all of it in order."""
        return self._replace(graph=run_passes(rematerialise(self.graph, self.checkpoint), self.options))

    def sent(self) -> list[CommRecord]:
        """What it sends, collective by collective."""
        return sent_in(self.graph, self.axes)

    def timeline(self, machine: MachineModel | None = None, *, title: str = "one step") -> Timeline:
        """The graph in time, in the order in which it stands."""
        return make_timeline(self.graph, machine, axes=self.axes, title=title)
