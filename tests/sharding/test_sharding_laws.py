"""The laws of the integers of `sharding`: partitions, orders, layouts, buckets and
transfers.
"""

import math
import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import find, given, settings, strategies as st

from sharding import (
    FlatLayout,
    NearEqualSplit,
    boxes,
    declaration,
    moves_between,
    moves_from,
    moves_to,
    plan_buckets,
    plan_transfer,
    round_robin,
)
from sharding.testing import bucket_problems, layout_pairs, layouts, orders, partitions, world_sizes
from sharding.transfer import merged

law = settings(deadline=None)

PADDING = ("padding", -1)


def buffer_of(layout: FlatLayout) -> list[tuple[str, int]]:
    """The padded buffer with every element named: (parameter, index in the flattened
    parameter).
    """
    elements = [
        (name, i)
        for name, shape in zip(layout.names, layout.shapes)
        for i in range(math.prod(shape))
    ]
    return elements + [PADDING] * (layout.partition.padded_numel - len(elements))


def shards_of(layout: FlatLayout) -> list[list[tuple[str, int]]]:
    buffer = buffer_of(layout)
    return [buffer[slice(*layout.partition.bounds(rank))] for rank in range(layout.world_size)]


# Partition


@law
@given(partitions())
def test_shards_cover_the_padded_buffer_exactly_once(partition):
    covered = [i for rank in range(partition.world_size) for i in range(*partition.bounds(rank))]
    assert covered == list(range(partition.padded_numel))


@law
@given(partitions())
def test_shards_are_equal_and_a_multiple_of_the_unit(partition):
    lengths = {stop - start for start, stop in map(partition.bounds, range(partition.world_size))}
    assert lengths == {partition.shard_numel}
    assert partition.shard_numel % partition.multiple_of == 0


@law
@given(partitions())
def test_padding_is_minimal(partition):
    assert partition.padding >= 0
    assert partition.padding == partition.padded_numel - partition.numel
    candidates = range(0, partition.numel + partition.multiple_of, partition.multiple_of)
    assert partition.shard_numel == next(
        s for s in candidates if s * partition.world_size >= partition.numel
    )


@law
@given(layouts(min_parameters=0))
def test_padding_is_at_the_end(layout):
    elements = [element for shard in shards_of(layout) for element in shard]
    assert PADDING not in elements[: layout.numel]
    assert elements[layout.numel :] == [PADDING] * layout.partition.padding


@law
@given(st.integers(0, 100), world_sizes())
def test_a_near_equal_split_covers_the_buffer_with_sizes_one_apart_and_the_larger_first(
    numel, world_size
):
    split = NearEqualSplit(numel, world_size)
    bounds = [split.bounds(rank) for rank in range(world_size)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(numel))
    assert split.sizes == tuple(stop - start for start, stop in bounds)
    assert split.sizes == tuple(sorted(split.sizes, reverse=True))
    assert max(split.sizes) - min(split.sizes) <= 1


# Order


@law
@given(st.integers(0, 20), st.integers(1, 8))
def test_round_robin_is_a_permutation_and_its_inverse_undoes_it(length, num_lists):
    order, items = round_robin(length, num_lists), tuple(range(length))
    assert sorted(order.indices) == list(items)
    assert order.inverse().apply(order.apply(items)) == items


@law
@given(st.integers(0, 20), st.integers(1, 8))
def test_round_robin_sorts_items_by_their_list(length, num_lists):
    assert round_robin(length, num_lists).apply(range(length)) == tuple(
        sorted(range(length), key=lambda i: (i % num_lists, i))
    )


@law
@given(orders())
def test_an_order_and_its_inverse_undo_each_other(order):
    items = tuple("abcdefghij"[: len(order)])
    assert order.inverse().apply(order.apply(items)) == items
    assert order.apply(order.inverse().apply(items)) == items
    assert [items[i] for i in order.indices] == list(order.apply(items))
    assert declaration(len(order)).apply(items) == items


def test_an_order_of_fewer_than_no_items_is_refused():
    for make, name in (
        (declaration, "declaration"),
        (lambda length: round_robin(length, 2), "round_robin"),
    ):
        with pytest.raises(
            ValueError, match=f"{name}: length must be an integer of at least 0, got -1"
        ):
            make(-1)


# Layout


@law
@given(layouts(min_parameters=0))
def test_each_parameter_is_the_disjoint_union_of_its_fragments(layout):
    fragments = [
        fragment for rank in range(layout.world_size) for fragment in layout.fragments(rank)
    ]
    for name, numel in zip(layout.names, layout.numels):
        elements = [i for f in fragments if f.name == name for i in range(f.start, f.stop)]
        assert elements == list(range(numel))


@law
@given(layouts(min_parameters=0))
def test_fragments_name_every_element_of_a_shard_that_is_not_padding(layout):
    for rank, shard in enumerate(shards_of(layout)):
        rebuilt = [PADDING] * len(shard)
        for fragment in layout.fragments(rank):
            assert fragment.numel > 0
            for i in range(fragment.numel):
                rebuilt[fragment.offset + i] = (fragment.name, fragment.start + i)
        assert rebuilt == shard


@law
@given(st.lists(st.integers(0, 4), max_size=5).map(tuple), st.data())
def test_boxes_cover_a_run_of_a_flattened_tensor_once_in_order_and_are_few(shape, data):
    stop = data.draw(st.integers(0, math.prod(shape)))
    start = data.draw(st.integers(0, stop))
    elements, found = list(range(math.prod(shape))), []
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = list(boxes(start, stop, shape))
    for box in cut:
        ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
        assert all(r.stop <= size for r, size in zip(ranges, shape, strict=True))
        inside = [
            sum(i * s for i, s in zip(index, strides, strict=True)) for index in product(*ranges)
        ]
        assert inside[0] == box.start and len(inside) == box.numel
        found += [elements[i] for i in inside]
    assert found == list(range(start, stop))
    assert len(cut) <= max(2 * len(shape) - 1, 1)


@given(layouts(min_parameters=0))
def test_bounds_and_shapes_of_a_layout_are_those_of_its_parameters(layout):
    buffer = buffer_of(layout)
    for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets):
        start, stop = layout.bounds(name)
        assert buffer[start:stop] == [(name, i) for i in range(math.prod(shape))]
        assert (start, layout.shape(name)) == (offset, shape)
    layout.check(dict(reversed(list(zip(layout.names, layout.shapes)))))


@law
@given(layouts(min_parameters=0))
def test_a_layout_is_a_value(layout):
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout and hash(copy) == hash(layout)
    assert [copy.bounds(name) for name in copy.names] == [
        layout.bounds(name) for name in layout.names
    ]
    assert eval(repr(layout)) == layout
    assert replace(layout, multiple_of=layout.multiple_of + 1) != layout
    assert FlatLayout(
        [*layout.names],
        [[*shape] for shape in layout.shapes],
        layout.world_size,
        layout.multiple_of,
    ) == (layout)


@pytest.mark.parametrize(
    "holds",
    [
        lambda layout: any(0 in shape for shape in layout.shapes),
        lambda layout: () in layout.shapes,
        lambda layout: layout.world_size > layout.numel > 0,
        lambda layout: any(numel > 2 * layout.partition.shard_numel for numel in layout.numels),
        lambda layout: layout.names != tuple(sorted(layout.names)),
        lambda layout: layout.partition.padding > layout.partition.shard_numel,
    ],
    ids=[
        "zero-sized",
        "0-d",
        "few elements",
        "long parameter",
        "unsorted names",
        "full shard of padding",
    ],
)
def test_layouts_hold_every_kind_of_parameter(holds):
    assert holds(find(layouts(), holds))


# Buckets


@law
@given(bucket_problems())
def test_buckets_keep_the_order_and_respect_the_cap(problem):
    numels, cap = problem
    buckets = plan_buckets(numels, cap)
    assert [i for bucket in buckets for i in bucket] == list(range(len(numels)))
    for bucket in buckets:
        assert bucket
        assert len(bucket) == 1 or sum(numels[i] for i in bucket) <= cap


@law
@given(bucket_problems())
def test_no_bucket_could_have_taken_the_next_item(problem):
    numels, cap = problem
    for bucket, following in pairwise(plan_buckets(numels, cap)):
        assert sum(numels[i] for i in bucket) + numels[following[0]] > cap


# Transfer


@law
@given(layout_pairs())
def test_a_transfer_turns_shards_of_one_layout_into_shards_of_the_other(pair):
    old, new = pair
    source, target = shards_of(old), shards_of(new)
    received = [[PADDING] * len(shard) for shard in target]
    for move in plan_transfer(old, new):
        assert 0 <= move.source_start < move.source_stop <= old.partition.shard_numel
        assert 0 <= move.target_start < move.target_stop <= new.partition.shard_numel
        moved = source[move.source_rank][move.source_start : move.source_stop]
        received[move.target_rank][move.target_start : move.target_stop] = moved
    assert received == target


@law
@given(layout_pairs())
def test_a_transfer_writes_each_element_once_and_never_moves_padding(pair):
    old, new = pair
    moves, source = plan_transfer(old, new), shards_of(old)
    written = [
        (move.target_rank, i) for move in moves for i in range(move.target_start, move.target_stop)
    ]
    assert len(set(written)) == len(written) == new.numel
    assert all(
        PADDING not in source[move.source_rank][move.source_start : move.source_stop]
        for move in moves
    )


@law
@given(layout_pairs())
def test_a_transfer_has_no_more_moves_than_parameters_and_shard_boundaries(pair):
    old, new = pair
    moves = plan_transfer(old, new)
    assert (
        len(moves) <= sum(numel > 0 for numel in old.numels) + old.world_size + new.world_size - 2
    )
    for first, second in pairwise(moves):
        assert (first.target_rank, first.target_stop) <= (second.target_rank, second.target_start)
        assert (first.source_rank, first.source_stop, first.target_rank, first.target_stop) != (
            (second.source_rank, second.source_start, second.target_rank, second.target_start)
        )


@law
@given(layout_pairs(), st.data())
def test_the_moves_of_one_shard_are_those_of_all_that_it_takes_part_in(pair, data):
    old, new = pair
    names = data.draw(st.sets(st.sampled_from(new.names))) if new.names else set()
    fewer = replace(
        old,
        names=tuple(name for name in old.names if name in names),
        shapes=tuple(old.shape(name) for name in old.names if name in names),
    )
    for source, target in ((old, new), (fewer, new), (new, fewer)):
        shared = [name for name in target.names if name in source]
        moves = plan_transfer(source, target, names=shared)
        for rank in range(source.world_size):
            assert list(moves_from(source, target, rank)) == [
                move for move in moves if move.source_rank == rank
            ]
        for first, last in combinations(range(target.world_size + 1), 2):
            ranks = range(first, last)
            into = [move for move in moves if move.target_rank in ranks]
            assert list(moves_to(source, target, ranks)) == into
            held = data.draw(neighbours(source.world_size))
            others = [move for move in into if move.source_rank not in held]
            assert elements(moves_to(source, target, ranks, without=held)) == elements(others)
            own = [move for move in into if move.source_rank in held]
            as_one = list(moves_between(source, target, held, ranks)) if held else []
            assert elements(as_one) == elements(own, source, target, held, ranks)
            assert list(merged(as_one)) == as_one


def neighbours(world_size):
    bounds = st.tuples(st.integers(0, world_size), st.integers(0, world_size))
    return bounds.map(lambda found: range(min(found), max(found)))


def elements(moves, source=None, target=None, sources=range(0), targets=range(0)):
    """Each element that moves: its old and new shard and offset; or its offsets in
    joined shards.
    """
    from_one, to_one = (
        layout.partition.shard_numel if layout else 0 for layout in (source, target)
    )
    return {
        (
            sources.start if source else move.source_rank,
            (move.source_rank - sources.start) * from_one + move.source_start + index,
            targets.start if target else move.target_rank,
            (move.target_rank - targets.start) * to_one + move.target_start + index,
        )
        for move in moves
        for index in range(move.numel)
    }


@law
@given(layouts())
def test_a_transfer_to_the_same_layout_stays_on_each_rank(layout):
    for move in plan_transfer(layout, layout):
        assert (move.source_rank, move.source_start) == (move.target_rank, move.target_start)


def large_layouts(numel, num_parameters=2000):
    """Layouts of `numel` elements: on 4096 ranks, on 3072, and in round-robin order."""
    names = tuple(f"p{index}" for index in range(num_parameters))
    shapes = tuple((length,) for length in NearEqualSplit(numel, num_parameters).sizes)
    old, order = (
        FlatLayout(names, shapes, 4096, multiple_of=32),
        round_robin(num_parameters, num_lists=64),
    )
    return (
        old,
        replace(old, world_size=3072),
        replace(old, names=order.apply(names), shapes=order.apply(shapes)),
    )


def test_plans_of_a_trillion_elements_are_no_longer_than_parameters_and_shards_together():
    old, fewer, dealt = large_layouts(10**12)
    assert sum(len(old.fragments(rank)) for rank in range(4096)) <= 2000 + 4096 - 1
    # In the same order there is one move between each two shard boundaries, whatever the parameters
    # are.
    assert len(plan_transfer(old, fewer)) <= 4096 + 3072 - 1
    assert len(plan_transfer(old, dealt)) <= 2000 + 2 * 4096 - 2
    for new in (fewer, dealt):
        assert sum(move.numel for move in plan_transfer(old, new)) == 10**12


def test_the_moves_of_one_shard_cost_no_more_than_these():
    """Counted in executed lines, because times depend on the machine."""
    old, fewer, dealt = large_layouts(10**12, num_parameters=20_000)
    for new in (fewer, dealt):
        for moves in (lambda: moves_from(old, new, 7), lambda: moves_to(old, new, range(7, 8))):  # noqa: B023
            found, lines = counted_lines(lambda: list(moves()))  # noqa: B023
            assert found and lines < 2000, "a look at every parameter is 20,000 lines at least"


def counted_lines(work):
    """The result of the work, and the number of executed lines of Python."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        result = work()
    finally:
        sys.settrace(before)
    return result, lines


def test_the_memory_of_plans_does_not_grow_with_elements():
    def peak(numel):
        tracemalloc.start()
        old, *others = large_layouts(numel)
        fragments = [old.fragments(rank) for rank in range(old.world_size)]
        moves = [plan_transfer(old, new) for new in others]
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert fragments and moves
        return held

    assert peak(10**15) < 1.2 * peak(10**9)  # larger integers take a few more bytes


# The package


def test_importing_the_package_loads_no_torch():
    program = (
        "import sys, sharding; "
        "print(sorted({'torch', 'numpy', 'einops', 'hypothesis'} & sys.modules.keys())); "
        "import sharding.testing; print('torch' in sys.modules); "
        "import sharding.views; print('torch' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.split("\n")[:3] == ["[]", "False", "True"]
