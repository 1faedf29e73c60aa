"""`GivenParams`: the parameters that a forward got. It must not change them, or take a gradient with respect to those of one
visit alone.

PyTorch counts changes in place. A change through `.data` is found by comparing values before and after. That reads all
parameters twice, so a step does it only in the first forward of each kind, or as `check_params` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from fzero.model.errors import flag_changed, has_hook, marked, partial_grad, raise_named, was_changed
from fzero.model.fetched_parameters import new_marks, untraced
from fzero.model.own_params import bits_of, pass_as_parameter
from fzero.plans.plan import UnitPlan
from fzero.runtime.autograd_nodes import SMALL, leaf_of, root_of
from fzero.runtime.forwards import Forward
from sharding.views import unflatten


class GradCollector(Protocol):
    """A `ForwardBackward`, as the nodes of autograd see it."""

    @property
    def anchor(self) -> Tensor: ...


@dataclass(slots=True)
class Visit:
    """One visit of a unit by the model.

    Attributes:
        unit: its name.
        plan: the unit.
        leaves: its parameters as the model sees them, by name.
        is_recorded: whether the forward has used it with gradients, so that a backward will end the visit.
        is_shared: whether later forwards get the same parameters.
    """

    unit: str
    plan: UnitPlan
    leaves: dict[str, Tensor]
    is_recorded: bool = False
    is_shared: bool = False


class _Given(NamedTuple):
    """A parameter as it was passed to the model."""

    unit: str
    name: str
    leaf: Tensor
    view: Tensor
    address: int
    bits: Tensor
    requires_grad: bool

    @property
    def is_changed(self) -> bool:
        """Whether its values have changed, or the model has replaced its memory."""
        return self.leaf.data_ptr() != self.address or not torch.equal(bits_of(self.view), self.bits)

    @property
    def error(self) -> ValueError | None:
        """What the forward has done to the tensor that a parameter does not allow."""
        hooks, marks = (self.leaf._backward_hooks or {}).values(), untraced(new_marks)(self.leaf)
        is_kept = self.leaf.requires_grad is self.requires_grad
        if is_kept and not marks and all(isinstance(hook, _RefusesParts) for hook in hooks):
            return None
        if marks:
            return marked("parameter", self.name, marks[0])
        return has_hook(self.name) if is_kept else flag_changed(self.name)


@dataclass(frozen=True, slots=True)
class _RefusesParts:
    """A gradient hook on a parameter of a unit that is visited several times, by which the forward must not differentiate."""

    given: GivenParams
    name: str

    def __call__(self, grad: Tensor) -> None:
        """Raises ValueError inside the forward, where the model itself has asked for the gradient."""
        if self.given.is_open:
            raise partial_grad(self.name)


class GivenParams:
    """The parameters as they were passed to one forward.

    Args:
        scored: the parameters whose gradients train scores; these gradients are needed even if the parameters are frozen.

    Attributes:
        is_open: whether the forward runs.
        shared: the visits, by unit, that later forwards may have again; None if no visit is shared.
    """

    def __init__(self, scored: frozenset[str] = frozenset()) -> None:
        self._scored, self.is_open = scored, False
        self.shared: dict[str, Visit] | None = None
        self._given: list[_Given] | None = None  # None where values are not compared
        self.leaves: list[tuple[str, ref[Tensor]]] = []  # of a forward in which they are
        self._first: dict[str, list[ref[Tensor]]] = {}  # by unit, the leaves of the last forward's first visit

    def begin(self, *, compares: bool, shares: bool) -> None:
        """Begins a forward; whether values of its parameters are compared, and whether it may share them with other forwards."""
        self.is_open, self._given = True, [] if compares else None
        if not shares:
            self.shared = None

    def end(self) -> None:
        """Checks all parameters at the end of the forward; raises as `check` does."""
        self.check(None)
        self.is_open = False

    def share(self, shares: bool) -> None:
        """Whether from here on all forwards get the same parameters. Their graphs share nodes: a backward must get its visits."""
        self.shared = {} if shares else None

    def shared_visit(self, unit: UnitPlan, forward: Forward) -> Visit | None:
        """The first visit of a unit in an earlier forward, for its first visit in this one, if it is shared."""
        visit = self.shared.get(unit.name) if self.shared and unit.name not in forward.visits else None
        if visit is None or any(leaf._backward_hooks for leaf in visit.leaves.values()):  # a hook is of one forward
            return None
        visit.is_recorded = False
        return visit

    def name(self, error: RuntimeError) -> None:
        """Raises an error that names the parameter and the fix, in place of one of PyTorch about a parameter."""
        raise_named(error, self.was_changed)

    def visit(
        self,
        unit: UnitPlan,
        flats: Iterable[Tensor],
        forward: Forward,
        work: GradCollector | None,
        *,
        seen: Mapping[str, Tensor],
    ) -> Visit:
        """The parameters of a unit for one visit.

        Args:
            flats: its full flat buffers (P).
            forward: the present forward, or in a backward the last one.
            work: the `ForwardBackward` that collects the gradients; None where none are collected.
            seen: the compressed values that modules get in place of its parameters.
        """
        views: dict[str, Tensor] = {}
        for buffer, flat in zip(unit.buffers, flats, strict=True):
            views |= unflatten(flat, buffer.layout)
        if seen:
            views |= {name: seen[name].view_as(seen[name]) for name in views if name in seen}  # for this visit alone
        leaves = views if work is None else views | self._leaves(unit, views, forward, work)
        if self._given is not None and self.is_open:
            self._given += [
                _Given(unit.name, name, leaf, view, view.data_ptr(), bits_of(view), leaf.requires_grad)
                for view, (name, leaf) in zip(views.values(), leaves.items(), strict=True)
            ]
            self.leaves += [(name, ref(leaf)) for name, leaf in leaves.items()]
        for name, leaf in leaves.items():
            pass_as_parameter(leaf, name)
        if self.is_open and work is not None:
            self._refuse_parts(unit.name, leaves, is_first=not forward.visits[unit.name])
        visit = Visit(unit.name, unit, leaves)
        if self.shared is not None and unit.name not in forward.visits:  # each visit in a forward has nodes of its own
            visit.is_shared, self.shared[unit.name] = True, visit
        return visit

    def _leaves(
        self, unit: UnitPlan, views: Mapping[str, Tensor], forward: Forward, work: GradCollector
    ) -> dict[str, Tensor]:
        """The parameters whose gradients are collected, as outputs of the nodes of a visit."""
        names, still = unit.trained, forward.still
        if self._scored:
            names = tuple(name for name in views if name in names or name in self._scored)
        # A backward through a gathered unit gathers it again, so its graph needs a node of this object.
        is_marked = bool(still) and unit.gathered_numel > 0 and still.issuperset(unit.trained)
        if still and not is_marked:
            names = tuple(name for name in names if name not in still)
        if not names:
            return {}
        small = [name for name in names if views[name].numel() <= SMALL]
        labels = ["" if name in still else name for name in small] if still else small
        given = [views[name] for name in small]
        if len(small) == len(names):
            outputs = root_of(work.anchor, work, unit.name, labels, given)
            forward.roots.append(outputs[0].grad_fn)
            return dict(zip(small, outputs, strict=True))
        handle, *leaves = root_of(work.anchor, work, unit.name, ["", *labels], [work.anchor.new_empty(0), *given])
        forward.roots.append(handle.grad_fn)
        found = dict(zip(small, leaves, strict=True))
        for name in names:
            if name not in found:
                found[name] = leaf_of(handle, views[name], work, unit.name, "" if name in still else name)
        return found

    def _refuse_parts(self, unit: str, leaves: Mapping[str, Tensor], *, is_first: bool) -> None:
        """From a unit's second visit on, a gradient with respect to one of its parameters raises inside the forward.

        Such a gradient would contain the part of one visit only.

        Args:
            leaves: the trained parameters in this visit.
            is_first: whether this is the first visit in this forward.
        """
        if is_first:
            self._first[unit] = [*map(ref, leaves.values())]
            return
        held = (leaf() for leaf in self._first.pop(unit, ()))  # by the model
        for leaf in (*leaves.values(), *held):
            if leaf is not None and leaf.requires_grad:
                leaf.register_hook(_RefusesParts(self, leaf.fzero_name))  # type: ignore[attr-defined, no-untyped-call]

    def check(self, unit: UnitPlan | None) -> None:
        """Checks the parameters of a unit when the forward leaves it; with None those of all units, at the end of the forward.

        Raises:
            ValueError: a parameter has other values, another flag or a hook.
        """
        if not self._given:
            return
        name = "" if unit is None else unit.name
        for given in self._given:
            if error := given.error:
                raise error
        if unit is None or unit.gathered_numel:
            if any(given.is_changed for given in self._given if unit is None or given.unit == name):
                raise self.was_changed("of the model")
            self._given = None if unit is None else [given for given in self._given if given.unit != name]

    def was_changed(self, where: str) -> ValueError:
        """The error for a parameter that a forward has changed, with its name where it is known."""
        names = [given.name for given in self._given or () if given.is_changed]
        self._given = None
        return was_changed(names[0] if names else None, where)
