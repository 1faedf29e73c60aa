"""`OutsideGrads`: gradients that reach a module's own parameters, from outside of the
engine's forwards.

A script may call a part of the module by itself (`engine.module.encode_image(x)`, a
submodule), and a loss may use weights (a penalty, weights tied by hand). Outside of a
forward the parameters that a rank holds in full are views of the state and leaves of
autograd. A hook of the node that would add a gradient to `.grad` gives it to the
backward of the engine instead, for which such uses are one more visit of a unit: it
ends when the last of the unit's nodes has run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fzero.deepspeed.engine.param_views import LiveParams, PartitionedParameter
from fzero.runtime.eager import ForwardBackward, expect

Takes = Callable[[str, Tensor | None], bool]
"""Takes the gradient of a parameter, by its name; returns whether `.grad` must not get
it.
"""


class OutsideGrads:
    """The nodes of a module's own parameters.

    Args:
        live: the parameters.
        takes: a method, of which only a weak reference is kept: autograd's nodes hold
            their hooks.
    """

    def __init__(self, live: LiveParams, takes: Takes) -> None:
        self._live, self._takes = live, WeakMethod(takes)
        self._nodes: dict[str, Any] = {}
        self._hooks: dict[str, Any] = {}
        self._missing = Counter[str]()  # per unit: gradients that the present backward will bring

    def watch(self) -> None:
        """Watches all parameters that this rank holds in full and that require
        gradients.
        """
        for name, param in self._live.own.items():
            if param.requires_grad and not isinstance(param, PartitionedParameter):
                node = get_gradient_edge(param).node
                if self._nodes.get(name) is not node:
                    self._nodes[name], self._hooks[name] = (
                        node,
                        node.register_prehook(self._hook(name)),
                    )

    def expect(self, work: ForwardBackward) -> None:
        """Called in autograd's backward before its first gradient: finds what it will
        bring, before any unit is reduced.
        """
        running = map(torch._C._will_engine_execute_node, self._nodes.values())
        self._missing = Counter(
            work.plan.param_units[name][0].name for name in compress(self._nodes, running)
        )
        if self._missing:
            expect(work, sorted(self._missing))

    @contextmanager
    def expected(self, work: ForwardBackward, loss: Tensor) -> Iterator[None]:
        """Inside, a backward of a loss begins with `expect`."""
        node: Any = loss.grad_fn
        hook = node.register_prehook(lambda grads: self.expect(work))
        try:
            yield
        finally:
            hook.remove()

    def add(self, work: ForwardBackward, name: str, grad: Tensor | None) -> None:
        """Gives a gradient to the present backward."""
        unit = work.plan.param_units[name][0].name
        work.add_grads(unit, (name,), (grad,))
        self._missing[unit] -= 1
        if self._missing[unit] == 0:
            work.end_visit(unit, (), ())

    def are_in(self, loss: Tensor) -> bool:
        """Whether the graph of a loss uses any of the parameters."""
        own, seen, nodes = (
            {*self._nodes.values()},
            set[Any](),
            list[Any]([get_gradient_edge(loss).node]),
        )
        while nodes:
            node = nodes.pop()
            if node in own:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [following for following, _ in node.next_functions]
        return False

    def close(self) -> None:
        """From here on `.grad` gets the gradients, as in any module."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    def _hook(self, name: str) -> Callable[[Any], Any]:
        find = self._takes

        def take(grads: Any) -> Any:
            takes = find()
            return (None,) if takes is not None and takes(name, *grads) else None

        return take
