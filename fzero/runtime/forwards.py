"""`Forwards`: the forwards of an accumulation window. They determine which gradients a backward expects, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.plans.flat_params import FlatParamPlan
from fzero.plans.plan import UnitPlan
from fzero.plans.unit_orders import Run


@dataclass(slots=True)
class Visit:
    """One visit of a unit by the model.

    Attributes:
        unit: its name.
        plan: the unit.
        leaves: its parameters as the model sees them, by name.
        is_recorded: whether the forward has used it with gradients, so that a backward will end the visit.
        forward: of which it is a part, or a part that runs again.
        is_kept: whether the model gets the same tensors again when it comes back to the unit, because nothing is gathered.
    """

    unit: str
    plan: UnitPlan
    leaves: dict[str, Tensor]
    forward: Forward
    is_recorded: bool = False
    is_kept: bool = False


class NodeOutputs(NamedTuple):
    """The parameters of a node of autograd, by name in the order of its outputs; "" is none."""

    node: Any
    names: Sequence[str]


@dataclass(slots=True)
class Forward:
    """One forward.

    Attributes:
        run: the name of its order of collectives.
        still: the trained parameters that require no gradients in it.
        visits: 1 for each unit that it visited with gradients.
        roots: the `UnitRoot` nodes of its visits.
        first_node: the number of the first node of autograd that it made, or a smaller one.
        kept: by unit, the visit that is kept.
        nodes: by unit that is gathered, its nodes of autograd, which give out the parameters again.
    """

    run: str
    still: frozenset[str]
    visits: Counter[str] = field(default_factory=Counter)
    roots: list[Any] = field(default_factory=list)
    first_node: int = field(default_factory=torch._C._autograd._get_sequence_nr)  # type: ignore[attr-defined]
    kept: dict[str, Visit] = field(default_factory=dict)
    nodes: dict[str, list[NodeOutputs]] = field(default_factory=dict)


class Forwards:
    """The forwards since the last update, and how many backwards went through them.

    Attributes:
        used: the names of the parameters of which a backward has produced a gradient on this rank.
        still: the trained parameters that have no gradient, because no forward required one, or the script has dropped it.
        begins: begins a backward of all ranks; called when the user starts autograd directly (`loss.backward()`).
    """

    def __init__(self, *, gathers: bool = True) -> None:
        self._gathers = gathers  # if they gather nothing, ranks may make different numbers of forwards
        self.used: set[str] = set()
        self.still: frozenset[str] = frozenset()
        self.begins: Callable[[], None] = lambda: None
        self._all: list[Forward] = []
        self._num_new = 0  # forwards since the last backward
        self._num_backwards = 0  # since the last forward
        self._is_kept = False  # whether a backward may go through a graph again

    @property
    def last(self) -> Forward:
        return self._all[-1]

    @property
    def of_node(self) -> Forward:
        """The forward of which a part runs again in the backward of the present node of autograd."""
        if not self._all:  # all parts ran outside of a forward, and a checkpoint of the script runs one again
            self._all.append(Forward("", self.still))
        node = torch._C._current_autograd_node()
        number = None if node is None or len(self._all) == 1 else node._sequence_nr()
        earlier = (forward for forward in reversed(self._all) if number is not None and forward.first_node <= number)
        return next(earlier, self.last)

    @property
    def roots(self) -> Iterator[Any]:
        """The `UnitRoot` nodes of all forwards."""
        return chain.from_iterable(forward.roots for forward in self._all)

    @property
    def last_index(self) -> int:
        return len(self._all) - 1

    def close(self) -> None:
        """Drops the references to the `ForwardBackward` and its state."""
        self.begins = lambda: None
        for forward in self._all:
            for held in (forward.roots, forward.kept, forward.nodes):
                held.clear()  # type: ignore[attr-defined]

    def begin(self, run: str, still: frozenset[str]) -> bool:
        """Records the start of a forward; returns whether it is the first since the last backward."""
        self.still = self.still & still if self._all else still
        self._all.append(Forward(run, still))
        self._num_new, self._num_backwards = self._num_new + 1, 0
        return self._num_new == 1

    def go_back(self, *, keeps: bool) -> None:
        """Records the start of a backward of these forwards; `keeps`: whether its graph is retained for another one."""
        self._is_kept |= keeps
        self._num_new, self._num_backwards = 0, self._num_backwards + 1

    def pass_through(self, *, keeps: bool) -> None:
        """Records that a backward of another step runs through some of these forwards."""
        self._is_kept |= keeps
        self._num_backwards += 1  # a unit that the forward left gathered is no longer gathered next time

    @property
    def last_alone(self) -> dict[int, Counter[str]] | None:
        """The visits of the last forward, if a backward can only belong to it (the usual case). With None the graph must be
        searched."""
        return {self.last_index: self.last.visits} if self._num_new == 1 and not self._is_kept else None

    def run_of(self, kind: str, forwards: Iterable[int]) -> Run:
        """The key of the order of collectives for a backward of `kind` through these forwards."""
        if not self._gathers:  # ranks may go back through different forwards, or none; all reduce the same units
            return (kind, self.still) if self.still else (kind,)
        # These say which unit is still gathered.
        of_each: Iterable[tuple[str | int, ...]] = (
            (self._all[index].run, self.last_index - index) for index in sorted(forwards)
        )
        still = [self._all[index].still for index in sorted(forwards) if index >= 0]
        return (kind, self._num_backwards, *chain.from_iterable(of_each), *(still if any(still) else ()))

    def still_buffers(self, buffers: Iterable[FlatParamPlan]) -> frozenset[str]:
        """The keys of the trained flat buffers whose parameters are all `still`; an update leaves them as they are."""
        still = self.still
        return frozenset(b.key for b in (buffers if still else ()) if b.trainable and still.issuperset(b.layout.names))


def sum_of(visits: Mapping[int, Counter[str]]) -> Counter[str]:
    """The total number of visits of each unit in these forwards."""
    return next(iter(visits.values())) if len(visits) == 1 else sum(visits.values(), Counter())
