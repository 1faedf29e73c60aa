"""`send_to_others`: all-to-alls that skip the own rank. On gloo, gathers and reductions
are captured as all-to-alls.

- A *gather* is captured as the all-to-all of a shard repeated for all ranks. Each rank
  receives only the other shards, and concatenates them with its own where they are
  used.
- A *sum* over two ranks is captured as an all-reduce. Each rank sends its full tensor
  to the other and adds the two: as many elements in half the time, and the same bits,
  because two summands have one order.
- A *reduction* is captured as the all-to-all of all shards of a tensor. Each rank
  receives only the other ranks' parts of its shard, and adds them up from the receive
  buffer.

The numbers, the order of the sums and the elements sent are the same; copies are saved.
This is the last pass, because its result depends on the rank. The function changes the
graph in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch.fx import Graph, Node

from fzero.comms.traced import TracedAxis
from fzero.graph.buckets import call
from fzero.graph.nodes import ALL_REDUCE, WAIT, aten, c10d

_ALL_TO_ALL = c10d.all_to_all_single.default
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def send_to_others(graph: Graph, axes: Iterable[TracedAxis]) -> None:
    """Removes from every all-to-all of equal parts along `axes` the part that this rank
    would send to itself.
    """
    by_group = {axis.group_name: axis for axis in axes}
    for start in list(graph.nodes):
        axis = (
            by_group.get(start.args[-1])
            if [user.target for user in start.users] == [WAIT]
            else None
        )
        if axis is None:
            continue
        rank = axis.rank
        if (
            start.target is ALL_REDUCE
            and axis.size == 2
            and start.args[1] == "sum"
            and start.meta["val"].dim() == 1
        ):
            _swap(graph, start, rank)
        if start.target is not _ALL_TO_ALL:
            continue
        sent: Any
        received: Any
        source, received, sent, group = start.args
        size, numel = len(sent), sent[0]
        if {*sent, *received} != {numel} or source.meta["val"].dim() != 1:
            continue
        (wait,) = start.users
        is_gather = source.target is aten.repeat.default and source.args[0].meta["val"].shape == (
            numel,
        )
        with graph.inserting_before(start):
            if is_gather:
                own = source.args[0]
                others = own if size == 2 else call(graph, aten.repeat.default, own, [size - 1])
            else:
                own, *rest = [
                    _part(graph, source, index, numel) for index in (rank, *_others(rank, size))
                ]
                others = rest[0] if size == 2 else call(graph, aten.cat.default, rest)
            numels = [0 if other == rank else numel for other in range(size)]
            exchange = call(graph, _ALL_TO_ALL, others, numels, numels, group)
        with graph.inserting_before(wait):
            received_parts = call(graph, WAIT, exchange)
            parts = {
                r: _part(graph, received_parts, index, numel)
                for index, r in enumerate(_others(rank, size))
            }
            ordered = [parts.get(other, own) for other in range(size)]
            for split in [user for user in wait.users if user.target in _SPLITS and not is_gather]:
                for item in list(split.users):
                    if item.target is operator.getitem and item.meta["val"].shape == (numel,):
                        item.replace_all_uses_with(ordered[item.args[1]])
                        graph.erase_node(item)
                if not split.users:
                    graph.erase_node(split)
            if wait.users:
                wait.replace_all_uses_with(call(graph, aten.cat.default, ordered))
        for node in (wait, start, source):
            if not node.users and node.op == "call_function":
                graph.erase_node(node)


def _swap(graph: Graph, start: Node, rank: int) -> None:
    """Replaces a sum over two ranks by an all-to-all and an addition."""
    (wait,), (own, *_) = start.users, start.args
    numels = [0 if other == rank else start.meta["val"].numel() for other in range(2)]
    with graph.inserting_before(start):
        exchange = call(graph, _ALL_TO_ALL, own, numels, numels, start.args[-1])
    with graph.inserting_before(wait):
        wait.replace_all_uses_with(call(graph, aten.add.Tensor, own, call(graph, WAIT, exchange)))
    graph.erase_node(wait)
    graph.erase_node(start)


def _others(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def _part(graph: Graph, flat: Node, index: int, numel: int) -> Node:
    is_all = index == 0 and flat.meta["val"].numel() == numel
    return (
        flat
        if is_all
        else call(graph, aten.slice.Tensor, flat, 0, index * numel, (index + 1) * numel)
    )
