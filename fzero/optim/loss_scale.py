"""By how much is the loss multiplied, so that small fp16 gradients do not vanish? A pure state machine.

The gradients of a scaled loss are divided by the scale before the update. If any of them is not finite on any rank (an
*overflow*) the update is skipped and the scale may shrink; after many good steps it grows. The machine is DeepSpeed's for
ZeRO stages 1 to 3 (`fp16.*` keys), used in all stages. It is data-flow: no value is read by the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Leaf = TypeVar("Leaf")
FACTOR = 2.0


class LossScale(NamedTuple, Generic[Leaf]):
    """The machine's state: three 0-d tensors."""

    scale: Leaf
    """What the next loss is multiplied by; float32."""
    hysteresis: Leaf
    """How many overflows there may be until the scale shrinks, that one included; int64."""
    num_good: Leaf
    """Steps since the last overflow; int64."""


@dataclass(frozen=True, slots=True)
class LossScaling:
    """The rules of the machine; `LossScaling()` never changes its scale of 1.

    Args:
        initial: the first scale.
        dynamic: False keeps the scale.
        window: the scale doubles when so many good steps have passed before a good one, and again after as many.
        hysteresis: overflows that it takes to halve the scale. Once used up it stays so until the scale grows.
        consecutive: every good step gives the hysteresis back, so that only overflows in a row count.
        minimum: the scale does not fall below.

    >>> rules = LossScaling(initial=4.0, dynamic=True, window=3, hysteresis=2, minimum=1.0)
    >>> state = rules.init()
    >>> for overflow in (True, True):
    ...     state = rules.update(state, torch.tensor(overflow))
    >>> state.scale.item(), state.hysteresis.item()
    (2.0, 1)
    """

    initial: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0

    def init(self, device: torch.device | str = "cpu") -> LossScale[Tensor]:
        return LossScale(
            torch.tensor(self.initial, dtype=torch.float32, device=device),
            torch.tensor(self.hysteresis, device=device),
            torch.tensor(0, device=device),
        )

    def update(self, state: LossScale[Tensor], overflow: Tensor) -> LossScale[Tensor]:
        """The state after a step. `overflow` is a 0-d bool, the same on all ranks."""
        if not self.dynamic:
            return state
        scale, hysteresis, num_good = state
        shrinks = overflow & (hysteresis <= 1)
        grows = ~overflow & (num_good > 0) & (num_good % self.window == 0)
        restored = grows | (~overflow if self.consecutive else torch.zeros_like(overflow))
        return LossScale(
            torch.where(shrinks, (scale / FACTOR).clamp(min=self.minimum), torch.where(grows, scale * FACTOR, scale)),
            torch.where(
                restored,
                torch.full_like(hysteresis, self.hysteresis),
                hysteresis - (overflow & ~shrinks).to(hysteresis.dtype),
            ),
            torch.where(overflow, torch.zeros_like(num_good), num_good + 1),
        )

    def is_exhausted(self, state: LossScale[Tensor], overflow: Tensor) -> Tensor:
        """Whether the scale would have to shrink and stands at its minimum: training cannot go on (0-d bool)."""
        if not self.dynamic:
            return torch.zeros_like(overflow)
        return overflow & (state.hysteresis <= 1) & (state.scale <= self.minimum)
