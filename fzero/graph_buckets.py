"""Which collectives of a step's graph go together?

Neighbours of the same kind are joined while they stay within a cap. The gather of joined shards is not the joined
gathers: rank by rank it has a part of each. So with W ranks and shards of s₁, s₂, … elements

- a gather joins the shards end to end, and cuts its result (W, s₁ + s₂ + …) along the second dimension;
- a reduction joins its inputs (W, s₁), (W, s₂), … along the second dimension, and cuts its result in the same way.

An all-reduce has no shards: W is 1. The functions change the graph that they are given.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph_analysis import ALL_REDUCE, WAIT, Analysis, Gather, aten, c10d, is_cheap, sort
from sharding import plan_buckets

_ALL_GATHER, _ALL_TO_ALL = c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default
_REDUCE_SCATTER = c10d.reduce_scatter_tensor.default


class _Item(NamedTuple):
    """A collective that may be joined with others of the same `kind`."""

    start: Node
    wait: Node
    num_ranks: int
    numel: int
    kind: tuple[Any, ...]


def bucket_gathers(graph: Graph, analysis: Analysis, cap: int) -> None:
    """Joins gathers whose parameters are used one after the other, up to `cap` elements and to the largest gather.

    So that what is alive stays within the largest two.
    """
    index = {node: place for place, node in enumerate(graph.nodes)}
    gathers = [gather for gather in analysis.gathers if _is_plain(gather)]
    gathers.sort(key=lambda gather: min(_uses(gather, index), default=len(index)))
    items = [_item(gather.issue[-1], gather.settle[0]) for gather in gathers]
    issue = {gather.issue[-1]: gather.issue for gather in gathers}
    cap = min(cap, max((gather.numel for gather in analysis.gathers), default=0))
    place = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    buckets = _buckets(items, cap)
    for bucket in buckets:
        for item in bucket:
            for node in issue[item.start][:-1]:
                place.prepend(node)
        with graph.inserting_before(place):
            _join(graph, bucket)
    _forget(graph, buckets)


def _is_plain(gather: Gather) -> bool:
    """Whether it is one all-gather of one flat shard, made from placeholders by nodes of its own."""
    start = gather.issue[-1]
    own = {*gather.issue, *gather.sources}
    return (
        start.target is _ALL_GATHER
        and gather.settle[:1] == tuple(start.users)
        and start.meta["val"].dim() == 1
        and all(arg in own for node in gather.issue for arg in node.all_input_nodes)
    )


def _uses(gather: Gather, index: dict[Node, int]) -> list[int]:
    """Where the gathered parameters are used."""
    made = set(gather.settle)
    return [index[user] for node in gather.settle for user in node.users if user not in made]


def bucket_reductions(graph: Graph, analysis: Analysis, cap: int) -> None:
    """Joins reductions of gradients whose inputs are ready one after the other, up to `cap` elements."""
    index = {node: place for place, node in enumerate(graph.nodes)}
    ready: dict[Node, int] = {}
    for node in graph.nodes:
        cheap = node.op == "placeholder" or is_cheap(node)
        ready[node] = max((ready[arg] for arg in node.all_input_nodes), default=0) if cheap else index[node]
    kinds = (_REDUCE_SCATTER, _ALL_TO_ALL, ALL_REDUCE)
    items = [
        _item(reduction.start, reduction.wait)
        for reduction in analysis.reductions
        if reduction.start.target in kinds and not reduction.needs_other and _is_tensor(reduction.start)
    ]
    items.sort(key=lambda item: ready[item.start.all_input_nodes[0]])
    buckets = _buckets(items, cap)
    for bucket in buckets:
        with graph.inserting_before(max((item.start for item in bucket), key=index.__getitem__)):
            _join(graph, bucket)
    _forget(graph, buckets)
    sort(graph)  # the first of a bucket may have been used before the last began


def _is_tensor(start: Node) -> bool:
    """Whether it reduces more than a number, such as the loss."""
    return bool(start.all_input_nodes[0].meta["val"].dim())


def _item(start: Node, wait: Node) -> _Item:
    val = start.args[0].meta["val"]  # type: ignore[union-attr]
    numel = max(val.numel(), start.meta["val"].numel())
    num_ranks: Any = 1
    rest: Sequence[Any] = start.args[1:]
    if start.target is _ALL_TO_ALL:
        received, sent = start.args[1], start.args[2]
        num_ranks = len(received)  # type: ignore[arg-type]
        equal = list(received) == list(sent) == [sent[0]] * num_ranks  # type: ignore[arg-type, index]
        rest = (start.args[3], None if equal else start)
    elif start.target is not ALL_REDUCE:
        num_ranks = start.args[-2]
    return _Item(start, wait, num_ranks, numel, (start.target, *rest, val.dtype, val.device))


def _buckets(items: Sequence[_Item], cap: int) -> list[list[_Item]]:
    """Neighbours of the same kind that fit into `cap`; at least two of them."""
    found = []
    for _, neighbours in groupby(items, key=lambda item: item.kind):
        run = list(neighbours)
        buckets = plan_buckets([item.numel for item in run], max(cap, 1))
        found += [[run[place] for place in bucket] for bucket in buckets if len(bucket) > 1]
    return found


def _join(graph: Graph, bucket: Sequence[_Item]) -> None:
    """One collective in place of several, at the graph's insertion point."""
    target, num_ranks = bucket[0].start.target, bucket[0].num_ranks
    rows = 1 if target is _ALL_GATHER else num_ranks
    inputs = [_call(graph, aten.reshape.default, item.start.args[0], [rows, -1]) for item in bucket]
    numels = [node.meta["val"].shape[1] for node in inputs]
    joined = _call(graph, aten.cat.default, inputs, 1)
    flat = _call(graph, aten.reshape.default, joined, [-1])
    rest = bucket[0].start.args[1:]
    if target is _ALL_TO_ALL:
        rest = ([sum(numels)] * num_ranks, [sum(numels)] * num_ranks, rest[-1])
    wait = _call(graph, WAIT, _call(graph, target, flat, *rest))
    rows = 1 if target is _REDUCE_SCATTER else num_ranks
    parts = _call(graph, aten.split_with_sizes.default, _call(graph, aten.view.default, wait, [rows, -1]), numels, 1)
    for place, item in enumerate(bucket):
        part = _call(graph, operator.getitem, parts, place)
        if rows > 1:  # the ranks' parts of one shard are not next to each other
            part = _call(graph, aten.clone.default, part, memory_format=torch.contiguous_format)
        whole = _call(graph, aten.view.default, part, list(item.wait.meta["val"].shape))
        item.wait.replace_all_uses_with(whole)


def _forget(graph: Graph, buckets: Sequence[Sequence[_Item]]) -> None:
    """Erases what has been joined; only at the end, since new nodes are inserted before it."""
    for bucket in buckets:
        for item in bucket:
            graph.erase_node(item.wait)
            graph.erase_node(item.start)


def _call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node with what it returns in its `meta`."""
    node = graph.call_function(target, args, kwargs)
    vals = map_arg(args, lambda arg: arg.meta["val"])
    fake = next((arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta["val"], FakeTensor)), None)
    if fake is None:
        node.meta["val"] = target(*vals, **kwargs)
    else:
        with fake.fake_mode:
            node.meta["val"] = target(*vals, **kwargs)
    return node
