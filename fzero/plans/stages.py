"""The ZeRO stages as rows of a table: the specs of parameters, gradients and optimizer state.

A stage decides which of the three every rank holds in full, and which are sharded (ZeRO §5, figure 1).
"""

from __future__ import annotations

from typing import NamedTuple

from fzero.comms.axes import DATA
from sharding import Partial, Replicated, Sharded, Spec


class StageSpecs(NamedTuple):
    """The specs that one ZeRO stage gives the three quantities of a flat buffer."""

    params: Spec
    grads: Spec
    optimizer: Spec


STAGES = {
    0: StageSpecs(params=Replicated(), grads=Replicated(), optimizer=Replicated()),
    1: StageSpecs(params=Replicated(), grads=Partial(DATA), optimizer=Sharded(DATA)),
    2: StageSpecs(params=Replicated(), grads=Sharded(DATA), optimizer=Sharded(DATA)),
    3: StageSpecs(params=Sharded(DATA), grads=Sharded(DATA), optimizer=Sharded(DATA)),
}


GATHERED_ONCE = StageSpecs(params=Sharded(DATA), grads=Partial(DATA), optimizer=Sharded(DATA))
"""Stage 3 in a pipeline: a step gathers parameters once, for all micro-batches, and reduces gradients once, as stage 1."""


def stage_specs(stage: int, axes: tuple[str, ...], *, gathers_once: bool = False) -> StageSpecs:
    """The specs of a stage where gradients and optimizer state are sharded over `axes`.

    Args:
        stage: of ZeRO.
        axes: of the finest shards.
        gathers_once: whether stage 3 keeps what it has gathered until the step ends.

    >>> stage_specs(3, ("data", "node"))
    StageSpecs(params=Sharded('data'), grads=Sharded('data', 'node'), optimizer=Sharded('data', 'node'))
    """
    row = GATHERED_ONCE if gathers_once and stage == 3 else STAGES[stage]
    finest = {"grads": row.grads, "optimizer": row.optimizer}
    return row._replace(**{part: Sharded(*axes) for part, spec in finest.items() if isinstance(spec, Sharded)})
