"""`contents_of`: the parameters of this rank's part of a flat buffer, and the collectives
that reach the rest, for transforms that look at full parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

import fzero.optim as optim
from fzero.comms import collectives
from fzero.comms.mesh import AxisMesh
from fzero.comms.records import Label
from fzero.plans.plan import FlatParamPlan, Plan

NO_RANKS = "a step on an AbstractAxis updates nothing"


def contents_of(
    plan: Plan, buffer: FlatParamPlan, shard: int, mesh: AxisMesh[Any] | None
) -> optim.ShardContents:
    """The contents of shard number `shard` of a flat buffer, or of all of it if a rank
    updates all.

    Args:
        mesh: the axes for the collectives; None for ranks that update nothing.
    """
    contents = optim.ShardContents.whole(buffer.layout)
    if buffer.flow.updates == "shard":
        contents = optim.ShardContents(buffer.layout, (shard,), stack=partial(_stack, mesh))
    if buffer.key not in plan.owners:
        return contents
    return replace(
        contents,
        owners=plan.owners[buffer.key],
        places=plan.places,
        rank=0 if mesh is None else mesh.world.rank,
        exchange=partial(_exchange, mesh),
    )


def _stack(mesh: AxisMesh[Any] | None, partial_1K: Tensor) -> Tensor:
    assert mesh is not None, NO_RANKS
    return mesh.stack(partial_1K[0], label=Label("optimizer", phase="update"))


def _exchange(
    mesh: AxisMesh[Any] | None, x: Tensor, sent: list[int], received: list[int]
) -> Callable[[], Tensor]:
    assert mesh is not None, NO_RANKS
    label = Label("owners", phase="update")
    return collectives.start_exchange(x, sent, received, mesh.world, label=label).wait
