"""Nodes of a step's graph: the kind, size and cost of each operator, which nodes share
memory, and their order.

The graph is one functional fx graph of aten operators: forward, backward, collectives
and update. The state is its placeholders; `copy_` writes the new state into them at the
end.

1. Predicates (`is_collective`, `is_cheap`, …) and sizes of one node, in elements
  (`numel`) or bytes (`nbytes`).
2. `storages`: which nodes share memory (a view shares with its base, a `wait_tensor`
  with its collective).
3. `overwrites`: the order that in-place writes require; `sort` and `arrange` reorder
  the nodes.

The cost is linear in the number of nodes (`sort`: n log n).
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.common.flops import flops_of_call, is_counted
from fzero.comms.records import Label

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

WAIT = c10d.wait_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_GATHERS = c10d.all_gather_into_tensor_coalesced.default
"""Several all-gathers as one collective; it returns a list, and each item of it has a
wait of its own.
"""
GATHERS = frozenset(
    {
        c10d.all_gather_into_tensor.default,
        c10d.all_to_all_single.default,
        c10d.broadcast.default,
        ALL_GATHERS,
    }
)
"""Collectives that can implement an all-gather."""

_MOVES = frozenset(
    {
        operator.getitem,
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.repeat.default,
        aten.reshape.default,
        aten.stack.default,
        torch.ops.prims.convert_element_type.default,
    }
)
CREATES = frozenset(
    {
        *(
            aten.empty.memory_format,
            aten.full.default,
            aten.full_like.default,
            aten.new_empty.default,
        ),
        *(
            aten.new_full.default,
            aten.new_zeros.default,
            aten.ones.default,
            aten.scalar_tensor.default,
        ),
        *(aten.zeros.default, aten.zeros_like.default, aten.empty_like.default),
    }
)
_PASSES = frozenset(
    {
        *(aten.copy.default, aten.fill.Scalar, aten.lift_fresh_copy.default, aten.rsub.Tensor),
        *(aten.select_scatter.default, aten.slice_scatter.default, aten.where.ScalarOther),
    }
)
"""Operators that make one pass over their inputs but lack `torch.Tag.pointwise`."""


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective."""
    return _schema_name(node).startswith("_c10d_functional::") and node.target is not WAIT


def waits_of(start: Node) -> list[Node]:
    """The waits of a collective, one for each tensor that it returns."""
    results = [
        result
        for user in start.users
        for result in (user.users if user.target is operator.getitem else [user])
    ]
    return [result for result in results if result.target is WAIT]


def start_of(wait: Node) -> Node:
    """The collective that `wait` waits for."""
    result = wait.all_input_nodes[0]
    return result.all_input_nodes[0] if result.target is operator.getitem else result


def is_view(node: Node) -> bool:
    """Whether the node returns a view, and so copies nothing."""
    target = node.target
    return target is operator.getitem or (
        isinstance(target, torch._ops.OpOverload) and bool(target.is_view)
    )


def is_move(node: Node) -> bool:
    """Whether the node only views, casts, splits or concatenates its inputs."""
    return node.target in _MOVES or is_view(node)


def is_cheap(node: Node) -> bool:
    """Whether the node costs at most one pass over its inputs, and may run at any time
    after them.
    """
    if node.op != "call_function" or is_mutation(node):
        return False
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    if pointwise or is_move(node) or node.target in _PASSES or node.target in CREATES:
        return True
    return is_coding(node, "gather") or is_coding(node, "reduce")


def is_mutation(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def is_write(node: Node, roots: Mapping[Node, Node]) -> bool:
    """Whether the node writes into an argument of the graph."""
    return is_mutation(node) and roots[node].op in ("placeholder", "get_attr")


def label_of(node: Node) -> Label | None:
    """The label that the step gave the node (`fzero.comms.collectives.labelled`)."""
    label: Label | None = (node.meta.get("custom") or {}).get("sent")
    return label


def is_coding(node: Node, purpose: str) -> bool:
    """Whether the node is a repeatable part of a comm hook's encoding or decoding, for
    collectives of this purpose.
    """
    label = label_of(node)
    if label is None or label.purpose != purpose or node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not (
        is_collective(node)
        or node.target is WAIT
        or is_mutation(node)
        or is_effect(node)
        or is_random
    )


def is_effect(node: Node) -> bool:
    """Whether the node has an effect and no result, such as an assertion."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.returns
        and not is_mutation(node)
        and node.op == "call_function"
    )


def numel_of(node: Node) -> int:
    """Elements of the tensors that the node returns."""
    return sum(tensor.numel() for tensor in tensors_of(node.meta.get("val")))


def nbytes_of(node: Node) -> int:
    """Bytes of the tensors that the node returns."""
    return sum(
        tensor.numel() * tensor.element_size() for tensor in tensors_of(node.meta.get("val"))
    )


def flops_of(node: Node) -> int:
    """Floating point operations of a matrix product, a convolution or an attention; 0
    for other nodes.
    """
    if node.op != "call_function" or not is_counted(node.target):
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    return flops_of_call(node.target, args, kwargs, node.meta["val"])


def tensors_of(val: Any) -> list[Tensor]:
    if isinstance(val, Tensor):
        return [val]
    return (
        [tensor for item in val for tensor in tensors_of(item)]
        if isinstance(val, list | tuple)
        else []
    )


def _schema_name(node: Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


# --- shared memory --------------------------------------------------------------------------------


def storages(graph: Graph) -> dict[Node, Node]:
    """For each node, the node that allocated the memory of its result.

    The operators' schemas decide, not the recorded tensors: the copy of a node has the
    tensors of its original in `meta`, but allocates memory of its own.
    """
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        views = []
        base: Node | None = node
        while base is not None and base not in roots:
            views.append(base)
            base = _base(base)
        root = views[-1] if base is None else roots[base]
        roots.update(dict.fromkeys(views, root))
    return roots


def _base(node: Node) -> Node | None:
    """The input that shares memory with the node's result; None if the node allocates."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    base = node.all_input_nodes[0]
    if node.target is operator.getitem:
        return base if is_move(base) or is_collective(base) else None
    if node.target is WAIT or is_mutation(node):
        return base
    if node.target is aten.reshape.default:  # a copy only where no view exists
        return base if _shares(node, base) else None
    return base if is_view(node) else None


def _shares(node: Node, base: Node) -> bool:
    val, base_val = node.meta.get("val"), base.meta.get("val")
    if not isinstance(val, Tensor) or not isinstance(base_val, Tensor):
        return True
    return bool(val.untyped_storage()._cdata == base_val.untyped_storage()._cdata)


# --- in-place writes and order --------------------------------------------------------------------


def overwrites(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the nodes besides its inputs that must precede it, because of
    in-place writes.

    A `copy_` follows all readers of the memory that it overwrites, and all earlier
    assertions: a failed one must leave the state as it was. A node that reads new state
    through its placeholder follows the `copy_`.

    Raises:
        ValueError: the graph changes the result of a collective in place.
    """
    roots = storages(graph)
    reads: defaultdict[Node, dict[Node, None]] = defaultdict(dict)
    after: dict[Node, list[Node]] = {}
    writers: dict[Node, Node] = {}
    effect: list[Node] = []
    for node in graph.nodes:
        if writers and node.op == "call_function":
            args = dict.fromkeys(
                writers[roots[arg]] for arg in node.all_input_nodes if roots[arg] in writers
            )
            if any(writer not in node.all_input_nodes for writer in args):
                after[node] = [writer for writer in args if writer not in node.all_input_nodes]
        if is_effect(node):
            effect = [node]
        if is_mutation(node):
            target = roots[node]
            if is_collective(target):
                raise ValueError(
                    f"{node.name}: a step's graph must not change the result of a collective in "
                    f"place, got a write to {target.name}; functionalize the graph first"
                )
            readers = reads.pop(target, {})
            after.setdefault(node, []).extend(effect)
            after[node].extend(reader for reader in readers if reader not in node.all_input_nodes)
            writers[target] = node
        if node.op == "call_function":
            for arg in node.all_input_nodes:
                reads[roots[arg]][node] = None
    return after


def sort(graph: Graph) -> None:
    """Moves every node behind its inputs and `overwrites`, and otherwise keeps the
    order. Changes the graph.
    """
    index = {node: position for position, node in enumerate(graph.nodes)}
    after = overwrites(graph)
    users: defaultdict[Node, list[Node]] = defaultdict(list)
    missing: dict[Node, int] = {}
    for node in graph.nodes:
        before = dict.fromkeys((*node.all_input_nodes, *after.get(node, ())))
        missing[node] = len(before)
        for other in before:
            users[other].append(node)
    ready = [
        (index[node], node) for node in graph.nodes if not missing[node] and node.op != "output"
    ]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[1]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user] and user.op != "output":
                heapq.heappush(ready, (index[user], user))
    arrange(order)


def arrange(order: Sequence[Node]) -> None:
    """Moves the nodes into this order, one directly after the other. Changes their
    graph.
    """
    for before, node in pairwise(order):
        if before.next is not node:
            before.append(node)
