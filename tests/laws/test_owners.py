"""Laws of the compute layout of whole matrices (`sharding.owners`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from sharding import FlatLayout
from sharding.owners import (
    Matrix,
    OwnedBuffer,
    assign_owners,
    matrices_of,
    newton_schulz_flops,
)


def gpt(num_blocks: int, width: int, world_size: int) -> list[FlatLayout]:
    """The matrices of the blocks of a GPT, one buffer for each block."""
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    return [
        FlatLayout(
            tuple(f"h.{i}.{name}" for name in ("qkv", "out", "up", "down")), shapes, world_size
        )
        for i in range(num_blocks)
    ]


def owned(
    layouts: list[FlatLayout], num_replicas: int = 1, holds: str = "shard"
) -> list[OwnedBuffer]:
    """Each buffer with owners; the work of all is divided together."""
    world_size = layouts[0].world_size * num_replicas
    places = tuple(divmod(rank, layouts[0].world_size) for rank in range(world_size))
    each = [matrices_of(layout) for layout in layouts]
    owners = assign_owners([matrix for of_layout in each for matrix in of_layout], world_size)
    found = []
    for layout, matrices in zip(layouts, each, strict=True):
        own, owners = owners[: len(matrices)], owners[len(matrices) :]
        found.append(OwnedBuffer(layout, matrices, own, places, holds))  # type: ignore[arg-type]
    return found


@st.composite
def owned_buffers(draw: st.DrawFn) -> OwnedBuffer:
    shapes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5))
    layout = FlatLayout(
        tuple(f"p{i}" for i in range(len(shapes))),
        tuple(shapes),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 3, 8])),
    )
    num_replicas, holds = draw(st.integers(1, 3)), draw(st.sampled_from(["shard", "full"]))
    (buffer,) = owned([layout], num_replicas, holds)
    return buffer


@given(owned_buffers())
def test_each_element_of_a_matrix_reaches_its_owner_once_and_every_holder_once(
    buffer: OwnedBuffer,
) -> None:
    ranks = range(len(buffer.places))
    there = {m for rank in ranks for m in buffer.to_owners(rank)}
    back = {m for rank in ranks for m in buffer.from_owners(rank)}
    arrived = Counter((m.matrix, m.owner, m.start + i) for m in there for i in range(m.numel))
    assert arrived == Counter(
        (index, owner, i)
        for index, (matrix, owner) in enumerate(zip(buffer.matrices, buffer.owners, strict=True))
        for i in range(matrix.numel)
    )
    written = Counter((m.rank, m.offset + i) for m in back for i in range(m.numel))
    assert set(written.values()) <= {1}
    layout = buffer.layout
    for rank, (_, shard) in enumerate(buffer.places):
        first, last = (
            layout.partition.bounds(shard) if buffer.holds == "shard" else (0, layout.numel)
        )
        held = range(max(min(last, layout.numel) - first, 0))
        assert {offset for r, offset in written if r == rank} == set(held)


@given(owned_buffers())
def test_both_ends_of_a_move_know_it(buffer: OwnedBuffer) -> None:
    for moves in (buffer.to_owners, buffer.from_owners):
        for rank in range(len(buffer.places)):
            for move in moves(rank):
                assert rank in (move.rank, move.owner)
                assert move in moves(move.rank) and move in moves(move.owner)


@given(owned_buffers())
def test_replicas_send_to_owners_among_themselves(buffer: OwnedBuffer) -> None:
    for rank in range(len(buffer.places)):
        for move in buffer.to_owners(rank):
            assert buffer.places[move.rank][0] == buffer.places[move.owner][0]


@given(owned_buffers())
def test_no_element_is_sent_twice_in_a_direction(buffer: OwnedBuffer) -> None:
    ranks, numel = range(len(buffer.places)), sum(m.numel for m in buffer.matrices)
    copies = len(ranks) if buffer.holds == "full" else len({r for r, _ in buffer.places})
    assert sum(map(buffer.num_sent_there, ranks)) <= (numel if buffer.holds == "shard" else 0)
    assert sum(map(buffer.num_sent_back, ranks)) <= copies * numel


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 8))
def test_owners_are_balanced_by_work(works: list[int], world_size: int) -> None:
    matrices = [Matrix(f"m{i}", 0, 2, 2, work) for i, work in enumerate(works)]
    owners = assign_owners(matrices, world_size)
    loads = [0] * world_size
    for owner, matrix in zip(owners, matrices, strict=True):
        loads[owner] += matrix.work
    # Graham 1969, theorem 2: at most the mean and the last matrix that was given
    assert max(loads) <= sum(works) / world_size + max(works, default=0)
    assert assign_owners(matrices, world_size) == owners


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=20))
def test_owners_depend_on_shapes_and_ranks_alone(shapes: list[tuple[int, int]]) -> None:
    matrices = [Matrix(f"m{i}", 0, *s, newton_schulz_flops(*s)) for i, s in enumerate(shapes)]
    renamed = [replace(matrix, name=matrix.name + "'") for matrix in matrices]
    assert assign_owners(matrices, 3) == assign_owners(renamed, 3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("world_size", [2, 8, 64])
@pytest.mark.parametrize(("num_blocks", "width"), [(48, 64), (96, 32)])
def test_a_gpt_is_divided_within_five_percent_and_sends_two_shards_an_update(
    num_blocks: int, width: int, world_size: int
) -> None:
    buffers = owned(gpt(num_blocks, width, world_size))
    work, sent = [0] * world_size, [0] * world_size
    for buffer in buffers:
        for matrix, owner in zip(buffer.matrices, buffer.owners, strict=True):
            work[owner] += matrix.work
        for rank in range(world_size):
            sent[rank] += buffer.num_sent(rank)
    numel = sum(buffer.layout.numel for buffer in buffers)
    assert max(work) <= 1.05 * sum(work) / world_size
    assert max(sent) <= 2 * numel / world_size
