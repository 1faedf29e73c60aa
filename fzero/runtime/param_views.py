"""`ParamViews`: the values that modules get instead of parameters, between two updates
on one rank.

It stands between the gather and the module. A value is computed from gathered
parameters and n, the number of updates so far; so it is the same in the forward, in the
backward's second gather and in all stages. It is kept until the update where
`stage3_max_live_parameters` has room for it (`kept_units`), and otherwise computed each
time its unit is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from fzero.model.transforms import Number, ParamView, PulledGrad, Size, Tensors, in_own_dtypes
from fzero.plans.plan import Plan, UnitPlan


def seen_numel(
    unit: UnitPlan, names: Collection[str], sizes: Mapping[str, Size] = {}
) -> dict[str, int]:
    """The elements of a unit's parameters with other values, by the dtype in which
    modules see them.

    Args:
        names: the parameters with views.
        sizes: the sizes of values whose size is not the parameter's.
    """
    found: dict[str, int] = {}
    homes = {name: buffer for buffer in unit.buffers for name in buffer.layout.names}
    for name in (name for name in homes if name in names):
        start, stop = homes[name].layout.bounds(name)
        numel, like = sizes.get(name, Size(stop - start, name))
        if numel:
            dtype = homes[like].dtypes.param
            found[dtype] = found.get(dtype, 0) + numel
    return found


def kept_units(
    plan: Plan, names: Collection[str], sizes: Mapping[str, Size] = {}
) -> frozenset[str]:
    """The gathered units whose values are kept from the forward to the backward, and
    for further micro-steps.

    Their elements count as live parameters. Units are taken in the order of
    declaration, as long as `stage3_max_live_parameters` has room beside the units that
    a step gathers at once.

    Args:
        names, sizes: see `seen_numel`.
    """
    room, kept = plan.max_live - plan.unit_rules.most_gathered(), set[str]()
    for unit in plan.units:
        numel = sum(seen_numel(unit, names, sizes).values()) if unit.gathered_numel else 0
        if 0 < numel <= room:
            room -= numel
            kept.add(unit.name)
    return frozenset(kept)


class ParamViews:
    """The values of the parameters that have views, by unit.

    Args:
        views: the views of each parameter, in the order of their application.
        num_updates: reads n; called only if there are views.
        buffers: the module buffers, which views may read.
        units: the plan whose `kept_units` are kept; None keeps none, for forwards
            without a backward.
        sizes: see `seen_numel`.

    Attributes:
        is_on: the parameters with another value now.
        relayed: those whose gradients train other parameters, too; these are needed
            even if the parameter is frozen.
    """

    def __init__(
        self,
        views: Mapping[str, tuple[ParamView, ...]],
        num_updates: Callable[[], Number],
        buffers: Tensors,
        *,
        units: Plan | None = None,
        sizes: Mapping[str, Size] = {},
    ) -> None:
        self._buffers, self._n = buffers, int(num_updates()) if views else 0
        on = {
            name: tuple(view for view in own if self._n >= view.offset)
            for name, own in views.items()
        }
        self.is_on = {name: own for name, own in on.items() if own}
        self.relayed = frozenset(
            name for name, own in self.is_on.items() if any(view.trains for view in own)
        )
        self._by_unit: dict[str, dict[str, Tensor]] = {}
        # per parameter: the tensors that its views share
        self._shared: dict[str, dict[str, Tensor]] = {}
        self._kept = (
            kept_units(units, self.is_on, sizes)
            if units is not None and self.is_on
            else frozenset[str]()
        )

    def of(self, unit: UnitPlan, full: Callable[[], Tensors]) -> dict[str, Tensor]:
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

    def among(self, full: Tensors) -> dict[str, Tensor]:
        """The values that differ from the parameters, for a model whose parameters are
        all gathered.
        """
        values = self._computed(sorted(self.is_on), full)
        self._shared.clear()  # no backward needs them
        return values

    def _computed(self, names: list[str], full: Tensors) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            value, tensors = full[name], {**full, **self._read(name)}
            with torch.no_grad(), in_own_dtypes(value):
                for view in self.is_on[name]:
                    if made := view.shared(value, tensors):
                        self._shared.setdefault(name, {}).update(made)
                        tensors |= made
                    value = view.value(value, tensors, self._n)
            found[name] = value
        return found

    def _read(self, name: str) -> dict[str, Tensor]:
        """The module buffers that the views of a parameter read, and the tensors that
        they share.
        """
        read = (key for view in self.is_on[name] for key in view.reads if key in self._buffers)
        return {key: self._buffers[key] for key in read} | self._shared.get(name, {})

    def forget(self, unit: str) -> dict[str, Tensor]:
        """Drops the values of a unit that is released, unless they are kept, and
        returns them.
        """
        values = {} if unit in self._kept else self._by_unit.pop(unit, {})
        for name in values if self._shared else ():
            self._shared.pop(name, None)
        return values

    def close(self) -> None:
        """Drops all values."""
        self._by_unit.clear()
        self._shared.clear()

    def pulled(
        self, name: str, grad: Tensor, full: Callable[[Collection[str]], Tensors]
    ) -> dict[str, PulledGrad]:
        """The gradients of a parameter and of those that its views train, from the
        gradient of its value.

        Args:
            full: returns parameters of its unit, by name; called where views need them.
        """
        views = self.is_on.get(name, ())
        last = max((index for index, view in enumerate(views) if view.needs_input), default=-1)
        with torch.no_grad(), in_own_dtypes(grad):
            tensors, inputs = self._read(name) if views else {}, dict[int, Tensor]()
            if last >= 0:
                read = [key for view in views for key in view.reads if key not in self._buffers]
                given = full((name, *read))
                tensors, value = {**given, **tensors}, given[name]
                for index, view in enumerate(views[: last + 1]):
                    inputs[index] = value
                    value = view.value(value, tensors, self._n) if index < last else value
            found, trained = PulledGrad(grad), dict[str, Tensor]()
            for index, view in reversed([*enumerate(views)]):
                found, of_others = view.pulled(found, inputs.get(index), tensors, self._n)
                for key, own in of_others.items():
                    trained[key] = trained[key] + own if key in trained else own
        return {name: found, **{key: PulledGrad(own) for key, own in trained.items()}}


NO_VIEWS = ParamViews({}, lambda: 0, {})
"""For a model without views."""
