"""`Forwards` and `GivenParams`: the forwards of an accumulation window, and the
parameters that each of them got.

The forwards determine which gradients a backward expects, in which order. They must not
change their parameters.

A forward has one node of autograd per unit, however often it visits the unit. A unit
that is gathered again has new tensors, and these are outputs of the same node. So a
gradient by any of them, which the model itself may ask for, is by the parameter.

PyTorch counts changes in place. A change through `.data` is found by comparing values
before and after. That reads all parameters twice, so a step does it only in the first
forward of each kind, or as `check_params` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fzero.model.errors import (
    INSIDE,
    flag_changed,
    has_hook,
    lost_again,
    marked,
    raise_named,
    was_changed,
)
from fzero.model.own_params import bits_of, new_marks, pass_as_parameter, untraced
from fzero.plans.flat_params import FlatParamPlan
from fzero.plans.plan import UnitPlan
from fzero.plans.unit_orders import Run
from fzero.runtime.autograd_nodes import SMALL, leaf_of, root_of
from sharding.views import unflatten


@dataclass(slots=True)
class Visit:
    """One visit of a unit by the model.

    Attributes:
        unit: its name.
        plan: the unit.
        leaves: its parameters as the model sees them, by name.
        is_recorded: whether the forward has used it with gradients, so that a backward
            will end the visit.
        forward: the forward that it is a part of, or whose part runs again.
        is_kept: whether the model gets the same tensors again when it comes back to the
            unit, because nothing is gathered.
    """

    unit: str
    plan: UnitPlan
    leaves: dict[str, Tensor]
    forward: Forward
    is_recorded: bool = False
    is_kept: bool = False


class NodeOutputs(NamedTuple):
    """The parameters of a node of autograd, by name in the order of its outputs; "" is
    none.
    """

    node: Any
    names: Sequence[str]


@dataclass(slots=True)
class Forward:
    """One forward.

    Attributes:
        run: the name of its order of collectives.
        no_grad_names: the trained parameters that require no gradients in it.
        visits: 1 for each unit that it visited with gradients.
        roots: the `UnitRoot` nodes of its visits.
        first_node: the number of the first node of autograd that it made, or a smaller
            one.
        kept: by unit, the visit that is kept.
        nodes: by unit that is gathered, its nodes of autograd, which give out the
            parameters again.
    """

    run: str
    no_grad_names: frozenset[str]
    visits: Counter[str] = field(default_factory=Counter)
    roots: list[Any] = field(default_factory=list)
    first_node: int = field(default_factory=torch._C._autograd._get_sequence_nr)  # type: ignore[attr-defined]
    kept: dict[str, Visit] = field(default_factory=dict)
    nodes: dict[str, list[NodeOutputs]] = field(default_factory=dict)


@dataclass(slots=True)
class Forwards:
    """The forwards since the last update, and how many backwards went through them.

    Attributes:
        gathers: whether any unit is gathered; if not, ranks may make different numbers
            of forwards.
        used: the names of the parameters of which a backward has produced a gradient on
            this rank.
        no_grad_names: the trained parameters that have no gradient, because no forward
            required one, or the script has dropped it.
        last, last_index: the last forward, and its number; there is none before the
            first.
        begins: begins a backward of all ranks; called when the user starts autograd
            directly (`loss.backward()`).
    """

    gathers: bool = True
    used: set[str] = field(default_factory=set)
    no_grad_names: frozenset[str] = frozenset()
    begins: Callable[[], None] = lambda: None
    last: Forward = field(init=False)
    last_index: int = -1
    _all: list[Forward] = field(default_factory=list)
    _num_new: int = 0
    """Forwards since the last backward."""
    _num_backwards: int = 0
    """Backwards since the last forward."""
    _is_retained: bool = False
    """Whether a backward may go through a graph again."""

    @property
    def of_node(self) -> Forward:
        """The forward of which a part runs again in the backward of the present node of
        autograd.
        """
        # all parts ran outside of a forward, and a checkpoint of the script runs one again
        if not self._all:
            self.last = Forward("", self.no_grad_names)
            self._all.append(self.last)
            self.last_index += 1
        node = torch._C._current_autograd_node()
        number = None if node is None or len(self._all) == 1 else node._sequence_nr()
        earlier = (
            forward
            for forward in reversed(self._all)
            if number is not None and forward.first_node <= number
        )
        return next(earlier, self.last)

    @property
    def roots(self) -> Iterator[Any]:
        """The `UnitRoot` nodes of all forwards."""
        return chain.from_iterable(forward.roots for forward in self._all)

    def close(self) -> None:
        """Drops the references to the `ForwardBackward` and its state."""
        self.begins = lambda: None
        for forward in self._all:
            for held in (forward.roots, forward.kept, forward.nodes):
                held.clear()  # type: ignore[attr-defined]

    def begin(self, run: str, no_grad_names: frozenset[str]) -> bool:
        """Records the start of a forward; returns whether it is the first since the
        last backward.
        """
        self.no_grad_names = self.no_grad_names & no_grad_names if self._all else no_grad_names
        self.last = Forward(run, no_grad_names)
        self._all.append(self.last)
        self.last_index += 1
        self._num_new, self._num_backwards = self._num_new + 1, 0
        return self._num_new == 1

    def go_back(self, *, retain_graph: bool) -> None:
        """Records the start of a backward of these forwards; `retain_graph`: whether its graph
        is retained for another one.
        """
        self._is_retained |= retain_graph
        self._num_new, self._num_backwards = 0, self._num_backwards + 1

    def go_through(self, *, retain_graph: bool) -> None:
        """Records that a backward of another step runs through some of these forwards."""
        self._is_retained |= retain_graph
        # a unit that the forward left gathered is no longer gathered next time
        self._num_backwards += 1

    @property
    def last_alone(self) -> dict[int, Counter[str]] | None:
        """The visits of the last forward, if a backward can only belong to it (the
        usual case). With None the graph must be searched."""
        return (
            {self.last_index: self.last.visits}
            if self._num_new == 1 and not self._is_retained
            else None
        )

    def run_of(self, kind: str, forwards: Iterable[int]) -> Run:
        """The key of the order of collectives for a backward of `kind` through these
        forwards.
        """
        # ranks may go back through different forwards, or none; all reduce the same units
        if not self.gathers:
            return (kind, self.no_grad_names) if self.no_grad_names else (kind,)
        # These say which unit is still gathered.
        of_each: Iterable[tuple[str | int, ...]] = (
            (self._all[index].run, self.last_index - index) for index in sorted(forwards)
        )
        no_grad_names = [self._all[index].no_grad_names for index in sorted(forwards) if index >= 0]
        return (
            kind,
            self._num_backwards,
            *chain.from_iterable(of_each),
            *(no_grad_names if any(no_grad_names) else ()),
        )

    def skipped_buffers(self, buffers: Iterable[FlatParamPlan]) -> frozenset[str]:
        """The keys of the trained flat buffers whose parameters are all in
        `no_grad_names`; an update leaves them as they are.
        """
        no_grad_names = self.no_grad_names
        return frozenset(
            b.key
            for b in (buffers if no_grad_names else ())
            if b.trainable and no_grad_names.issuperset(b.layout.names)
        )


def sum_of(visits: Mapping[int, Counter[str]]) -> Counter[str]:
    """The total number of visits of each unit in these forwards."""
    return next(iter(visits.values())) if len(visits) == 1 else sum(visits.values(), Counter())


# --- their parameters -----------------------------------------------------------------------------


class GradCollector(Protocol):
    """A `ForwardBackward`, as the nodes of autograd see it."""

    @property
    def anchor(self) -> Tensor: ...


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
        return self.leaf.data_ptr() != self.address or not torch.equal(
            bits_of(self.view), self.bits
        )

    @property
    def error(self) -> ValueError | None:
        """The error for a change that a parameter does not allow, or None."""
        marks, is_kept = (
            untraced(new_marks)(self.leaf),
            self.leaf.requires_grad is self.requires_grad,
        )
        # torch.autograd.backward(..., inputs=parameters) sets such a gradient.
        if self.leaf.retains_grad and self.leaf.grad is not None:
            raise RuntimeError(INSIDE)
        if is_kept and not marks and not self.leaf._backward_hooks:
            return None
        if marks:
            return marked("parameter", self.name, marks[0])
        return has_hook(self.name) if is_kept else flag_changed(self.name)


@dataclass(slots=True)
class GivenParams:
    """The parameters as they were passed to one forward.

    Attributes:
        relayed: the parameters whose gradients train others (`ParamViews`); these are
            needed even if the parameters are frozen.
        is_open: whether the forward runs.
        is_shared: whether all forwards get the same parameters. Their graphs share
            nodes: a backward must get its visits.
        gives_again: whether the nodes that are made now save their outputs by name.
        compared: the parameters to be compared when the forward leaves their unit; None
            where values are not compared.
        leaves: of a forward whose parameters are compared.
    """

    relayed: frozenset[str] = frozenset()
    is_open: bool = False
    is_shared: bool = False
    gives_again: bool = False
    compared: list[_Given] | None = None
    leaves: list[tuple[str, ref[Tensor]]] = field(default_factory=list)
    _kept: dict[str, Visit] = field(default_factory=dict)
    """The visits of the last forward, if it is shared."""
    _views: dict[str, Tensor] = field(default_factory=dict)
    """What nodes give out now."""

    def begin(self, forward: Forward, *, compares: bool, shares: bool) -> None:
        """Begins a forward.

        Args:
            compares: whether values of its parameters are compared.
            shares: whether it may share its parameters with other forwards.
        """
        self.is_open, self.compared = True, [] if compares else None
        self.is_shared &= shares
        if self.is_shared:
            for unit, visit in self._kept.items():
                visit.is_recorded = False
                # a hook is of one forward
                if not any(leaf._backward_hooks for leaf in visit.leaves.values()):
                    forward.kept[unit] = visit
            self._kept = forward.kept

    def end(self) -> None:
        """Checks all parameters at the end of the forward; raises as `check` does."""
        if self.compared:
            self.check(None)
        self.is_open = False

    def share(self, shares: bool) -> None:
        """Whether from here on all forwards get the same parameters."""
        self.is_shared, self._kept = shares, {}

    def name(self, error: RuntimeError) -> None:
        """Raises an error that names the parameter and the fix, instead of one of
        PyTorch about a parameter.
        """
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
            forward: the present forward, or in a backward the one of which a part runs
                again.
            work: the `ForwardBackward` that collects the gradients; None where none are
                collected.
            seen: the values that modules get instead of some parameters.
        """
        views: dict[str, Tensor] = {}
        for buffer, flat in zip(unit.buffers, flats, strict=True):
            views |= unflatten(flat, buffer.layout)
        if seen:
            # for this visit alone
            views |= {name: seen[name].view_as(seen[name]) for name in views if name in seen}
        leaves = views if work is None else views | self._leaves(unit, views, forward, work)
        if self.compared is not None and self.is_open:
            self.compared += [
                _Given(
                    unit.name, name, leaf, view, view.data_ptr(), bits_of(view), leaf.requires_grad
                )
                for view, (name, leaf) in zip(views.values(), leaves.items(), strict=True)
            ]
            self.leaves += [(name, ref(leaf)) for name, leaf in leaves.items()]
        for name, leaf in leaves.items():
            pass_as_parameter(leaf, name)
        visit = Visit(unit.name, unit, leaves, forward)
        if self.is_open and not unit.gathered_numel:
            visit.is_kept, forward.kept[unit.name] = True, visit
        return visit

    def _again(
        self, nodes: Sequence[NodeOutputs], views: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The trained parameters of a unit that was gathered again, as outputs of the
        nodes of its first visit; empty if a backward inside the present one has freed
        these nodes. Raises ValueError where the node that autograd runs needs them."""
        found: dict[str, Tensor] = {}
        self._views.update(views)
        self._views[""] = torch.empty(0)
        try:
            for node, names in nodes:
                found |= {
                    name: leaf for name, leaf in zip(names, node.saved_tensors, strict=True) if name
                }
        except RuntimeError:
            present = torch._C._current_autograd_node()
            inputs = {node for node, _ in present.next_functions} if present is not None else set()
            if not inputs.isdisjoint(node for node, _ in nodes):
                raise lost_again(min(views)) from None
            return {}
        finally:
            self._views.clear()
        return found

    def _leaves(
        self, unit: UnitPlan, views: Mapping[str, Tensor], forward: Forward, work: GradCollector
    ) -> dict[str, Tensor]:
        """The parameters whose gradients are collected, as outputs of the nodes of a
        visit.
        """
        if unit.name in forward.nodes and (again := self._again(forward.nodes[unit.name], views)):
            return again
        names, no_grad_names = unit.trained, forward.no_grad_names
        if self.relayed:
            names = tuple(name for name in views if name in names or name in self.relayed)
        # A backward through a gathered unit gathers it again, so its graph needs a node of this
        # object.
        is_marked = (
            bool(no_grad_names)
            and unit.gathered_numel > 0
            and no_grad_names.issuperset(unit.trained)
        )
        if no_grad_names and not is_marked:
            names = tuple(name for name in names if name not in no_grad_names)
        if not names:
            return {}
        groups = [names]
        if unit.numel > SMALL:
            small = tuple(name for name in names if views[name].numel() <= SMALL)
            if len(small) < len(names):  # then the first node gives out a handle
                large = [(name,) for name in names if name not in small]
                groups = [("",), *filter(None, [small]), *large]
        nodes: list[NodeOutputs] = []
        found: dict[str, Tensor] = {}
        source, node_of = work.anchor, root_of
        with self._giving_again(unit, chain.from_iterable(groups)):
            for group in groups:
                given = [views[name] for name in group] if group[0] else [source.new_empty(0)]
                labels = (
                    ["" if name in no_grad_names else name for name in group]
                    if no_grad_names
                    else group
                )
                outputs = node_of(source, work, unit.name, labels, given)
                nodes.append(NodeOutputs(outputs[0].grad_fn, group))
                if not group[0]:
                    source, node_of = outputs[0], leaf_of
                else:
                    found.update(zip(group, outputs, strict=True))
        forward.roots.append(nodes[0].node)
        if self.gives_again:
            forward.nodes[unit.name] = nodes
        return found

    def _giving_again(self, unit: UnitPlan, names: Iterator[str]) -> AbstractContextManager[object]:
        """Inside, nodes save their outputs by name, so that they can give out other
        tensors as the same outputs.
        """
        self.gives_again = self.is_open and unit.gathered_numel > 0
        if not self.gives_again:
            return nullcontext()
        return saved_tensors_hooks(lambda output: next(names), self._views.__getitem__)  # type: ignore[return-value]

    def check(self, unit: UnitPlan | None) -> None:
        """Checks the parameters of a unit when the forward leaves it; with None those
        of all units, at the end of the forward.

        Raises:
            ValueError: a parameter has other values, another flag or a hook.
        """
        name = "" if unit is None else unit.name
        compared = self.compared or []
        for given in compared:
            if error := given.error:
                raise error
        if unit is None or unit.gathered_numel:
            if any(given.is_changed for given in compared if unit is None or given.unit == name):
                raise self.was_changed("of the model")
            self.compared = (
                None if unit is None else [given for given in compared if given.unit != name]
            )

    def was_changed(self, where: str) -> ValueError:
        """The error for a parameter that a forward has changed, with its name where it
        is known.
        """
        names = [given.name for given in self.compared or () if given.is_changed]
        self.compared = None
        return was_changed(names[0] if names else None, where)
