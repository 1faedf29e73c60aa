"""Moves states between steps of different stage, world size, layout or placement; reads
and writes single full parameters, and clips queries and keys (`clip_qk`).

May import: step, simulation and below. Begin with `fzero.resharding.reshard`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.resharding.plan import (
        JobRank as JobRank,
        ReshardPlan as ReshardPlan,
        plan_reshard as plan_reshard,
    )
    from fzero.resharding.qk_clip import QueryKey as QueryKey, clip_qk as clip_qk
    from fzero.resharding.reshard import reshard_all as reshard_all, staged_plan as staged_plan
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "plan": "JobRank ReshardPlan plan_reshard",
            "qk_clip": "QueryKey clip_qk",
            "reshard": "reshard_all staged_plan",
        },
    )
