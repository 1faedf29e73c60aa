"""`SeenParams`: what the modules of one forward-backward see of compressed parameters, on one rank.

It stands between the gather and the module. A value is computed once for each stay of its unit, from the gathered parameters
and n, the number of updates so far; so it is the same in the forward, in the backward's second gather and in all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fzero.compression.plan import CompressionPlan
from fzero.plans.plan import UnitPlan


class SeenParams:
    """The values of the parameters that a plan compresses, by unit.

    Args:
        plan: what compresses each parameter.
        n: the number of updates so far.
        buffers: the module buffers, with the masks.

    Attributes:
        is_on: the parameters that are compressed now.
        scored: the parameters whose gradient trains scores, also where they are frozen themselves.
    """

    def __init__(self, plan: CompressionPlan, n: int, buffers: Mapping[str, Tensor]) -> None:
        self._plan, self._n, self._buffers = plan, n, buffers
        self._by_unit: dict[str, dict[str, Tensor]] = {}
        self.is_on = {name for name in plan.params if plan.on(name, n)}
        self.scored = frozenset(name for name in self.is_on if plan.scores_of(name))

    def of(self, unit: UnitPlan, full: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The values that differ from the parameters of a unit in use, by name.

        Args:
            full: returns all its parameters.
        """
        if not self.is_on:
            return {}
        found = self._by_unit.get(unit.name)
        if found is None:
            names = [name for b in unit.buffers for name in b.layout.names if name in self.is_on]
            found = self._by_unit[unit.name] = self._computed(names, full() if names else {})
        return found

    def among(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values that differ from the parameters, for a model whose parameters are all there."""
        return self._computed(sorted(self.is_on), full)

    def _computed(self, names: list[str], full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            tensors = {**self._buffers, **full}
            return {name: self._plan.seen(name, full[name], self._n, tensors) for name in names}

    def forget(self, unit: str) -> dict[str, Tensor]:
        """Drops the values of a unit that is released, and returns them."""
        return self._by_unit.pop(unit, {})

    def pulled(self, name: str, grad: Tensor, full: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The gradients of a parameter and of its scores, from the gradient of the value that a module saw.

        Args:
            full: returns all parameters of its unit; called where scores need them.
        """
        if name not in self.is_on:
            return {name: grad}
        with torch.no_grad():
            given = full() if name in self.scored else {}
            tensors = {**self._buffers, **given}
            return self._plan.pulled(name, grad, self._n, tensors, lambda: given[name])
