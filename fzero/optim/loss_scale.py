"""The loss scale, as a pure state machine. It multiplies the loss, so that small fp16
gradients do not vanish.

The gradients of a scaled loss are divided by the scale before the update. If any
gradient is not finite on any rank (an *overflow*), the update is skipped and the scale
may shrink; after many good steps it grows. The rules are those of DeepSpeed for ZeRO
stages 1 to 3 (`fp16.*` keys), for all stages. The host reads no value: the machine is
part of the data flow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from fzero.optim.transforms import Leaf

FACTOR = 2.0


class LossScale(NamedTuple, Generic[Leaf]):
    """The machine's state: three 0-d tensors."""

    scale: Leaf
    """The factor of the next loss; float32."""
    hysteresis: Leaf
    """The number of overflows, from now on, after which the scale shrinks; int64."""
    num_good: Leaf
    """Steps since the last overflow; int64."""


@dataclass(frozen=True, slots=True)
class LossScaling:
    """The rules of the machine; `LossScaling()` never changes its scale of 1.

    Args:
        initial: the first scale.
        dynamic: False keeps the scale.
        window: the scale doubles in a good step that follows `window` good steps, and
            again every `window` good steps.
        hysteresis: the number of overflows that halve the scale. Then each overflow
            halves it, until the scale grows.
        consecutive: every good step resets the hysteresis, so that only consecutive
            overflows count.
        minimum: the smallest scale.

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
        scale = torch.tensor(self.initial, dtype=torch.float32, device=device)
        return LossScale(
            scale, torch.tensor(self.hysteresis, device=device), torch.tensor(0, device=device)
        )

    def update(self, state: LossScale[Tensor], overflow: Tensor) -> LossScale[Tensor]:
        """The state after a step. `overflow` is a 0-d bool, the same on all ranks."""
        if not self.dynamic:
            return state
        scale, hysteresis, num_good = state
        shrinks = overflow & (hysteresis <= 1)
        grows = ~overflow & (num_good > 0) & (num_good % self.window == 0)
        restored = grows | (~overflow if self.consecutive else torch.zeros_like(overflow))
        left = hysteresis - (overflow & ~shrinks).to(hysteresis.dtype)
        return LossScale(
            torch.where(
                shrinks,
                (scale / FACTOR).clamp(min=self.minimum),
                torch.where(grows, scale * FACTOR, scale),
            ),
            torch.where(restored, torch.full_like(hysteresis, self.hysteresis), left),
            torch.where(overflow, torch.zeros_like(num_good), num_good + 1),
        )

    def is_exhausted(self, state: LossScale[Tensor], overflow: Tensor) -> Tensor:
        """Whether the scale would have to shrink below its minimum, so that training
        cannot go on (0-d bool).
        """
        if not self.dynamic:
            return torch.zeros_like(overflow)
        return overflow & (state.hysteresis <= 1) & (state.scale <= self.minimum)
