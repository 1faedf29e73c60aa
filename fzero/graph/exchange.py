"""What does an exchange send? On gloo gathers and reductions are all-to-alls, in which a rank need not send to itself.

- A *gather* is captured as the exchange of a shard repeated for all ranks. Each rank has its own shard: it receives those of
  the others, and joins them with it where they are used.
- A *sum* over two ranks is captured as an all-reduce. Each rank sends all of its tensor to the other and adds up the two, as
  many elements in half the time; two summands have one order.
- A *reduction* is captured as the exchange of all shards of a tensor. Each rank has its own part of that: it receives the
  parts that the others have of it, and adds them up from where they are.

The numbers, their order and the elements that are sent stay the same; copies do not. This is the last pass, for what is left
knows the rank. The function changes the graph that it is given.
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
    """Takes out of every exchange of equal parts along one of `axes` what this rank would send to itself."""
    by_group = {axis.group_name: axis for axis in axes}
    for start in list(graph.nodes):
        axis = by_group.get(start.args[-1]) if [user.target for user in start.users] == [WAIT] else None
        if axis is None:
            continue
        rank = axis.rank
        if start.target is ALL_REDUCE and axis.size == 2 and start.args[1] == "sum" and start.meta["val"].dim() == 1:
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
        is_gather = source.target is aten.repeat.default and source.args[0].meta["val"].shape == (numel,)
        with graph.inserting_before(start):
            if is_gather:
                own = source.args[0]
                others = own if size == 2 else call(graph, aten.repeat.default, own, [size - 1])
            else:
                own, *rest = [_part(graph, source, place, numel) for place in (rank, *_others(rank, size))]
                others = rest[0] if size == 2 else call(graph, aten.cat.default, rest)
            numels = [0 if other == rank else numel for other in range(size)]
            exchange = call(graph, _ALL_TO_ALL, others, numels, numels, group)
        with graph.inserting_before(wait):
            arrived = call(graph, WAIT, exchange)
            parts = {other: _part(graph, arrived, place, numel) for place, other in enumerate(_others(rank, size))}
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
    """A sum over two ranks as an exchange."""
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


def _part(graph: Graph, flat: Node, place: int, numel: int) -> Node:
    whole = place == 0 and flat.meta["val"].numel() == numel
    return flat if whole else call(graph, aten.slice.Tensor, flat, 0, place * numel, (place + 1) * numel)
