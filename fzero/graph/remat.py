"""`rematerialise`: activation checkpointing in a step's graph. Checkpointed modules
keep their inputs and run twice.

The graph is a training step's. Each operator of a checkpointed module's forward was
traced inside `marked`, and the backward inside `annotate(BACKWARD)`.

1. A *region* is the nodes of one forward call of a checkpointed module. Its output,
   which other nodes of the forward read, is kept, and so is its input (or its copy in
   host memory, `fzero.graph.host_inputs`).
2. The backward reads any other tensor of a region from a copy, recomputed from the
   input just before the first such use. So the region's own tensors are freed as soon
   as the forward no longer needs them.
3. Not repeated are random operators (their results are kept; for dropout, its mask),
   collectives, copies to host memory, higher-order operators and in-place writes. Gathered parameters are not
   copied: the second run is one more use of them, close to the backward's, for
   `run_passes` to plan.

The numbers do not change: every operator reads the same bits, or bits recomputed by the
same operators. The cost is linear in the number of nodes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fzero.graph.analysis import analyse
from fzero.graph.host_inputs import TO_HOST, read_inputs
from fzero.graph.nodes import aten, is_mutation, storages
from fzero.graph.schedule import copy_of

BACKWARD = {"fzero": "backward"}
"""The argument of `torch.fx.traceback.annotate` around the backward."""
SEEN = {"fzero": "seen"}
"""The same around what computes the values that modules see of compressed parameters.
"""
_AGAIN = {"fzero": "again"}
_REGION = "region"


class RematError(ValueError):
    """A module cannot be checkpointed in a graph."""


def is_backward(node: Node) -> bool:
    """Whether the node belongs to the backward and is no recomputed node of the
    forward.
    """
    return (node.meta.get("custom") or {}).get("fzero") == "backward"


def is_again(node: Node) -> bool:
    """Whether the node is a recomputed node of the forward."""
    return (node.meta.get("custom") or {}).get("fzero") == "again"


@contextmanager
def marked(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Inside, a trace marks the operators of the named modules: the outermost one's
    name, and the number of its call.
    """
    name_of = {model.get_submodule(name): name for name in names}
    num_calls, inside = Counter[str](), list[tuple[nn.Module, AbstractContextManager[None]]]()

    def enter(module: nn.Module, _: Any) -> None:
        name = name_of.get(module)
        if name is not None and not inside:
            mark = torch.fx.traceback.annotate({_REGION: f"{name}@{num_calls[name]}"})
            num_calls[name] += 1
            mark.__enter__()
            inside.append((module, mark))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        if inside and inside[-1][0] is module:
            inside.pop()[1].__exit__(None, None, None)

    handles = (
        [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        if name_of
        else []
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rematerialise(graph: Graph, modules: Iterable[str]) -> Graph:
    """A copy of `graph` whose backward runs `modules` again.

    Args:
        graph: a training step's, whose only in-place writes are `copy_` into
            placeholders at its end. Without a backward, nothing changes.
        modules: the names of the modules to checkpoint, which `marked` has marked.

    Raises:
        RematError: the forward has no operator of one of the modules.
    """
    copy = copy_of(graph)
    rematerialise_in_place(copy, modules)
    return copy


def rematerialise_in_place(graph: Graph, modules: Iterable[str]) -> None:
    """`rematerialise` on the graph itself, for Inductor's hooks."""
    repeat_seen(graph)
    nodes = list(graph.nodes)
    marked = [index for index, node in enumerate(nodes) if is_backward(node)]
    modules = tuple(modules)
    if not marked or not modules:
        return
    forward, backward, rest = (
        nodes[: marked[0]],
        nodes[marked[0] : marked[-1] + 1],
        nodes[marked[-1] + 1 :],
    )
    regions = _regions(forward, modules)
    _recompute(graph, backward, _repeatable(graph, regions, [*forward, *rest]))
    read_inputs(forward)
    graph.lint()


def repeat_seen(graph: Graph) -> None:
    """Repeats for the backward what computes the values of compressed parameters, in
    place.

    So such a value lives as long as the gathered parameter that it is computed from. A
    graph without gathers keeps the values, as it keeps the parameters.
    """
    nodes = list(graph.nodes)
    seen = {node for node in nodes if _is_seen(node)}
    if seen and analyse(graph).gathers:
        _recompute(graph, [node for node in nodes if is_backward(node)], seen)
        graph.lint()


def _is_seen(node: Node) -> bool:
    """Whether the node computes what modules see of compressed parameters; each may run
    again.
    """
    return (node.meta.get("custom") or {}).get("fzero") == "seen" and node.op == "call_function"


def _recompute(graph: Graph, readers: Iterable[Node], again: set[Node]) -> None:
    """Gives the readers copies of the nodes in `again` that they read, made before the
    first of them.
    """
    copies: dict[Node, Node] = {}
    for reader in readers:
        if any(arg in again for arg in reader.all_input_nodes):
            with graph.inserting_before(reader):
                for arg in reader.all_input_nodes:
                    _make(graph, arg, again, copies)
            reader.args, reader.kwargs = map_arg(
                (reader.args, reader.kwargs), lambda arg: copies.get(arg, arg)
            )


def _regions(forward: list[Node], modules: Sequence[str]) -> dict[Node, str]:
    """The region of each node in a checkpointed module: the outermost one's name, and
    the number of its call.
    """
    marks = {
        node: (node.meta.get("custom") or {}).get(_REGION)
        for node in forward
        if node.op == "call_function"
    }
    regions = {node: mark for node, mark in marks.items() if mark is not None}
    seen = {mark.rpartition("@")[0] for mark in regions.values()}
    missing = [
        name
        for name in modules
        if name not in seen and not any(name.startswith(f"{outer}.") for outer in seen)
    ]
    if missing:
        raise RematError(
            f"checkpoint: module {missing[0]!r} must run as a module of the captured forward, got "
            f"no operator of it (it is not called, or its caller hides it); leave it out, or pass "
            f"compile='block'"
        )
    return regions


def _repeatable(graph: Graph, regions: Mapping[Node, str], others: list[Node]) -> set[Node]:
    """The nodes that the backward may recompute; `others` are the nodes outside the
    backward.
    """
    roots = storages(graph)
    gathered = {
        node for gather in analyse(graph).gathers for node in (*gather.issue, *gather.settle)
    }
    kept = {
        roots[arg]
        for node in others
        for arg in node.all_input_nodes
        if arg in regions and regions.get(node) != regions[arg]
    }
    again: set[Node] = set()
    for node in regions:
        if roots[node] in kept or roots[node] not in regions or node in gathered:
            continue
        if node.target is operator.getitem:
            repeats = node.args[0] in again or _mask_of(node) is not None
        else:
            repeats = isinstance(node.target, torch._ops.OpOverload) and not (
                _is_random(node)
                or is_mutation(node)
                or node.target is TO_HOST
                or node.target.namespace == "_c10d_functional"
            )
        if repeats:
            again.add(node)
    return again


def _is_random(node: Node) -> bool:
    """Whether a second run would give other numbers. Attention is tagged as random even
    with dropout_p=0.
    """
    operator_ = node.target
    assert isinstance(operator_, torch._ops.OpOverload)
    if torch.Tag.nondeterministic_seeded not in operator_.tags:
        return False
    for index, argument in enumerate(operator_._schema.arguments):
        if argument.name == "dropout_p":
            return bool(
                node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            )
    return True


def _mask_of(node: Node) -> Node | None:
    """The mask of the dropout that made this node; None for other nodes."""
    dropout = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if (
        not isinstance(dropout, Node)
        or dropout.target is not aten.native_dropout.default
        or dropout.args[2] is not True
    ):
        return None
    return next((user for user in dropout.users if user.args[1] == 1), None)


def _make(graph: Graph, wanted: Node, again: set[Node], copies: dict[Node, Node]) -> None:
    """Copies `wanted`, after the repeatable nodes that it needs, at the graph's
    insertion point.
    """
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
    """Dropout of `x` by the mask of the first run: the same two products as the
    operator, so the same bits.
    """
    masked = graph.call_function(aten.mul.Tensor, (x, mask))
    masked.meta = {**x.meta, "custom": _AGAIN}
    scale = 0.0 if p == 1 else 1 / (1 - p)
    val = x.meta["val"]
    if val.device.type == "cpu":  # the CPU kernel rounds the factor to the tensor's dtype first
        scale = torch.tensor(scale, dtype=val.dtype, device="cpu").item()
    return graph.call_function(aten.mul.Tensor, (masked, scale))
