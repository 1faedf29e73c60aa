"""A backward in two parts: first the gradients of a chunk's inputs, for which another
stage waits; later those of its weights.

1. The nodes of the graph from which an input can be reached form the *trunk*. A
  *branch* leaves the trunk and leads to weights.
2. `cut_backward` runs the trunk, and keeps the gradients that arrive at each node with
  a branch.
3. The function that it returns runs these nodes again for their branches alone, and
  then the branches.

So no gradient is computed twice: a node computes only those that are asked for. Where
two nodes of the trunk share a branch (a weight that is used twice), the second part is
the whole backward again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Branching(NamedTuple):
    """A node of the trunk with branches, and the gradients that arrived at it."""

    node: Any
    branches: list[GradientEdge]
    arrived: list[Tensor | None]


def cut_backward(
    roots: Sequence[Any], grads: Sequence[Tensor | None], inputs: Sequence[GradientEdge]
) -> tuple[list[Tensor | None], Callable[[], None]]:
    """The gradients of some inputs, and a function that computes the gradients of the
    weights.

    Args:
        roots: tensors or edges where the backward begins.
        grads: the gradients there; None is 1, for a scalar.
        inputs: outputs of nodes of the graph, at least one.
    """
    borders = {edge.node for edge in inputs}
    trunk = _trunk([_node(root) for root in roots], borders)
    outside = {None, *trunk, *borders}
    found = [
        Branching(
            node,
            [GradientEdge(child, nr) for child, nr in node.next_functions if child not in outside],
            [],
        )
        for node in trunk
    ]
    found = [one for one in found if one.branches]
    hooks = [one.node.register_prehook(one.arrived.extend) for one in found]
    try:
        of_inputs = torch.autograd.grad(
            roots, list(inputs), grads, retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    again = partial(torch.autograd.backward, list(roots), list(grads))
    return list(of_inputs), again if _share(found, borders) else partial(_run_branches, found)


def _run_branches(nodes: Sequence[Branching]) -> None:
    edges: list[GradientEdge] = []
    grads: list[Tensor] = []
    for node, branches, arrived in nodes:
        outputs = [
            (GradientEdge(node, nr), grad) for nr, grad in enumerate(arrived) if grad is not None
        ]
        if outputs:
            starts, given = zip(*outputs, strict=True)
            of_branches = torch.autograd.grad(starts, branches, given, allow_unused=True)
            found = [
                (edge, grad)
                for edge, grad in zip(branches, of_branches, strict=True)
                if grad is not None
            ]
            edges += [edge for edge, _ in found]
            grads += [grad for _, grad in found]
    if edges:
        torch.autograd.backward(edges, grads)


def _share(nodes: Sequence[Branching], borders: set[Any]) -> bool:
    """Whether the first node of a branch can be reached from two nodes of the trunk by
    branches.
    """
    counts: Counter[Any] = Counter()
    for one in nodes:
        seen, stack = set[Any](), [edge.node for edge in one.branches]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += [
                    child
                    for child, _ in node.next_functions
                    if child is not None and child not in borders
                ]
        counts.update(seen)
    return any(counts[edge.node] > 1 for one in nodes for edge in one.branches)


def _node(root: Any) -> Any:
    return root.grad_fn if isinstance(root, Tensor) else root.node


def _trunk(roots: Sequence[Any], targets: set[Any]) -> list[Any]:
    """The nodes from which a target can be reached, without the targets."""
    reaches: dict[Any, bool] = dict.fromkeys(targets, True)
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        if is_done:
            reaches[node] = any(reaches.get(child, False) for child in children)
        elif node not in reaches:
            reaches[node] = False  # until its children are known
            stack.append((node, True))
            stack += [(child, False) for child in children if child not in reaches]
    return [node for node, does in reaches.items() if does and node not in targets]
