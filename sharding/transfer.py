"""Transfers: the moves of elements between shards when the layout changes.

A state on W ranks is to be moved to W' ranks, with other padding or another order of
names. Parameters that follow each other in both orders are one run. A run is cut
wherever a shard ends in either buffer, and each part is one move. The time to plan
depends on the numbers of parameters and shards, not of elements. A plan is a value; the
owners of the shards copy by it, in one process or in many. A rank that holds one shard
needs only the moves of that shard (`moves_from`, `moves_to`), and the time to plan
those depends on that shard only.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from sharding.layout import FlatLayout
from sharding.partition import Partition


@dataclass(frozen=True, slots=True)
class Move:
    """A move of elements [source_start, source_stop) of the old shard of `source_rank`
    into the new shard of `target_rank`.

    They start at `target_start` there. Starts and stops count elements inside the
    shards.

    >>> Move(
    ...     source_rank=0, source_start=2, source_stop=5, target_rank=1, target_start=0
    ... ).target_stop
    3
    """

    source_rank: int
    source_start: int
    source_stop: int
    target_rank: int
    target_start: int

    @property
    def numel(self) -> int:
        """The elements that move."""
        return self.source_stop - self.source_start

    @property
    def target_stop(self) -> int:
        """The stop of the elements in the new shard."""
        return self.target_start + self.numel


def plan_transfer(
    old: FlatLayout, new: FlatLayout, *, names: Collection[str] | None = None
) -> tuple[Move, ...]:
    """The moves that turn shards of `old` into shards of `new`.

    World size, padding and the order of the names may differ. Every element of every
    parameter is moved exactly once, even within its rank. Padding is never moved: new
    shards must start as zeros.

    Args:
        old: the layout of the existing shards.
        new: the layout of the new shards.
        names: the parameters to move, which both layouts must have; None is all, and
            then both must have the same parameters.

    Returns:
        The moves, sorted by target rank and target start; adjoining moves are joined.

    Raises:
        ValueError: a parameter is in only one layout, or its shapes differ.

    >>> old = FlatLayout(("w",), ((6,),), world_size=2)
    >>> new = FlatLayout(("w",), ((6,),), world_size=1)
    >>> for move in plan_transfer(old, new):
    ...     print(move)
    Move(source_rank=0, source_start=0, source_stop=3, target_rank=0, target_start=0)
    Move(source_rank=1, source_start=0, source_stop=3, target_rank=0, target_start=3)
    """
    _check_same_parameters(old, new, (*old.names, *new.names) if names is None else names)
    wanted, starts = set(new.names if names is None else names), dict(zip(old.names, old.offsets))
    parts = (
        _Run(starts[name], start, numel)
        for name, start, numel in zip(new.names, new.offsets, new.numels)
        if numel and name in wanted
    )
    return tuple(_moves(parts, old, new))


def moves_from(old: FlatLayout, new: FlatLayout, rank: int) -> Iterator[Move]:
    """The moves of `plan_transfer` out of the old shard of `rank`, for parameters that
    both layouts have, in the same order.

    >>> old, new = (FlatLayout(("v", "w"), ((2,), (6,)), world_size=w) for w in (2, 4))
    >>> for move in moves_from(old, new, 1):
    ...     print(move)
    Move(source_rank=1, source_start=0, source_stop=2, target_rank=2, target_start=0)
    Move(source_rank=1, source_start=2, source_stop=4, target_rank=3, target_start=0)
    """
    found = _shared(old, new, *old.partition.bounds(rank))
    parts = (_Run(start, new.bounds(name)[0] + first, numel) for name, first, start, numel in found)
    return _moves(sorted(parts, key=_by_target), old, new)


def moves_to(
    old: FlatLayout, new: FlatLayout, ranks: range, *, without: range = range(0)
) -> Iterator[Move]:
    """The moves of `plan_transfer` into the new shards of consecutive `ranks`, in the
    same order.

    Only parameters that both layouts have are moved. Moves out of the old shards of the
    consecutive ranks `without` are left out.

    >>> old, new = (FlatLayout(("v", "w"), ((2,), (6,)), world_size=w) for w in (2, 4))
    >>> for move in moves_to(old, new, range(1, 3)):
    ...     print(move)
    Move(source_rank=0, source_start=2, source_stop=4, target_rank=1, target_start=0)
    Move(source_rank=1, source_start=0, source_stop=2, target_rank=2, target_start=0)
    >>> [move.source_rank for move in moves_to(old, new, range(1, 3), without=range(1))]
    [1]
    """
    runs: Iterable[_Run] = _runs_to(old, new, ranks)
    if without:
        start, stop = _bounds(old, without)
        runs = (
            part
            for run in runs
            for part in (*_clipped(run, 0, start), *_clipped(run, stop, old.numel))
        )
    return _moves(runs, old, new)


def moves_between(
    old: FlatLayout, new: FlatLayout, sources: range, targets: range
) -> Iterator[Move]:
    """The moves from old shards of consecutive ranks to new shards of consecutive
    ranks, if each range is held as one tensor.

    Moves are not cut at shard ends inside these tensors. Starts and stops count from
    the start of the tensor, and a move names the first rank of each.

    >>> old, new = (FlatLayout(("v", "w"), ((2,), (6,)), world_size=w) for w in (2, 4))
    >>> print(*moves_between(old, new, range(2), range(1, 4)))
    Move(source_rank=0, source_start=2, source_stop=8, target_rank=1, target_start=0)
    """
    start, stop = _bounds(old, sources)
    first, _ = _bounds(new, targets)
    parts = (part for run in _runs_to(old, new, targets) for part in _clipped(run, start, stop))
    for source, target, numel in _runs(parts):
        yield Move(
            sources.start, source - start, source - start + numel, targets.start, target - first
        )


def merged(moves: Iterable[Move]) -> Iterator[Move]:
    """The moves, each joined with the next one if they adjoin in both shards.

    >>> list(merged([Move(0, 0, 2, 1, 4), Move(0, 2, 3, 1, 6)]))
    [Move(source_rank=0, source_start=0, source_stop=3, target_rank=1, target_start=4)]
    """
    last: Move | None = None
    for move in moves:
        if last is not None and _adjoin(last, move):
            last = replace(last, source_stop=move.source_stop)
        else:
            if last is not None:
                yield last
            last = move
    if last is not None:
        yield last


def in_one_order(old: FlatLayout, new: FlatLayout) -> bool:
    """Whether both layouts have the same parameters in the same order. Then all
    elements are one run, whatever their names.

    >>> old, new = (FlatLayout(("v", "w"), ((2,), (6,)), world_size=w) for w in (2, 4))
    >>> in_one_order(old, new)
    True
    """
    return old.names == new.names and old.numels == new.numels


def _adjoin(first: Move, second: Move) -> bool:
    end = (first.source_rank, first.source_stop, first.target_rank, first.target_stop)
    return end == (second.source_rank, second.source_start, second.target_rank, second.target_start)


class _Run(NamedTuple):
    """`numel` elements that are contiguous in both buffers, from `source` of the old
    and `target` of the new one on.
    """

    source: int
    target: int
    numel: int


_by_target = attrgetter("target")


def _bounds(layout: FlatLayout, ranks: range) -> tuple[int, int]:
    """The start and stop of the shards of consecutive ranks in the buffer."""
    numel = layout.partition.shard_numel
    return ranks.start * numel, ranks.stop * numel


def _runs_to(old: FlatLayout, new: FlatLayout, ranks: range) -> list[_Run]:
    """The fragments, of parameters of both layouts, in the new shards of consecutive
    ranks, sorted by target.
    """
    if in_one_order(old, new):
        start, stop = _bounds(new, ranks)
        return (
            [_Run(start, start, min(stop, new.numel) - start)]
            if start < min(stop, new.numel)
            else []
        )
    found = _shared(new, old, *_bounds(new, ranks)) if ranks else ()
    return sorted(
        (_Run(old.bounds(n)[0] + first, start, numel) for n, first, start, numel in found),
        key=_by_target,
    )


def _clipped(run: _Run, start: int, stop: int) -> Iterator[_Run]:
    """The part of a run that comes from elements [start, stop) of the old buffer, if
    any.
    """
    first, last = max(run.source, start), min(run.source + run.numel, stop)
    if first < last:
        yield _Run(first, run.target + first - run.source, last - first)


def _shared(
    layout: FlatLayout, other: FlatLayout, start: int, stop: int
) -> Iterator[tuple[str, int, int, int]]:
    """The fragments, of parameters of both layouts, in elements [start, stop) of the
    buffer of `layout`.

    Yields: the name, the first element of the fragment in its parameter, its offset in
    the buffer, and its elements.
    """
    if len(other.names) < layout.num_within(start, stop):
        for name in other.names:
            if name in layout:
                begin, end = layout.bounds(name)
                first, last = max(begin, start), min(end, stop)
                if first < last:
                    yield name, first - begin, first, last - first
        return
    for fragment in layout.within(start, stop):
        if fragment.name in other:
            yield fragment.name, fragment.start, start + fragment.offset, fragment.numel


def _moves(parts: Iterable[_Run], old: FlatLayout, new: FlatLayout) -> Iterator[Move]:
    """The moves of fragments that are sorted by target."""
    old_partition, new_partition = old.partition, new.partition
    return (move for run in _runs(parts) for move in _cut(run, old_partition, new_partition))


def _runs(parts: Iterable[_Run]) -> Iterator[_Run]:
    """The runs, joined if they are contiguous in both buffers."""
    source = target = numel = 0
    for part_source, part_target, part_numel in parts:
        if (part_source, part_target) != (source + numel, target + numel):
            if numel:
                yield _Run(source, target, numel)
            source, target, numel = part_source, part_target, 0
        numel += part_numel
    if numel:
        yield _Run(source, target, numel)


def _cut(run: _Run, old: Partition, new: Partition) -> Iterator[Move]:
    """The run, cut wherever a shard ends in either buffer."""
    source, target, numel = run
    old_shard, new_shard = old.shard_numel, new.shard_numel
    while numel:
        source_rank, source_start = divmod(source, old_shard)
        target_rank, target_start = divmod(target, new_shard)
        length = min(numel, old_shard - source_start, new_shard - target_start)
        yield Move(source_rank, source_start, source_start + length, target_rank, target_start)
        source, target, numel = source + length, target + length, numel - length


def _check_same_parameters(old: FlatLayout, new: FlatLayout, names: Iterable[str]) -> None:
    old_shapes, new_shapes = dict(zip(old.names, old.shapes)), dict(zip(new.names, new.shapes))
    if old_shapes == new_shapes:
        names = [name for name in names if name not in old_shapes]
    for name in names:
        if name not in old_shapes or name not in new_shapes:
            where, missing = ("old", "new") if name in old_shapes else ("new", "old")
            raise ValueError(
                f"plan_transfer: parameter {name!r} is in the {where} layout but not in the "
                f"{missing} one; "
                "build both from the same model"
            )
        if old_shapes[name] != new_shapes[name]:
            raise ValueError(
                f"plan_transfer: parameter {name!r} has shape {old_shapes[name]} in the old layout "
                f"but {new_shapes[name]} in the new one; build both from the same model"
            )
