"""`clip_qk`: the clip of queries and keys of MuonClip (Kimi K2, arXiv:2507.20534,
algorithm 1), on the weights of a state.

Shape letters: H heads, R rows of a projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.resharding.parameters import weight_of, with_weight
from fzero.state import TrainState
from fzero.step import TrainStep
from sharding.checks import check_at_least


@dataclass(frozen=True, slots=True)
class QueryKey:
    """The rows of an attention's weights that make queries and keys.

    Args:
        query, key: the names of the parameters.
        num_heads: of queries.
        num_key_heads: fewer heads of keys, each shared by neighbouring heads of
            queries; None has as many.
        query_rows, key_rows: half-open bounds of the rows; None takes all.

    >>> QueryKey.of_fused("h.0.qkv.weight", num_heads=2, num_rows=12).key_rows
    (4, 8)
    """

    query: str
    key: str
    num_heads: int
    num_key_heads: int | None = None
    query_rows: tuple[int, int] | None = None
    key_rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_at_least("QueryKey", "num_heads", self.num_heads, 1)
        if self.num_heads % self.key_heads:
            raise ValueError(
                f"QueryKey: num_key_heads must divide num_heads={self.num_heads}, got "
                f"{self.num_key_heads}; give those of the model"
            )

    @classmethod
    def of_fused(cls, name: str, *, num_heads: int, num_rows: int) -> QueryKey:
        """Those of one parameter of `num_rows` rows: queries, then keys, then values."""
        third = num_rows // 3
        return cls(name, name, num_heads, None, (0, third), (third, 2 * third))

    @property
    def key_heads(self) -> int:
        """The heads of keys."""
        return self.num_key_heads or self.num_heads


def clip_qk(
    step: TrainStep,
    state: TrainState[Tensor],
    max_logits: Mapping[QueryKey, Tensor],
    *,
    threshold: float = 100.0,
) -> TrainState[Tensor]:
    """The state after the clip: where a head's largest attention logit m is above the
    threshold, its rows of query and key are multiplied by the root of threshold / m, so
    that the same input has logits of at most the threshold.

    Key heads that several query heads share shrink for the largest of their logits,
    and the query heads by the rest. Call it after an update. Weights and masters are
    written in place; nothing is read or written if no head is above.

    *Collective:* every rank, with the same attentions; sends (W-1) · H logits. Where a
    head is above it, also a gather of that parameter's flat buffer.

    Args:
        max_logits: by attention, the largest logit of each head (H,) in this rank's
            batch: of the softmax's input, its scale included.

    Raises:
        ValueError: the rows are no equal heads, or there is not one logit for each head.
    """
    if not threshold > 0:
        raise ValueError(f"clip_qk: threshold must be above 0, got {threshold}; 100 is usual")
    for attention, logits in max_logits.items():
        if logits.shape != (attention.num_heads,):
            raise ValueError(
                f"clip_qk: max_logits of {attention.query!r} must have the shape "
                f"({attention.num_heads},), one for each head, got {tuple(logits.shape)}; take "
                f"the largest logit over batch and positions"
            )
    if not max_logits:
        return state
    own = torch.cat(
        [logits.detach().to(step.device, torch.float32) for logits in max_logits.values()]
    )
    largest = collectives.stack(own, step.runtime.mesh.world).amax(dim=0)
    parts = torch.split(largest, [attention.num_heads for attention in max_logits])
    for attention, of_heads in zip(max_logits, parts, strict=True):
        factors = (threshold / of_heads).clamp(max=1.0)
        if bool((factors < 1).any()):
            state = _shrunk(step, state, attention, factors)
    return state


def _shrunk(
    step: TrainStep, state: TrainState[Tensor], attention: QueryKey, factors_H: Tensor
) -> TrainState[Tensor]:
    of_keys = factors_H.view(attention.key_heads, -1).amin(dim=1).sqrt()
    of_queries = factors_H / of_keys.repeat_interleave(attention.num_heads // attention.key_heads)
    for name, bounds, factors in (
        (attention.query, attention.query_rows, of_queries),
        (attention.key, attention.key_rows, of_keys),
    ):
        weight = weight_of(step, state, name).clone()
        start, stop = bounds or (0, len(weight))
        if not 0 <= start < stop <= len(weight) or (stop - start) % len(factors):
            raise ValueError(
                f"clip_qk: rows {start} to {stop} of parameter {name!r} must be {len(factors)} "
                f"equal heads of its {len(weight)} rows; correct the QueryKey"
            )
        rows = weight[start:stop]
        rows.mul_(factors.to(rows).repeat_interleave(len(rows) // len(factors)).unsqueeze(1))
        state = with_weight(step, state, name, weight)
    return state
