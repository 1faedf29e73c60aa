"""Collectives over several axes of a mesh, on ranks in lockstep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fzero.comms.axes import LockstepAxis
from fzero.comms.lockstep import Hub
from fzero.comms.mesh import RankMesh
from sharding import Mesh

HYBRID = Mesh.of(node=2, data=2)


def on_hybrid(function: Any) -> list[Tensor]:
    """What a function of (rank, mesh) returns on four ranks that shard along "data" and replicate along "node"."""
    hub = Hub(4)
    division = SimpleNamespace(
        mesh=HYBRID, world_size=4, axes=("data",), replicate_axes=("node",), shard_of=lambda rank: rank % 2
    )
    return hub.run(lambda rank: function(rank, RankMesh.of(LockstepAxis("data", 4, rank, hub, mesh=HYBRID), division)))


def test_a_held_sum_is_added_in_its_own_dtype_before_the_replicas_are_summed() -> None:
    full = [torch.linspace(0.1, 0.9, 8) * (rank + 1) for rank in range(4)]
    held = [torch.linspace(100.3, 207.7, 4).mul(rank + 1).bfloat16() for rank in range(4)]

    def reduced(rank: int, mesh: RankMesh) -> Tensor:
        return mesh.start_reduce_scatter(full[rank].clone(), held_S=held[rank].clone()).wait()[0]

    own = [slice(4 * (rank % 2), 4 * (rank % 2) + 4) for rank in range(4)]
    of_node = [full[0] + full[1], full[0] + full[1], full[2] + full[3], full[2] + full[3]]
    sums = [held[rank].clone().add_(of_node[rank][own[rank]]).float() for rank in range(4)]
    for rank, found in enumerate(on_hybrid(reduced)):
        other = (rank + 2) % 4
        assert torch.equal(found, sums[min(rank, other)] + sums[max(rank, other)])
