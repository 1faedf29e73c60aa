"""Whole matrices in a plan: the owner of each, and what their exchanges send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import optree

from fzero.comms.axes import WORLD
from fzero.comms.mesh import is_several
from fzero.optim.whole_matrices import EntriesSpec, entries_of
from fzero.plans.flat_params import FlatParamPlan
from fzero.plans.traffic import Collective, Size
from sharding import Mesh, Sharded
from sharding.owners import Matrix, OwnedBuffer, assign_owners

if TYPE_CHECKING:
    from fzero.plans.plan import Plan

TO_OWNERS: Collective = "all_to_all of matrices to owners"
TO_SHARDS: Collective = "all_to_all of results to shards"


def owners_of(buffers: Sequence[FlatParamPlan], world_size: int) -> dict[str, tuple[int, ...]]:
    """The owners of the matrices of each flat buffer that has such. All buffers are
    divided together.
    """
    having = [(b.key, b.matrices.matrices) for b in buffers if b.matrices is not None]
    every = tuple(matrix for _, matrices in having for matrix in matrices)
    owners = iter(_assigned(every, world_size))
    return {key: tuple(next(owners) for _ in matrices) for key, matrices in having}


@lru_cache(maxsize=64)  # an update asks for each flat buffer
def places_of(
    mesh: Mesh, axes: tuple[str, ...], replicate_axes: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """By rank, the number of its replica and the index of its finest shard."""

    def index(rank: int, names: tuple[str, ...]) -> int:
        return mesh.shard_of(rank, Sharded(*names)) if names else 0

    return tuple((index(rank, replicate_axes), index(rank, axes)) for rank in range(mesh.size))


@lru_cache(maxsize=16)  # a plan is made several times from the same model
def _assigned(matrices: tuple[Matrix, ...], world_size: int) -> tuple[int, ...]:
    return assign_owners(matrices, world_size)


def with_exchanges(
    sent: dict[str, dict[str, int]], plan: Plan, size: Size
) -> dict[str, dict[str, int]]:
    """The traffic by axis, with that of the exchanges with owners, of the rank that
    sends most in them. It goes to all ranks of the mesh.
    """
    there, back = [0] * plan.world_size, [0] * plan.world_size
    for buffer in plan.flat_buffers:
        if buffer.matrices is not None:
            for owned, dtypes_there, dtype_back in exchanged(plan, buffer):
                for rank in range(plan.world_size):
                    for dtype in dtypes_there:
                        there[rank] += size(owned.num_sent_there(rank), dtype, None)
                    back[rank] += size(owned.num_sent_back(rank), dtype_back, None)
    most = max(range(plan.world_size), key=lambda rank: there[rank] + back[rank])
    axis = WORLD if is_several(plan.mesh) else plan.axes[0]
    of_axis = sent.get(axis, {}) | {TO_OWNERS: there[most], TO_SHARDS: back[most]}
    return sent | {axis: of_axis}


def exchanged(
    plan: Plan, buffer: FlatParamPlan
) -> Iterator[tuple[OwnedBuffer, tuple[str, ...], str]]:
    """The tensors of a flat buffer that go to owners: the matrices themselves, and their
    states; each with the dtypes of what is sent of that shape to owners, and back.
    """
    assert buffer.matrices is not None
    holds, matrices = buffer.flow.updates, buffer.matrices.matrices
    how = plan.owners[buffer.key], plan.places, holds
    yield (
        OwnedBuffer(buffer.layout, matrices, *how),
        buffer.matrices.there,
        buffer.matrices.back,
    )
    for spec in optree.tree_leaves(plan.optimizer[buffer.key]):
        if isinstance(spec, EntriesSpec):
            of_state = entries_of(spec.layout, matrices)
            yield OwnedBuffer(spec.layout, of_state, *how), (spec.dtype,), spec.dtype


def owner_lines(
    buffers: Sequence[FlatParamPlan], owners: Mapping[str, tuple[int, ...]], world_size: int
) -> Iterator[str]:
    """How the work on whole matrices is divided."""
    work, numbers = [0] * world_size, [0] * world_size
    for buffer in buffers:
        if buffer.matrices is not None:
            for matrix, owner in zip(buffer.matrices.matrices, owners[buffer.key], strict=True):
                work[owner] += matrix.work
                numbers[owner] += 1
    if total := sum(work):
        most = max(work) * world_size / total
        yield (
            f"whole matrices: {sum(numbers):,}, each computed by one of {world_size} ranks, "
            f"{min(numbers)} to {max(numbers)} on a rank, the most work {most:.2f} of the mean"
        )
