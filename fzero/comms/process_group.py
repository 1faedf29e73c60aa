"""The process group of this process: joining and leaving a job, and the groups of its
mesh axes.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fzero.comms.axes import AbstractAxis, LockstepAxis, ProcessAxis, RankAxis
from fzero.comms.hangs.failures import (
    Explained,
    drop_probes,
    end_watch,
    keep_watch,
    timeout_of,
    timeout_of_group,
)
from fzero.comms.pending import drop_abandoned, has_abandoned
from fzero.comms.rendezvous import follow_port, launched
from sharding import Mesh

_PARTS: WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
] = WeakKeyDictionary()
"""The groups that contain some ranks of another group, by that group. They live as long
as it does.
"""

AnyRank = TypeVar("AnyRank", RankAxis, ProcessAxis | AbstractAxis)


# --- joining and leaving --------------------------------------------------------------------------


def join(
    device: torch.device | str = "cpu", *, name: str = "data", timeout: timedelta | None = None
) -> ProcessAxis:
    """This process as a rank of the axis `name`: in the initialised group, in the job
    that started the process, or alone.

    *Collective:* every rank of the job, if `fzero.launched()` finds a job of torchrun,
    mpirun or srun.

    Args:
        device: CUDA picks NCCL and this rank's own GPU (LOCAL_RANK), any other device
            gloo.
        name: the mesh axis.
        timeout: how long a collective waits for a rank that does not come. It has an
            effect only if this call makes the group. None reads FZERO_TIMEOUT, in
            seconds (`fzero --timeout`), or else DEEPSPEED_TIMEOUT, in minutes; without
            these it is 10 minutes.
    """
    if not dist.is_initialized():
        me, kind = launched(), torch.device(device).type
        if me is None:
            return ProcessAxis(name)
        follow_port(os.environ)
        # torchrun's agent may hold the store; only env:// finds it there.
        where: dict[str, Any] = {"init_method": "env://"}
        if me.by != "torchrun":
            url = f"tcp://{me.master_addr}:{me.master_port}"
            where = {"init_method": url, "rank": me.rank, "world_size": me.world_size}
        # NCCL connects here, and a rank that cannot is reported here; a barrier knows the GPU
        if kind == "cuda":
            where["device_id"] = torch.device("cuda", me.local_rank)
            torch.cuda.set_device(me.local_rank)
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout or timeout_of(os.environ), **where)
        atexit.register(_leave)
    keep_watch()
    return ProcessAxis(name, dist.get_world_size(), dist.get_rank())


def _leave() -> None:
    """Leaves the group at the end of a process without errors. (After an error other
    ranks may be waiting.)

    A thread of gloo frees a collective's tensors a moment after the collective has
    ended. If the interpreter is shutting down by then, this aborts the process. Leaving
    the group waits for that thread.
    """
    if not has_abandoned() and not hasattr(sys, "last_type"):
        shutdown()


def shutdown() -> None:
    """Leaves the process group, if there is one. *Collective:* call it on every rank,
    once, at the end.

    After an error on this rank alone, the collectives of the other ranks fail.
    """
    drop_abandoned()
    drop_probes()
    end_watch()
    if dist.is_initialized():
        dist.destroy_process_group()


def job() -> ProcessAxis:
    """This process among all processes of the default group, whatever axes they form;
    alone if there is no group.
    """
    return (
        ProcessAxis("job", dist.get_world_size(), dist.get_rank())
        if dist.is_initialized()
        else ProcessAxis("job")
    )


def world_group() -> dist.ProcessGroup | None:
    """The default group; None without one."""
    return dist.group.WORLD if dist.is_initialized() else None


def is_joined(*, without: str = "-") -> bool:
    """Whether this process is in a process group that lacks the backend `without`."""
    return dist.is_initialized() and without not in str(dist.get_backend_config())


def backends() -> tuple[str, ...]:
    """The backends of process groups that this build of torch has."""
    has = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return tuple(name for name, is_there in has.items() if is_there)


def check_backend(device: torch.device) -> None:
    """Raises ValueError when the process group that was joined cannot send tensors of
    `device`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    needed, found = ("nccl" if device.type == "cuda" else "gloo"), str(dist.get_backend_config())
    if needed not in found:
        raise ValueError(
            f"process group: a model on {device} needs the backend {needed!r}, got {found!r}; join "
            f"with fzero.join({device.type!r}), or put the model on the other device"
        )


# --- the groups of mesh axes ----------------------------------------------------------------------


def along(world: AnyRank, mesh: Mesh, name: str) -> AnyRank:
    """The ranks that differ from this one only along the axis `name` of a mesh; `world`
    are all of its ranks.

    *Collective* on a `ProcessAxis`, where the first call makes a process group: every
    rank, one axis after the other.
    """
    size, rank = mesh.axis_size(name), mesh.coordinate(world.rank)[name]
    if size == world.size:
        return replace(world, name=name, mesh=None)
    if isinstance(world, AbstractAxis):
        return replace(world, name=name, size=size, rank=rank, mesh=None)
    ranks = tuple(map(world.global_rank, mesh.peers(world.rank, name)))
    if isinstance(world, LockstepAxis):
        return replace(world, name=name, size=size, rank=rank, mesh=None, ranks=ranks)
    group = group_of(world.group, ranks, f"fzero {name}") if size > 1 else None
    return ProcessAxis(name, size, rank, group, world.observe)


def once_more(axis: RankAxis) -> RankAxis:
    """The same ranks with a second process group, for collectives that must not wait
    for those of the axis's own group.

    *Collective* on a `ProcessAxis` of several ranks: every one.
    """
    if not isinstance(axis, ProcessAxis) or axis.size == 1:
        return axis
    ranks = tuple(map(axis.global_rank, range(axis.size)))
    return replace(axis, group=group_of(None, ranks, f"fzero {axis.name}", of="again"))


def group_of(
    parent: dist.ProcessGroup | None, ranks: tuple[int, ...], description: str, *, of: str = ""
) -> dist.ProcessGroup:
    """The process group of some ranks of a parent group. `ranks` are their numbers in
    the whole job; another `of` is another group."""
    parent = parent or dist.group.WORLD
    assert parent is not None
    parts = _PARTS.setdefault(parent, {})
    if (of, ranks) not in parts:
        limit, name = (
            timeout_of_group(parent),
            f"{parent.group_name} {description} {ranks} {of}".rstrip(),
        )
        # Only the group's own ranks make it, because `parent` may be only a part of the job. So it
        # must not split NCCL's whole communicator (as torch does after
        # `init_process_group(device_id=...)`), waiting for all ranks; nor have torch's name, made
        # from the number of groups of a process, which differs if a rank took no part in an earlier
        # job.
        module, whole = dist.distributed_c10d, dist.group.WORLD
        bound, whole.bound_device_id = whole.bound_device_id, None  # type: ignore[union-attr]
        named = patch.object(module, "_process_group_name", lambda ranks, use_hashed_name: name)
        try:
            with Explained(f"group {description!r} of ranks {list(ranks)}"), named:
                parts[of, ranks] = dist.new_group(
                    list(ranks),
                    timeout=limit,
                    use_local_synchronization=True,
                    group_desc=description,
                )
        finally:
            whole.bound_device_id = bound  # type: ignore[union-attr]
    return parts[of, ranks]
