"""Autograd nodes that call a `ForwardBackward` in the backward.

A forward has one `UnitRoot` for each unit that it visits. Its outputs are the
parameters, if all are small. Else its output is a handle, the input of a `ParamLeaf`
for each large parameter and of one for all small ones: a node of autograd keeps the
gradients of its outputs until it runs, and costs some 10 µs of Python. So a large
gradient is written as soon as it is there, and a gradient by parameters, which code
asks for with `torch.autograd.grad`, runs none of these nodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.model.errors import UNRELATED

SMALL = 1 << 16
"""The most elements of a parameter that shares a node with others."""


class UnitRoot(torch.autograd.Function):
    """A unit in a forward, and its small parameters: views of flat buffers, whose
    gradients are written into a flat gradient.

    The backward runs once every gradient of the unit is there. The gradient of a
    parameter without a name is dropped; such an output only marks the graph as
    belonging to `work`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        work: Any,
        unit: str,
        names: Sequence[str],
        views: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        ctx.index = work.forwards.last_index
        return _prepared(ctx, work, unit, names, views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.work.end_visit(ctx.unit, ctx.names, grads)
        return None, None, None, None, None


class ParamLeaf(torch.autograd.Function):
    """Parameters as the model sees them: like outputs of `UnitRoot`, but their
    gradients are written before it runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        work: Any,
        unit: str,
        names: Sequence[str],
        views: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        return _prepared(ctx, work, unit, names, views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.work.add_grads(ctx.unit, ctx.names, grads)
        return None, None, None, None, None


def _prepared(
    node: Any, work: Any, unit: str, names: Sequence[str], views: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    # in a sequence, the views are no inputs, and become the outputs themselves
    node.work, node.unit, node.names, given = work, unit, names, work.given
    if given.is_shared:
        # Where forwards share nodes, these run as soon as their gradients are there, like PyTorch's
        # own nodes of leaves: autograd would run the node last that was made first, and keep its
        # gradients until then.
        node._set_sequence_nr((1 << 64) - 1)
    node.set_materialize_grads(False)
    if given.gives_again:
        node.save_for_backward(*views)
    return tuple(views)


# To the model a parameter must look like a leaf: `module.tied = parameter` tests the truth of its
# grad_fn.
for _node in (UnitRoot, ParamLeaf):
    _node._backward_cls.__bool__ = lambda node: False  # type: ignore[attr-defined]
# Not `Function.apply`, whose care for torch.func takes as long as the node itself; no transform is
# active where nodes are made.
root_of: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, UnitRoot).apply
leaf_of: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, ParamLeaf).apply


def works_of(loss: Tensor) -> list[Any]:
    """Every `ForwardBackward` in the graph of a loss, in graph order, which is the same
    on all ranks.
    """
    return list({id(node.work): node.work for node in roots_in(loss)}.values())


Visits = dict[int, Counter[str]]
"""For each forward, by its number: 1 for each unit that it visits, whose node a
backward runs once.
"""


def visits_of(loss: Tensor, work: Any) -> Visits:
    """The visits, in the forwards of one `ForwardBackward`, that a backward of the loss
    goes back through.
    """
    if not loss.requires_grad:
        raise ValueError(UNRELATED)
    return work.forwards.last_alone or visits_in(loss, work)


def visits_in(loss: Tensor, work: Any) -> Visits:
    """The visits of the forwards of one `ForwardBackward` in the graph of a loss."""
    return _counted(node for node in roots_in(loss) if node.work is work)


def running_visits(work: Any) -> Visits:
    """As `visits_of`, for the backward that autograd runs now; empty if that needs no
    gradients of parameters.
    """
    running = _counted(
        node for node in work.forwards.roots if torch._C._will_engine_execute_node(node)
    )
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
