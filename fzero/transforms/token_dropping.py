"""`DroppedTokens`: while a step runs, the chosen layers of its model see the tokens
that they keep (`fzero.data.RandomLTD`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from fzero.config.config import ConfigError
from fzero.data.schedules import Root, fewer_values
from fzero.data.token_dropping import Draw, TokenDropping
from fzero.model.transforms import Call, Changes, TransformedStep, Wrap

MOST_LENGTHS = 8
"""The largest number of different lengths (kept tokens, or a curriculum's) in a
compiled step; each is compiled anew.
"""


@dataclass(frozen=True)
class DroppedTokens:
    """The transform of layers that drop tokens."""

    plan: TokenDropping
    field: str = "random_ltd"

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. A length is a constant of a graph."""
        if spec.compile is not None:
            block = "data_efficiency.data_routing.random_ltd"
            check_lengths(
                block, self.plan.how.schedule, 0, ("seq_per_step", "min_value"), spec.compile
            )
        return Changes(
            name=self.field, text=str(self.plan), forwards=self._forwards, is_by_forward=True,
            constant=self.plan.length, num_constants=len(self.plan.lengths),
        )  # fmt: skip

    def _forwards(self, call: Call) -> Mapping[str, Wrap]:
        if not call.is_counted:
            return {}

        def draw() -> Draw:
            return Draw(call.constant, call.num_updates(), call.micro(), call.rank, call.num_micro)

        return dict.fromkeys(self.plan.names, partial(self.plan.forward_of, draw=draw))


def check_lengths(
    block: str, lengths: Root, start: int, keys: tuple[str, str], compile: str
) -> None:
    """Raises a ConfigError if a schedule has more lengths than may be compiled.

    Args:
        block: the block of the configuration that sets the schedule.
        start: the first number that the schedule gets.
        keys: the block's keys for the distance of lengths and for the smallest.
    """
    if (num := len(lengths.values(start))) > MOST_LENGTHS:
        fewer = fewer_values(lengths, MOST_LENGTHS, start)
        also = "" if fewer.minimum == lengths.minimum else f" and {keys[1]} to {fewer.minimum}"
        raise ConfigError(
            f"{block}: must have at most {MOST_LENGTHS} lengths with compile={compile!r}, which "
            f"compiles each of them, got {num}; set {keys[0]} to {fewer.multiple} (now "
            f"{lengths.multiple}){also}, or leave compile out"
        )
