"""`StagedPlan`: the plans of all stages of a pipeline, and which ranks of the job hold each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fzero.plans.mesh_axes import PIPE
from fzero.plans.plan import Plan
from sharding import Mesh


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The plan of a job: one for each stage of its pipeline, or the only one.

    Args:
        mesh: of all ranks of the job.
        stages: the plan of each stage, by its coordinate on the axis "pipe".
    """

    mesh: Mesh
    stages: tuple[Plan, ...]

    @classmethod
    def of(cls, plan: Plan | Self) -> Self:
        """The plan of a job without a pipeline, as one stage.

        >>> import torch
        >>> from fzero.plans.plan_spec import plan
        >>> StagedPlan.of(plan(torch.nn.Linear(2, 2), {}, world_size=3)).ranks(0)
        (0, 1, 2)
        """
        return cls(plan.mesh, (plan,)) if isinstance(plan, Plan) else plan

    @property
    def world_size(self) -> int:
        """The number of ranks, of all stages together."""
        return self.mesh.size

    def ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks of the job that hold a stage, in the order of `Plan.ranks`."""
        has_pipe = PIPE in self.mesh.names
        own = [rank for rank in range(self.mesh.size) if not has_pipe or self.mesh.coordinate(rank)[PIPE] == stage]
        return tuple(own[rank] for rank in self.stages[stage].ranks)
