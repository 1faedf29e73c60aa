"""`SeenCompressed`: the compressed values that modules get in place of parameters, in one forward-backward on one rank.

It stands between the gather and the module. A value is computed from the gathered parameters and n, the number of updates so far;
so it is the same in the forward, in the backward's second gather and in all stages. It is kept until the update where
`stage3_max_live_parameters` has room for it (`kept_units`), and otherwise computed each time its unit is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from fzero.compression.plan import CompressionPlan, PulledGrad
from fzero.plans.plan import Plan, UnitPlan
from fzero.runtime.seen_params import SeenParams


def seen_numel(unit: UnitPlan, names: Collection[str]) -> dict[str, int]:
    """The elements of a unit's compressed parameters, by the dtype in which modules see them.

    Args:
        names: the compressed parameters.
    """
    found: dict[str, int] = {}
    for buffer in unit.buffers:
        numel = sum(stop - start for start, stop in map(buffer.layout.bounds, names_in(buffer.layout.names, names)))
        if numel:
            found[buffer.dtypes.param] = found.get(buffer.dtypes.param, 0) + numel
    return found


def names_in(names: Collection[str], among: Collection[str]) -> list[str]:
    """Those of the names that are also in the other collection, in their order."""
    return [name for name in names if name in among]


def kept_units(plan: Plan, names: Collection[str]) -> frozenset[str]:
    """The gathered units whose compressed values are kept from the forward to the backward, and for further micro-steps.

    Their elements count as live parameters. Units are taken in the order of declaration, as long as
    `stage3_max_live_parameters` has room beside the units that a step gathers at once.

    Args:
        names: the compressed parameters.
    """
    room, kept = plan.max_live - plan.unit_rules.most_gathered(), set[str]()
    for unit in plan.units:
        numel = sum(seen_numel(unit, names).values()) if unit.gathered_numel else 0
        if 0 < numel <= room:
            room -= numel
            kept.add(unit.name)
    return frozenset(kept)


class SeenCompressed(SeenParams):
    """The values of the parameters that a plan compresses, by unit.

    Args:
        plan: the compression of each parameter.
        n: the number of updates so far.
        buffers: the module buffers, with the masks.
        units: the plan whose `kept_units` are kept; None keeps none, for forwards without a backward.

    Attributes:
        is_on: the parameters that are compressed now.
        scored: the parameters whose gradients train scores; these gradients are needed even if the parameters are frozen.
    """

    def __init__(
        self, plan: CompressionPlan, n: int, buffers: Mapping[str, Tensor], *, units: Plan | None = None
    ) -> None:
        self._plan, self._n = plan, n
        self._by_unit: dict[str, dict[str, Tensor]] = {}
        self._buffers = buffers
        self._masks: dict[str, Tensor] = {}  # of those units, as they were made
        self.is_on = {name for name in plan.params if plan.on(name, n)}
        self._kept = kept_units(units, self.is_on) if units is not None and self.is_on else frozenset[str]()
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
        """The values that differ from the parameters, for a model whose parameters are all gathered."""
        values = self._computed(sorted(self.is_on), full)
        self._masks.clear()  # no backward needs them
        return values

    def _computed(self, names: list[str], full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            tensors = {**full}
            for name in names:
                tensors |= self._reads(name)
            made = self._plan.made_masks(names, self._n, tensors)
            self._masks |= made
            tensors |= made
            return {name: self._plan.seen(name, full[name], self._n, tensors) for name in names}

    def _reads(self, name: str) -> dict[str, Tensor]:
        """The masks that the techniques of a parameter read: buffers, and those that were made."""
        found: dict[str, Tensor] = {}
        for technique in self._plan.params[name]:
            for key, home in ((technique.reads, self._buffers), (technique.made, self._masks)):
                if key is not None and key in home:
                    found[key] = home[key]
        return found

    def forget(self, unit: str) -> dict[str, Tensor]:
        """Drops the values of a unit that is released, unless they are kept, and returns them."""
        values = {} if unit in self._kept else self._by_unit.pop(unit, {})
        if self._masks:
            for name in values:
                for technique in self._plan.params[name]:
                    self._masks.pop(technique.made or "", None)
        return values

    def close(self) -> None:
        """Drops all values."""
        self._by_unit.clear()
        self._masks.clear()

    def pulled(
        self, name: str, grad: Tensor, full: Callable[[Collection[str]], Mapping[str, Tensor]]
    ) -> dict[str, PulledGrad]:
        """The gradients of a parameter and of its scores, from the gradient of its compressed value.

        Args:
            full: returns parameters of its unit, by name; called where scores need them.
        """
        if name not in self.is_on:
            return {name: PulledGrad(grad)}
        with torch.no_grad():
            given = full((name, *self._plan.scores_of(name))) if name in self.scored else {}
            return self._plan.pulled(name, grad, self._n, {**given, **self._reads(name)}, lambda: given[name])
