"""`OutsideGrads`: gradients that reach a module's own parameters, from outside of the engine's forwards.

A script may call a part of the module by itself (`engine.module.encode_image(x)`, a submodule), and a loss may use weights (a
penalty, weights tied by hand). Outside of a forward the parameters that a rank holds in full are views of the state and leaves of
autograd. A hook of the node that would add a gradient to `.grad` gives it to the backward of the engine instead, which counts
such a use as another visit of the parameter's unit: its gradients are complete when the last of these nodes has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fzero.engine.param_views import LiveParams, PartitionedParameter

Takes = Callable[[str, Tensor | None], bool]
"""Takes the gradient of a parameter, by its name; returns whether `.grad` must not get it."""


class OutsideGrads:
    """The nodes of a module's own parameters.

    Args:
        live: the parameters.
        takes: a method, of which only a weak reference is kept: autograd's nodes hold their hooks.
    """

    def __init__(self, live: LiveParams, takes: Takes) -> None:
        self._live, self._takes = live, WeakMethod(takes)
        self._nodes: dict[str, Any] = {}
        self._hooks: dict[str, Any] = {}

    def watch(self) -> None:
        """Watches all parameters that this rank holds in full and that require gradients."""
        for name, param in self._live.own.items():
            if param.requires_grad and not isinstance(param, PartitionedParameter):
                node = get_gradient_edge(param).node
                if self._nodes.get(name) is not node:
                    self._nodes[name], self._hooks[name] = node, node.register_prehook(self._hook(name))

    def running(self) -> list[str]:
        """The parameters of which autograd's present backward will bring gradients."""
        return list(compress(self._nodes, map(torch._C._will_engine_execute_node, self._nodes.values())))

    @contextmanager
    def expected(self, loss: Tensor, expect: Callable[[list[str]], object]) -> Iterator[None]:
        """Inside, a backward of a loss first calls `expect` with these parameters, if there are any."""

        def begin(grads: Any) -> None:
            if names := self.running():
                expect(names)

        assert loss.grad_fn is not None
        hook = loss.grad_fn.register_prehook(begin)
        try:
            yield
        finally:
            hook.remove()

    def are_in(self, loss: Tensor) -> bool:
        """Whether the graph of a loss uses any of the parameters."""
        own, seen, nodes = {*self._nodes.values()}, set[Any](), [get_gradient_edge(loss).node]
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
