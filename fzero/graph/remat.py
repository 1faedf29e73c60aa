"""Which activations does the backward make again? Checkpointed modules keep their inputs, and their operators run twice.

The graph is that of a training step, with the module of each operator of the forward in `meta["nn_module_stack"]` and
with its backward traced inside `annotate(BACKWARD)`.

1. A *region* is what one call of a checkpointed module runs in the forward. What others read of it in the forward is its
   output, and stays; so does what it reads, its input.
2. Whatever else the backward reads of a region, it reads from a copy, that is made from the input just before the first
   such use. So the region's own tensors are free as soon as the forward is through with them.
3. Not repeated: random operators (their results stay; of dropout, its mask), collectives, operators of higher order, and
   what writes. Gathered parameters are nobody's copy: the second run is one more use of them, next to the backward's, for
   `run_passes` to plan.

The numbers do not change: every operator gets the bits that it got, or the same operator's of the same bits. The cost is
linear in the number of nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.analysis import analyse
from fzero.graph.nodes import aten, is_mutation, storages
from fzero.graph.schedule import copy_of

BACKWARD = {"fzero": "backward"}
"""What `torch.fx.traceback.annotate` must be given around the backward."""
_AGAIN = {"fzero": "again"}


class RematError(ValueError):
    """A module cannot be checkpointed in a graph."""


def is_backward(node: Node) -> bool:
    """Whether the node is of the backward, and no copy of a node of the forward."""
    return (node.meta.get("custom") or {}).get("fzero") == "backward"


def is_again(node: Node) -> bool:
    """Whether the node is the copy of a node of the forward."""
    return (node.meta.get("custom") or {}).get("fzero") == "again"


def rematerialise(graph: Graph, modules: Mapping[str, str]) -> Graph:
    """A copy of `graph` whose backward runs `modules` again.

    Args:
        graph: a training step's, functional but for `copy_` into placeholders at its end. One without a backward stays as
            it is.
        modules: the name of each module to checkpoint, by its key in `nn_module_stack`: its `id` as text, to which the
            second and later calls add `@1`, `@2`.

    Raises:
        RematError: the forward has no operator of one of the modules.
    """
    copy = copy_of(graph)
    rematerialise_in_place(copy, modules)
    return copy


def rematerialise_in_place(graph: Graph, modules: Mapping[str, str]) -> None:
    """`rematerialise` on the graph itself, as the hooks of Inductor want it."""
    nodes = list(graph.nodes)
    marked = [index for index, node in enumerate(nodes) if is_backward(node)]
    if not marked or not modules:
        return
    forward, backward, rest = nodes[: marked[0]], nodes[marked[0] : marked[-1] + 1], nodes[marked[-1] + 1 :]
    regions = _regions(forward, modules)
    again = _repeatable(graph, regions, [*forward, *rest])
    copies: dict[Node, Node] = {}
    for reader in backward:
        if any(arg in again for arg in reader.all_input_nodes):
            with graph.inserting_before(reader):
                for arg in reader.all_input_nodes:
                    _make(graph, arg, again, copies)
            reader.args, reader.kwargs = map_arg((reader.args, reader.kwargs), lambda arg: copies.get(arg, arg))
    graph.lint()


def _regions(forward: list[Node], modules: Mapping[str, str]) -> dict[Node, str]:
    """The region of each node that is in one: the key of the outermost module."""
    regions: dict[Node, str] = {}
    for node in forward:
        keys = [key for key in node.meta.get("nn_module_stack") or {} if key.partition("@")[0] in modules]
        if keys and node.op == "call_function":
            regions[node] = keys[0]
    found = {key.partition("@")[0] for key in regions.values()}
    missing = [name for key, name in modules.items() if key not in found]
    if missing:
        raise RematError(
            f"checkpoint: module {missing[0]!r} must run as a module of the captured forward, got no operator of it (it is "
            f"not called, or what calls it hides it); leave it out, or pass compile='block'"
        )
    return regions


def _repeatable(graph: Graph, regions: Mapping[Node, str], others: list[Node]) -> set[Node]:
    """What the backward may make again; `others` are the nodes outside of it."""
    roots = storages(graph)
    gathered = {node for gather in analyse(graph).gathers for node in (*gather.issue, *gather.settle)}
    stays = {
        roots[arg]
        for node in others
        for arg in node.all_input_nodes
        if arg in regions and regions.get(node) != regions[arg]
    }
    again: set[Node] = set()
    for node in regions:
        if roots[node] in stays or roots[node] not in regions or node in gathered:
            continue
        if node.target is operator.getitem:
            repeats = node.args[0] in again or _mask_of(node) is not None
        else:
            repeats = isinstance(node.target, torch._ops.OpOverload) and not (
                _is_random(node) or is_mutation(node) or node.target.namespace == "_c10d_functional"
            )
        if repeats:
            again.add(node)
    return again


def _is_random(node: Node) -> bool:
    """Whether another run would give other numbers. Attention is tagged so even where it drops nothing."""
    operator_ = node.target
    assert isinstance(operator_, torch._ops.OpOverload)
    if torch.Tag.nondeterministic_seeded not in operator_.tags:
        return False
    for index, argument in enumerate(operator_._schema.arguments):
        if argument.name == "dropout_p":
            return bool(node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0.0))
    return True


def _mask_of(node: Node) -> Node | None:
    """The mask of the dropout whose result the node is."""
    dropout = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if (
        not isinstance(dropout, Node)
        or dropout.target is not aten.native_dropout.default
        or dropout.args[2] is not True
    ):
        return None
    return next((user for user in dropout.users if user.args[1] == 1), None)


def _make(graph: Graph, wanted: Node, again: set[Node], copies: dict[Node, Node]) -> None:
    """Copies `wanted`, and before it what it is made of, at the graph's insertion point."""
    stack = [wanted]
    while stack:
        node = stack[-1]
        if node not in again or node in copies:
            stack.pop()
            continue
        mask = _mask_of(node)
        args = node.all_input_nodes if mask is None else node.all_input_nodes[0].all_input_nodes
        missing = [arg for arg in args if arg in again and arg not in copies]
        if missing:
            stack.extend(reversed(missing))
            continue
        if mask is None:
            copy = graph.node_copy(node, lambda arg: copies.get(arg, arg))
        else:
            copy = _dropped(graph, copies.get(args[0], args[0]), mask, node.args[0].args[1])  # type: ignore[union-attr]
        copies[stack.pop()] = copy
        copy.meta = {**node.meta, "custom": _AGAIN}


def _dropped(graph: Graph, x: Node, mask: Node, p: Any) -> Node:
    """What dropout made of `x`, by the mask of the first run: the operator's own two products, of the same bits."""
    kept = graph.call_function(aten.mul.Tensor, (x, mask))
    kept.meta = {**x.meta, "custom": _AGAIN}
    scale = 0.0 if p == 1 else 1 / (1 - p)
    val = x.meta["val"]
    if val.device.type == "cpu":  # whose kernel rounds the factor to the tensor's dtype first
        scale = torch.tensor(scale, dtype=val.dtype, device="cpu").item()
    return graph.call_function(aten.mul.Tensor, (kept, scale))
