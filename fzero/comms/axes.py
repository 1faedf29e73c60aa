"""Axes: an axis is a value that determines which ranks take part in a collective. It
replaces a process group.

`ProcessAxis` is for real jobs, `LockstepAxis` for ranks that run in turn in one process
(`fzero.comms.lockstep`), and `AbstractAxis` for plans and schedules made before there
is a job. A captured graph has a `fzero.comms.traced.TracedAxis`. If the ranks are a
dimension of tensors, they have a `fzero.comms.stacked.StackedAxis`. On a mesh of
several axes `fzero.comms.process_group.along` makes the axes of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401 - imported later, its functions' defaults would keep that time's group and connections

from fzero.comms.records import CommRecord
from sharding import Mesh

if TYPE_CHECKING:
    from fzero.comms.lockstep import Hub

WORLD = "world"
"""The name of all ranks together, where a mesh has several axes."""


class CollectiveError(RuntimeError):
    """A collective did not end: another rank died, left, or did not arrive in time."""


@dataclass(frozen=True, slots=True)
class ProcessAxis:
    """One rank of a process group along the mesh axis `name`.

    Args:
        name: the mesh axis.
        size: number of ranks W.
        rank: the rank of this process.
        group: the torch.distributed group; None takes the default group (one rank alone
            never communicates).
        observe: called with a `CommRecord` for every collective, before it starts.
        mesh: the mesh of several axes whose ranks this axis joins into one; None if
            there is only this axis.

    >>> alone = ProcessAxis("data")
    >>> alone.size, alone.rank
    (1, 0)
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    observe: Callable[[CommRecord], None] | None = field(default=None, repr=False)
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"ProcessAxis: rank must be in [0, {self.size}), got {self.rank}; give the group's "
                f"own rank"
            )
        if self.size > 1 and not dist.is_initialized():
            raise ValueError(
                f"ProcessAxis: {self.size} ranks need a process group; start with torchrun and use "
                f"fzero.join()"
            )

    def global_rank(self, rank: int) -> int:
        """The rank in the whole job of `rank` on this axis."""
        if self.group is not None:
            return dist.get_global_rank(self.group, rank)
        return dist.get_rank() if self.size == 1 and dist.is_initialized() else rank


@dataclass(frozen=True, slots=True)
class LockstepAxis:
    """One of `size` ranks along the mesh axis `name` that run in turn in this process.

    Args:
        hub: carries the messages between the ranks.
        name, size, rank, observe, mesh: as for `ProcessAxis`.
        ranks: the number by which the hub knows each rank; empty if that is the rank on
            this axis.
    """

    name: str
    size: int
    rank: int
    hub: Hub = field(repr=False)
    observe: Callable[[CommRecord], None] | None = field(default=None, repr=False)
    mesh: Mesh | None = None
    ranks: tuple[int, ...] = ()

    def global_rank(self, rank: int) -> int:
        """The rank in the whole job of `rank` on this axis."""
        return self.ranks[rank] if self.ranks else rank


@dataclass(frozen=True, slots=True)
class AbstractAxis:
    """One rank of `size` along the mesh axis `name`, without a process: for plans and
    schedules; no step can run on it.

    Args:
        name, size, mesh: as for `ProcessAxis`; see `of`.
        rank: the rank that is planned for.
        backend: `"nccl"` captures the named collectives, `"gloo"` the collectives that
            replace them on gloo.

    >>> AbstractAxis("data", 1024).rank
    0
    """

    name: str
    size: int
    rank: int = 0
    backend: Literal["nccl", "gloo"] = "nccl"
    mesh: Mesh | None = None

    @classmethod
    def of(cls, mesh: Mesh, rank: int = 0, backend: Literal["nccl", "gloo"] = "nccl") -> Self:
        """One rank of a mesh.

        >>> AbstractAxis.of(Mesh.of(node=2, data=4)).size
        8
        """
        if not isinstance(mesh, Mesh):
            raise ValueError(
                f"AbstractAxis.of: mesh must be a sharding.Mesh, got {mesh!r}; pass "
                f"Mesh.of(node=2, data=4), say"
            )
        return cls("data", mesh.size, rank, backend, mesh)

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(
                f"AbstractAxis: size must be a whole number, at least 1, got {self.size!r}; pass "
                f"the number of ranks"
            )
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.size:
            raise ValueError(
                f"AbstractAxis: rank must be in [0, {self.size}), got {self.rank}; pass the rank "
                f"to plan for"
            )
        if self.backend not in ("nccl", "gloo"):
            raise ValueError(
                f"AbstractAxis: backend must be 'nccl' or 'gloo', got {self.backend!r}; pass one "
                f"of these"
            )


RankAxis = ProcessAxis | LockstepAxis
"""An axis to which this process, or this thread, belongs as one rank."""


def observed(axis: RankAxis, observe: Callable[[CommRecord], None]) -> RankAxis:
    """The same axis, whose collectives are also reported to `observe`."""
    before = axis.observe

    def both(record: CommRecord) -> None:
        if before is not None:
            before(record)
        observe(record)

    return replace(axis, observe=both)
