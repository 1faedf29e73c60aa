"""The ZeRO stages as rows of a table: the specs of parameters, gradients and optimizer
state.

A stage decides which of the three every rank holds in full, and which are sharded (ZeRO
§5, figure 1). A step asks the row, never for the number of the stage; that is for
DeepSpeed's names, files and tables. `tests/laws/test_stage_rows.py` adds a row between
stages 2 and 3, and trains with it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sharding import DATA, Partial, Replicated, Sharded, Spec

Stage = int | str
"""A row's name: the number of a stage of ZeRO, or text ("2.5")."""


class StageSpecs(NamedTuple):
    """The specs that one ZeRO stage gives the three quantities of a flat buffer.

    Attributes:
        params, grads, optimizer: how each lies on the ranks.
        gathers: how often sharded parameters are gathered: for each use of a unit in a
            forward or a backward, or once in a step.
    """

    params: Spec
    grads: Spec
    optimizer: Spec
    gathers: Literal["each use", "once"] = "each use"

    def shards(self, quantity: Literal["params", "grads", "optimizer"]) -> bool:
        """Whether a rank holds only a shard of a quantity.

        >>> [name for name, row in STAGES.items() if row.shards("grads")]
        [2, 3]
        """
        return isinstance(getattr(self, quantity), Sharded)

    @property
    def number(self) -> int:
        """The number of the stage for those who know ZeRO's four.

        >>> [row.number for row in STAGES.values()]
        [0, 1, 2, 3, 3]
        """
        return 3 if self.shards("params") else self.shards("optimizer") + self.shards("grads")

    def over(self, axes: tuple[str, ...]) -> StageSpecs:
        """The row where gradients and optimizer state are sharded over `axes`, those of
        the finest shards.

        >>> STAGES[3].over(("data", "node"))[:3]
        (Sharded('data'), Sharded('data', 'node'), Sharded('data', 'node'))
        """
        grads, optimizer = (
            Sharded(*axes) if isinstance(spec, Sharded) else spec
            for spec in (self.grads, self.optimizer)
        )
        return self._replace(grads=grads, optimizer=optimizer)

    @property
    def gathered(self) -> StageSpecs:
        """The row of parameters that every rank holds: of small ones, and inside a step
        that gathers once.

        >>> STAGES[3].gathered == STAGES[2], STAGES["3 once"].gathered == STAGES[1]
        (True, True)
        """
        return self._replace(params=Replicated(), gathers="each use")


STAGES: dict[Stage, StageSpecs] = {
    0: StageSpecs(params=Replicated(), grads=Replicated(), optimizer=Replicated()),
    1: StageSpecs(params=Replicated(), grads=Partial(DATA), optimizer=Sharded(DATA)),
    2: StageSpecs(params=Replicated(), grads=Sharded(DATA), optimizer=Sharded(DATA)),
    3: StageSpecs(params=Sharded(DATA), grads=Sharded(DATA), optimizer=Sharded(DATA)),
    # Stage 3 in a pipeline: gradients are reduced once in a step, too.
    "3 once": StageSpecs(
        params=Sharded(DATA), grads=Partial(DATA), optimizer=Sharded(DATA), gathers="once"
    ),
}
