"""`SeenParams`: the values that modules get in one forward-backward. Without compression these are the parameters themselves.

`fzero.runtime.seen_compressed.SeenCompressed` is for compressed parameters, and documents the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from fzero.plans.plan import UnitPlan

if TYPE_CHECKING:
    from fzero.compression.plan import PulledGrad


class SeenParams:
    """Parameters none of which is compressed.

    Attributes:
        is_on: the parameters that are compressed now.
        scored: the parameters whose gradients train scores; these gradients are needed even if the parameters are frozen.
    """

    is_on: Collection[str] = frozenset()
    scored: frozenset[str] = frozenset()

    def of(self, unit: UnitPlan, full: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The values that differ from the parameters of a unit in use, by name."""
        return {}

    def among(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values that differ from the parameters, for a model whose parameters are all gathered."""
        return {}

    def forget(self, unit: str) -> dict[str, Tensor]:
        """Drops the values of a unit that is released, and returns them."""
        return {}

    def close(self) -> None:
        """Drops all values."""

    def pulled(self, name: str, grad: Tensor, full: Callable[..., Mapping[str, Tensor]]) -> dict[str, PulledGrad]:
        """The gradients of a compressed parameter and of its scores, from the gradient of the value that a module saw."""
        raise AssertionError(f"{name} is not compressed")
