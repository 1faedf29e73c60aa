"""Collectives over several axes of a mesh: on ranks in lockstep, and on stacked ranks
with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from torch import Tensor

import fzero
from fzero.comms import collectives
from fzero.comms.axes import LockstepAxis
from fzero.comms.codecs import quantize
from fzero.comms.compression import compressed, error_feedback, reset_every
from fzero.comms.lockstep import Hub
from fzero.comms.mesh import AxisMesh, RankMesh, stacked_mesh
from fzero.comms.records import CommRecord
from fzero.comms.stacked import Stacked
from sharding import Mesh, Sharded

LOCO = reset_every(error_feedback(compressed(quantize(4, 4)), decay=0.8), every=2)


def division(mesh: Mesh, axes: tuple[str, ...], replicate_axes: tuple[str, ...] = ()) -> Any:
    """What a plan says about a mesh."""
    return SimpleNamespace(
        mesh=mesh, world_size=mesh.size, seq_size=1, axes=axes, replicate_axes=replicate_axes,
        shard_of=lambda rank: mesh.shard_of(rank, Sharded(*axes)),
    )  # fmt: skip


HYBRID = division(Mesh.of(node=2, data=2), ("data",), ("node",))
DIVISIONS = {
    "one axis": division(Mesh.of(data=3), ("data",)),
    "hybrid": division(Mesh.of(node=2, data=3), ("data",), ("node",)),
    "two shard axes": division(Mesh.of(node=3, data=2), ("data", "node")),
    "three axes": division(Mesh.of(pod=2, node=2, data=2), ("data", "node"), ("pod",)),
    "nodes of one rank": division(Mesh.of(node=3, data=1), ("data",), ("node",)),
    "one node": division(Mesh.of(node=1, data=3), ("data",), ("node",)),
}


def in_lockstep(
    plan: Any,
    function: Callable[..., Any],
    *xs_W: Tensor,
    observe: Callable[[CommRecord], None] | None = None,
) -> list[Any]:
    """The results of a function of a mesh and the tensors of one rank; `observe` gets
    the records of rank 0.
    """
    hub = Hub(plan.world_size)

    def on_a_rank(rank: int) -> Any:
        axis = LockstepAxis(
            "data", plan.world_size, rank, hub, None if rank else observe, plan.mesh
        )
        return function(RankMesh.of(axis, plan), *(x_W[rank].clone() for x_W in xs_W))

    return hub.run(on_a_rank)


def at_once(plan: Any, function: Callable[..., Any], *xs_W: Tensor) -> list[Any]:
    """The same on stacked ranks."""
    ranks = Stacked(plan.mesh, plan.axes)
    mesh = stacked_mesh(ranks, plan)
    found_W = ranks.map(lambda *xs: function(mesh, *xs))(*xs_W)
    return [
        optree.tree_map(lambda x_W, rank=rank: x_W[rank], found_W)
        for rank in range(plan.world_size)
    ]


def numbers(plan: Any, numel: int) -> Tensor:
    return torch.randn(plan.world_size, numel, generator=torch.Generator().manual_seed(0))


def gathered(mesh: AxisMesh[Any], shard: Tensor) -> Tensor:
    return mesh.all_gather(shard, mesh.axes)


def reduced(mesh: AxisMesh[Any], full: Tensor) -> Tensor:
    return mesh.start_reduce_scatter(full).wait()[0]


def reduced_late(mesh: AxisMesh[Any], full: Tensor) -> Tensor:
    shard, _ = mesh.start_reduce_scatter(full, sum_replicas="later").wait()
    return mesh.start_sum_replicas(shard).wait()[0]


def added_up(mesh: AxisMesh[Any], full: Tensor) -> Tensor:
    return mesh.start_all_reduce(full).wait()[0]


def sent_in_codes(mesh: AxisMesh[Any], full: Tensor) -> Any:
    """Two rounds through comm hooks that have states, first as stage 2 and then as
    stage 0 would.
    """
    hooks, states, numel = {}, {}, full.numel()
    for axis in (*mesh.axes, *mesh.replicate_axes):
        if axis.size > 1:
            hooks[axis.name], states[axis.name] = LOCO, LOCO.init(full[:numel])
        numel //= axis.size
    shard, states = mesh.start_reduce_scatter(full.clone(), hooks=hooks, states=states).wait()
    total, states = mesh.start_all_reduce(full, hooks=hooks, states=states).wait()
    return shard, total, states


@pytest.mark.covering(1)
@pytest.mark.parametrize("plan", DIVISIONS.values(), ids=DIVISIONS)
@pytest.mark.parametrize("function", [gathered, reduced, reduced_late, added_up, sent_in_codes])
def test_stacked_ranks_get_the_bits_of_ranks_in_lockstep(plan: Any, function: Any) -> None:
    xs_W = numbers(plan, 4 * plan.world_size)
    for alone, stacked in zip(
        in_lockstep(plan, function, xs_W), at_once(plan, function, xs_W), strict=True
    ):
        optree.tree_map(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), alone, stacked
        )


@pytest.mark.parametrize("plan", DIVISIONS.values(), ids=DIVISIONS)
def test_a_gather_joins_what_a_reduction_divides(plan: Any) -> None:
    full_W = numbers(plan, 4 * plan.world_size)

    def both(mesh: RankMesh, full: Tensor) -> tuple[Tensor, Tensor]:
        total = mesh.start_all_reduce(full.clone()).wait()[0]
        return total, mesh.all_gather(mesh.start_reduce_scatter(full).wait()[0], mesh.axes)

    for total, joined in in_lockstep(plan, both, full_W):
        assert torch.equal(total, joined)
        torch.testing.assert_close(total, full_W.sum(0))


def test_a_sum_over_several_axes_is_one_record_along_each() -> None:
    sent: list[CommRecord] = []
    in_lockstep(HYBRID, added_up, numbers(HYBRID, 8), observe=sent.append)
    assert [(one.collective, one.axis, one.num_elements) for one in sent] == [
        ("all_reduce", "data", 8), ("all_reduce", "node", 4),
    ]  # fmt: skip


def test_a_held_sum_is_added_in_its_own_dtype_before_the_replicas_are_summed() -> None:
    full_W = torch.stack([torch.linspace(0.1, 0.9, 8) * (rank + 1) for rank in range(4)])
    held_W = torch.stack(
        [torch.linspace(100.3, 207.7, 4).mul(rank + 1).bfloat16() for rank in range(4)]
    )

    def with_held(mesh: RankMesh, full: Tensor, held: Tensor) -> Tensor:
        return mesh.start_reduce_scatter(full, accumulated_S=held).wait()[0]

    of_node = [
        full_W[0] + full_W[1],
        full_W[0] + full_W[1],
        full_W[2] + full_W[3],
        full_W[2] + full_W[3],
    ]
    own = [slice(4 * (rank % 2), 4 * (rank % 2) + 4) for rank in range(4)]
    sums = [held_W[rank].clone().add_(of_node[rank][own[rank]]).float() for rank in range(4)]
    for rank, found in enumerate(in_lockstep(HYBRID, with_held, full_W, held_W)):
        other = (rank + 2) % 4
        assert torch.equal(found, sums[min(rank, other)] + sums[max(rank, other)])


def _of_rank_0() -> list[list[Any]]:
    axis = fzero.join()
    orders = (
        torch.zeros(2, 3, 4) if axis.rank else torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0)
    )
    column = torch.arange(10.0).view(5, 2)[:, 0] + 100 * axis.rank
    column = torch.stack([column, column + 50], dim=1)[:, 0]  # every other element of its memory
    return [collectives.broadcast(x, axis).tolist() for x in (orders, column)]


def test_a_broadcast_goes_by_indices_and_not_by_memory(ranks: RankPool) -> None:
    expected = [torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0).tolist(), [0, 2, 4, 6, 8]]
    assert ranks(2, _of_rank_0) == [expected] * 2


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
DTYPES += [
    name for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz") if hasattr(torch, name)
]


def _each_dtype() -> dict[str, list[bytes]]:
    axis = fzero.join()
    sent = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        x = (torch.arange(6.0) % 2 + axis.rank).to(dtype)
        found = [
            collectives.broadcast(x.clone(), axis),
            collectives.stack(x, axis),
            collectives.stack(x[0], axis),
            collectives.start_all_gather(x, None, axis).wait(),
        ]
        assert all(y.dtype == dtype for y in found)
        sent[name] = [y.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for y in found]
    return sent


def test_tensors_of_every_dtype_can_be_sent(ranks: RankPool) -> None:
    for found in ranks(2, _each_dtype):
        for name in DTYPES:
            rows = [(torch.arange(6.0) % 2 + rank).to(getattr(torch, name)) for rank in range(2)]
            firsts = [row[:1] for row in rows]
            expected = [rows[0], torch.cat(rows), torch.cat(firsts), torch.cat(rows)]
            assert found[name] == [x.view(torch.uint8).numpy().tobytes() for x in expected], name
