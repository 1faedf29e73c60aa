"""A backward in two parts: first the gradients of a chunk's inputs, which the stage before it waits for, later those of its weights.

1. The nodes of the graph from which an input can be reached form the *trunk*. A *branch* leaves the trunk and leads to weights only.
2. `backward_inputs` runs the trunk, and keeps the gradients that arrive at each node with a branch.
3. `backward_weights` runs these nodes again for their branches alone, and then the branches.

No gradient is computed twice: a node computes only the gradients that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Branching(NamedTuple):
    """A node of the trunk with branches, and the gradients that arrived at it."""

    node: Any
    branches: list[GradientEdge]
    arrived: list[Tensor | None]


def backward_inputs(
    roots: Sequence[Any], grads: Sequence[Tensor | None], inputs: Sequence[GradientEdge]
) -> tuple[list[Tensor | None], list[Branching]]:
    """The gradients of some inputs, and what `backward_weights` needs.

    Args:
        roots: tensors or edges where the backward begins.
        grads: the gradients there; None is 1, for a scalar.
        inputs: outputs of nodes of the graph.
    """
    trunk = _trunk([_node(root) for root in roots], {edge.node for edge in inputs})
    found: list[Branching] = []
    hooks = []
    for node in trunk:
        branches = [GradientEdge(child, nr) for child, nr in node.next_functions if child is not None and child not in trunk]
        branches = [edge for edge in branches if edge.node not in {one.node for one in inputs}]
        if branches:
            one = Branching(node, branches, [])
            found.append(one)
            hooks.append(node.register_prehook(one.arrived.extend))
    try:
        of_inputs = torch.autograd.grad(roots, list(inputs), grads, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return list(of_inputs), found


def backward_weights(nodes: Sequence[Branching]) -> None:
    """Runs the branches: every weight's node gets its gradient."""
    edges: list[GradientEdge] = []
    grads: list[Tensor] = []
    for node, branches, arrived in nodes:
        outputs = [(GradientEdge(node, nr), grad) for nr, grad in enumerate(arrived) if grad is not None]
        if outputs:
            of_branches = torch.autograd.grad(
                [edge for edge, _ in outputs], branches, [grad for _, grad in outputs], allow_unused=True
            )
            found = [(edge, grad) for edge, grad in zip(branches, of_branches, strict=True) if grad is not None]
            edges += [edge for edge, _ in found]
            grads += [grad for _, grad in found]
    if edges:
        torch.autograd.backward(edges, grads)


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
