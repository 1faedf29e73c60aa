"""Autograd nodes that call a `ForwardBackward` in the backward.

A visit of a unit is one `UnitRoot`. Its outputs are the small parameters of the unit and, if there are large ones, a handle: the
input of a `ParamLeaf` for each large parameter. A node of autograd keeps the gradients of its outputs until it runs, and costs
some 10 µs of Python. So small parameters share a node, and a large gradient is written as soon as it is there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fzero.model.errors import NOT_USED, UNRELATED, lost_again

SMALL = 1 << 16
"""The most elements of a parameter that shares the node of its visit."""


class UnitRoot(torch.autograd.Function):
    """One visit of a unit, and its small parameters: views of flat buffers, whose gradients are written into a flat gradient.

    The backward runs once every gradient of the visit is there. The gradient of a parameter without a name is dropped; such an
    output only marks the graph as belonging to `work`.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, work: Any, unit: str, names: Sequence[str], views: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:  # in a sequence, the views are no inputs, and become the outputs themselves
        ctx.work, ctx.unit, ctx.names, ctx.index = work, unit, names, work.forwards.last_index
        ctx.is_again = not work.given.is_open
        _run_early(ctx)
        ctx.set_materialize_grads(False)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.work.again.came(ctx.names, grads, is_again=ctx.is_again)
        ctx.work.end_visit(ctx.unit, ctx.names, grads)
        return None, None, None, None, None


class ParamLeaf(torch.autograd.Function):
    """A large parameter as the model sees it: like an output of `UnitRoot`, but its gradient is written at once."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, view: Tensor, work: Any, unit: str, name: str) -> Tensor:
        ctx.work, ctx.unit, ctx.name = work, unit, name
        ctx.is_again = not work.given.is_open
        _run_early(ctx)
        ctx.set_materialize_grads(False)
        return view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.work.again.came((ctx.name,), grads, is_again=ctx.is_again)
        ctx.work.add_grads(ctx.unit, (ctx.name,), grads)
        return None, None, None, None, None


def _run_early(node: Any) -> None:
    """Where forwards share nodes, these run as soon as their gradients are there, like PyTorch's own nodes of leaves: autograd
    would run the node last that was made first, and keep its gradients until then."""
    if node.work.given.shared is not None:
        node._set_sequence_nr((1 << 64) - 1)


# To the model a parameter must look like a leaf: `module.tied = parameter` tests the truth of its grad_fn.
for _node in (UnitRoot, ParamLeaf):
    _node._backward_cls.__bool__ = lambda node: False  # type: ignore[attr-defined]
# Not `Function.apply`, whose care for torch.func takes as long as the node itself; no transform is active where nodes are made.
root_of: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, UnitRoot).apply
leaf_of: Callable[..., Tensor] = super(torch.autograd.Function, ParamLeaf).apply


def works_of(loss: Tensor) -> list[Any]:
    """Every `ForwardBackward` in the graph of a loss, in graph order, which is the same on all ranks."""
    return list({id(node.work): node.work for node in roots_in(loss)}.values())


Visits = dict[int, Counter[str]]
"""For each forward, by its number: how often it visits each unit."""


def visits_of(loss: Tensor, work: Any) -> Visits:
    """The visits, in the forwards of one `ForwardBackward`, that a backward of the loss goes back through."""
    if not loss.requires_grad:
        raise ValueError(UNRELATED)
    return work.forwards.last_alone or visits_in(loss, work)


def visits_in(loss: Tensor, work: Any) -> Visits:
    """The visits of the forwards of one `ForwardBackward` in the graph of a loss."""
    return _counted(node for node in roots_in(loss) if node.work is work)


def running_visits(work: Any) -> Visits:
    """As `visits_of`, for the backward that autograd runs now; empty if that needs no gradients of parameters."""
    running = _counted(node for node in work.forwards.roots if torch._C._will_engine_execute_node(node))
    return running and (work.forwards.last_alone or running)


def _counted(roots: Iterable[Any]) -> Visits:
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for node in roots:
        found[node.index][node.unit] += 1
    return found


def roots_in(loss: Tensor) -> Iterator[Any]:
    """The `UnitRoot` nodes in the graph of a loss."""
    seen: set[Any] = {None}
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if isinstance(node, UnitRoot._backward_cls):  # type: ignore[attr-defined]
                yield node
            nodes += [following for following, _ in node.next_functions]


class ReadAgain:
    """The parameters that modules read again in the backwards of a first step, by themselves.

    A function of autograd may run a module in its backward. There the parameters are new tensors. If it differentiates by those
    of its forward, the gradient would be lost. `is_on`: whether this is the first step.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on, self._read, self._without = is_on, set[str](), set[str]()

    def read(self, name: str) -> None:
        """Records that a backward reads a trained parameter, with gradients enabled."""
        if self.is_on:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
            # `torch.utils.checkpoint` takes the saved tensors of this graph only.
            if hooks is None or "_recomputation_hook" not in getattr(hooks[0], "__qualname__", ""):
                self._read.add(name)

    def came(self, names: Iterable[str], grads: Iterable[Tensor | None], *, is_again: bool) -> None:
        """Records the end of a visit that a forward or (`is_again`) a backward has made."""
        if self.is_on and is_again:
            self._read.difference_update(names)  # autograd goes through what has run again
        elif self.is_on:
            self._without.update(name for name, grad in zip(names, grads) if name and grad is None)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raises ValueError at the end of a backward if a parameter was read in it, and its visit got no gradient."""
        try:
            yield
        except RuntimeError as error:
            if not (self._read and NOT_USED in str(error)):
                raise
            self._without |= self._read
        if lost := self._read & self._without:
            raise lost_again(min(lost))
