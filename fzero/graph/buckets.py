"""Bucketing: consecutive collectives of a step's graph that are joined into one, up to
a cap in elements.

- *Gathers*, and *updates* (gathers of updated shards into the parameters), become one
  coalesced collective of several tensors, which writes each flat buffer directly and
  copies nothing.
- *Reductions* of inputs (W, s₁), (W, s₂), … concatenate them along the second dimension
  and split the result in the same way, so that each rank's shard of the joined sum has
  a part of every gradient. An all-reduce has no shards: W is 1.

The functions change the graph in place.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.analysis import Analysis, Gather, name_contents
from fzero.graph.nodes import (
    ALL_GATHERS,
    ALL_REDUCE,
    WAIT,
    aten,
    c10d,
    is_cheap,
    is_write,
    numel_of,
    sort,
    storages,
)
from sharding import plan_buckets

_ALL_GATHER, _ALL_TO_ALL = c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default
_REDUCE_SCATTER = c10d.reduce_scatter_tensor.default


class _Item(NamedTuple):
    """A collective of one flat tensor; it may be joined with others of the same `kind`."""

    start: Node
    wait: Node
    num_ranks: int
    numel: int
    kind: tuple[Any, ...]


# --- gathers --------------------------------------------------------------------------------------


def bucket_gathers(graph: Graph, analysis: Analysis, cap: int) -> None:
    """Joins the gathers of a unit, and units whose parameters are used one after the
    other, up to `cap` elements.

    A joined unit has at most as many elements as the second largest unit, so that two
    live units hold at most as much as the two largest before.
    """
    index = {node: position for position, node in enumerate(graph.nodes)}
    times = Counter(source for gather in analysis.gathers for source in gather.sources)
    units = [
        unit
        for unit in analysis.units
        if all(times[source] == 1 for gather in unit for source in gather.sources)
    ]
    units.sort(
        key=lambda unit: min(
            (use for gather in unit for use in _uses(gather, index)), default=len(index)
        )
    )
    second = sorted((_numel(unit) for unit in analysis.units), reverse=True)[:2][-1:]
    buckets = []
    for indices in plan_buckets([_numel(unit) for unit in units], min([cap, *second])):
        joined = [units[i] for i in indices]
        gathers = [gather for unit in joined for gather in unit]
        if len(joined) > 1:
            for source in (source for gather in gathers for source in gather.sources):
                source.meta["unit"] = f"{joined[0][0].unit}..{joined[-1][0].unit}"
        buckets += _buckets((_gathering(gather.issue[-1], gather.numel) for gather in gathers), cap)
    _gather_together(graph, buckets, index)


def bucket_updates(graph: Graph, analysis: Analysis, cap: int) -> None:
    """Joins the gathers of updated shards, whose results are only written into the
    parameters, up to `cap` elements.
    """
    index, roots = {node: position for position, node in enumerate(graph.nodes)}, storages(graph)
    items = [
        _gathering(reduction.start, numel_of(reduction.start))
        for reduction in analysis.reductions
        if all(_is_written(user, roots) for wait in reduction.waits for user in wait.users)
    ]
    _gather_together(graph, _buckets(items, cap), index)


def _is_written(node: Node, roots: Mapping[Node, Node]) -> bool:
    """Whether the node writes its input into an argument of the graph, or only prepares
    that write.
    """
    if node.target is aten.copy.default:
        return all(is_write(user, roots) for user in node.users)
    return is_write(node, roots)


def _numel(unit: Sequence[Gather]) -> int:
    return sum(gather.numel for gather in unit)


def _uses(gather: Gather, index: dict[Node, int]) -> list[int]:
    """The positions of the nodes that use the gathered parameters."""
    settle = set(gather.settle)
    return [index[user] for node in gather.settle for user in node.users if user not in settle]


def _gathering(start: Node, numel: int) -> _Item | None:
    """An all-gather of one flat shard, or an all-to-all that sends one shard to all
    ranks; `numel` counts parameters.
    """
    shard = _shard(start)
    if (
        shard is None
        or shard.meta["val"].dim() != 1
        or [user.target for user in start.users] != [WAIT]
    ):
        return None
    val, ranks = shard.meta["val"], start.args[1]
    num_ranks = ranks if isinstance(ranks, int) else len(ranks)  # type: ignore[arg-type]
    (wait,) = start.users
    return _Item(start, wait, num_ranks, numel, (start.args[-1], num_ranks, val.dtype, val.device))


def _shard(start: Node) -> Node | None:
    """The shard that each rank sends to all; None for any other collective."""
    args: tuple[Any, ...] = start.args
    if start.target is _ALL_GATHER:
        return args[0]  # type: ignore[no-any-return]
    if start.target is not _ALL_TO_ALL or args[0].target is not aten.repeat.default:
        return None
    (shard, (times, *_)), received, sent = args[0].args, args[1], args[2]
    return shard if list(received) == list(sent) == [shard.meta["val"].numel()] * times else None


def _gather_together(
    graph: Graph, buckets: Sequence[Sequence[_Item]], index: dict[Node, int]
) -> None:
    """Replaces each bucket by one coalesced all-gather."""
    for bucket in buckets:
        with graph.inserting_before(max((item.start for item in bucket), key=index.__getitem__)):
            shards = [_shard(item.start) for item in bucket]
            start = call(graph, ALL_GATHERS, shards, bucket[0].num_ranks, bucket[0].kind[0])
            name_contents(start, [item.start for item in bucket])
            for i, item in enumerate(bucket):
                item.wait.replace_all_uses_with(
                    call(graph, WAIT, call(graph, operator.getitem, start, i))
                )
    _forget(graph, buckets)
    if buckets:
        sort(graph)  # the first item of a bucket may have been used before the start of the last


# --- reductions -----------------------------------------------------------------------------------


def bucket_reductions(graph: Graph, analysis: Analysis, cap: int) -> None:
    """Joins gradient reductions whose inputs are ready consecutively, up to `cap`
    elements.
    """
    index = {node: position for position, node in enumerate(graph.nodes)}
    ready: dict[Node, int] = {}
    for node in graph.nodes:
        cheap = node.op == "placeholder" or is_cheap(node)
        ready[node] = (
            max((ready[arg] for arg in node.all_input_nodes), default=0) if cheap else index[node]
        )
    kinds = (_REDUCE_SCATTER, _ALL_TO_ALL, ALL_REDUCE)
    items = [
        _item(reduction.start, *reduction.waits)
        for reduction in analysis.reductions
        if reduction.start.target in kinds
        and not reduction.needs_other
        and _is_tensor(reduction.start)
    ]
    items.sort(key=lambda item: ready[item.start.all_input_nodes[0]])
    buckets = _buckets(items, cap)
    for bucket in buckets:
        with graph.inserting_before(max((item.start for item in bucket), key=index.__getitem__)):
            _join(graph, bucket)
    _forget(graph, buckets)
    sort(graph)  # the first item of a bucket may have been used before the start of the last


def _is_tensor(start: Node) -> bool:
    """Whether it reduces more than one number, such as the loss."""
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


def _buckets(items: Iterable[_Item | None], cap: int) -> list[list[_Item]]:
    """Runs of at least two consecutive items of the same kind that fit into `cap`."""
    kinds: dict[tuple[Any, ...], list[_Item]] = {}
    for item in items:
        if item is not None:
            kinds.setdefault(item.kind, []).append(item)
    joinable = []
    for same in kinds.values():
        buckets = plan_buckets([item.numel for item in same], cap)
        joinable += [[same[i] for i in bucket] for bucket in buckets if len(bucket) > 1]
    return joinable


def _join(graph: Graph, bucket: Sequence[_Item]) -> None:
    """Replaces a bucket of reductions by one, at the graph's insertion point."""
    target, num_ranks = bucket[0].start.target, bucket[0].num_ranks
    inputs = [
        call(graph, aten.reshape.default, item.start.args[0], [num_ranks, -1]) for item in bucket
    ]
    numels = [node.meta["val"].shape[1] for node in inputs]
    joined = call(graph, aten.cat.default, inputs, 1)
    flat = call(graph, aten.reshape.default, joined, [-1])
    rest = bucket[0].start.args[1:]
    if target is _ALL_TO_ALL:
        rest = ([sum(numels)] * num_ranks, [sum(numels)] * num_ranks, rest[-1])
    start = call(graph, target, flat, *rest)
    name_contents(start, [item.start for item in bucket])
    wait = call(graph, WAIT, start)
    rows = 1 if target is _REDUCE_SCATTER else num_ranks
    parts = call(
        graph,
        aten.split_with_sizes.default,
        call(graph, aten.view.default, wait, [rows, -1]),
        numels,
        1,
    )
    for i, item in enumerate(bucket):
        part = call(graph, operator.getitem, parts, i)
        if rows > 1:  # the rows of one item are not contiguous in the joined result
            part = call(graph, aten.clone.default, part, memory_format=torch.contiguous_format)
        item.wait.replace_all_uses_with(
            call(graph, aten.view.default, part, list(item.wait.meta["val"].shape))
        )


def _forget(graph: Graph, buckets: Sequence[Sequence[_Item]]) -> None:
    """Erases the joined collectives; only at the end, because new nodes are inserted
    before them.
    """
    for bucket in buckets:
        for item in bucket:
            graph.erase_node(item.wait)
            graph.erase_node(item.start)


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node, with its result in `meta["val"]`."""
    node = graph.call_function(target, args, kwargs)
    vals = map_arg(args, lambda arg: arg.meta["val"])
    fake = next(
        (
            arg.meta["val"]
            for arg in node.all_input_nodes
            if isinstance(arg.meta["val"], FakeTensor)
        ),
        None,
    )
    if fake is None:
        node.meta["val"] = target(*vals, **kwargs)
    else:
        with fake.fake_mode:
            node.meta["val"] = target(*vals, **kwargs)
    return node
