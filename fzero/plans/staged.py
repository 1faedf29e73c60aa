"""`StagedPlan`: the plan of a job, of each part (stage) of its model, and which ranks
hold each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fzero.plans.plan import Plan
from sharding import Mesh


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The plan of a job: one for each stage of its model, or the only one.

    Args:
        mesh: the mesh of all ranks of the job.
        stages: the plan of each stage.
        members: the ranks of the job that hold each stage, in order.
    """

    mesh: Mesh
    stages: tuple[Plan, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plan: Plan | Self) -> Self:
        """The plan of a job whose ranks all have the whole model, as one stage.

        >>> import torch
        >>> from fzero.plans.plan_spec import plan
        >>> StagedPlan.of(plan(torch.nn.Linear(2, 2), {}, world_size=3)).ranks(0)
        (0, 1, 2)
        """
        return (
            cls(plan.mesh, (plan,), (tuple(range(plan.mesh.size)),))
            if isinstance(plan, Plan)
            else plan
        )

    @property
    def world_size(self) -> int:
        """The number of ranks, of all stages together."""
        return self.mesh.size

    def ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks of the job that hold a stage, in the order of `Plan.ranks`."""
        return tuple(self.members[stage][rank] for rank in self.stages[stage].ranks)
