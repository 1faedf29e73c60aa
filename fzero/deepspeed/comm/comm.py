"""torch.distributed under DeepSpeed's names, and `init_distributed`, which initialises
the process group of a launcher's job.

Every name that is not here is torch.distributed's. DeepSpeed's own arguments `prof`,
`log_name` and `debug` are accepted."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh

from fzero.common.text_tables import as_text
from fzero.comms import collectives, process_group
from fzero.comms.hangs.failures import TIMEOUT
from fzero.comms.rendezvous import follow_port, launched
from fzero.deepspeed.accelerator import get_accelerator as get_accelerator
from fzero.deepspeed.engine.initialize import check_may_join
from fzero.deepspeed.engine.param_views import ENGINES
from fzero.deepspeed.engine.step_log import merged


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialises the process group that the launcher describes, if necessary; without
    a launcher, a group of this process.

    *Collective:* every rank of the job.

    Args:
        dist_backend: "nccl" or "gloo"; None is the device's.
        timeout: how long a collective waits for a missing rank.
        init_method, rank, world_size: as for torch.distributed.init_process_group.
        dist_init_required: False initialises nothing.
        auto_mpi_discovery, distributed_port, verbose, config: ignored.

    Raises:
        ConfigError: `dist_init_required` is False, and ranks of a launcher have no
            process group yet.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        check_may_join(False)
        return
    if init_method is not None or rank >= 0:
        follow_port(os.environ)
        dist.init_process_group(
            dist_backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
        )
        return
    if dist_backend not in (None, "nccl", "gloo"):
        raise ValueError(
            f"init_distributed: dist_backend must be 'nccl' or 'gloo', got {dist_backend!r}; leave "
            f"it out"
        )
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    process_group.join("cuda" if backend == "nccl" else "cpu", timeout=timeout)


def get_rank(group: Any = None) -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,
    prof: bool = False,
    log_name: str = "",
    debug: str = "",
) -> None:
    """Waits for all ranks."""
    if dist.is_initialized():
        dist.barrier(group)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Prints on rank 0 the collectives of all engines with `comms_logger`, and how long
    this process waited for them.

    *Collective:* every rank; sends a few bytes.

    Args:
        show_straggler: whether to print also the shortest and longest wait of any rank.
        return_dict: whether to return this rank's numbers:
            `{"summary": {collective: {bytes: {"count": …}}}, …}`.
    """
    log = merged([engine.comms_log for engine in ENGINES if engine.comms_log is not None])
    waited = (
        collectives.exchange(dict(log.waited), process_group.job())
        if show_straggler
        else [log.waited]
    )
    if get_rank() == 0:
        for table in log.tables(waited):
            print(as_text(table), flush=True)
        if not log.counts:
            print(
                "nothing was logged: comms_logger.enabled of an engine's configuration switches it "
                "on",
                flush=True,
            )
    barrier()
    return log.as_dict() if return_dict else None


def reset_log() -> None:
    """Forgets the collectives that were logged so far."""
    for engine in ENGINES:
        if engine.comms_log is not None:
            engine.comms_log.forget()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Any = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Does nothing: `comms_logger` of an engine's configuration switches the log on,
    when the engine is made.
    """


def get_local_rank() -> int:
    """The index of this process on its machine."""
    me = launched()
    return int(os.environ.get("LOCAL_RANK", 0)) if me is None else me.local_rank


get_local_rank_from_launcher = get_local_rank


def get_world_rank_from_launcher() -> int:
    """The rank that the launcher gave this process; 0 without one."""
    me = launched()
    return 0 if me is None else me.rank


def get_world_size_from_launcher() -> int:
    """The number of ranks that the launcher started; 1 without one."""
    me = launched()
    return 1 if me is None else me.world_size


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank in the job of a rank of a group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks in the job of a group's ranks, in the group's order."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """torch's device mesh of all ranks. *Collective:* every rank."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return dist.device_mesh.init_device_mesh(device, mesh_shape, mesh_dim_names=mesh_dim_names)


def all_gather_coalesced(
    output_tensors: Any, input_tensors: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Gathers several tensors of all ranks, each into one flat tensor. *Collective:*
    every rank of the group.
    """
    return _together([_plain("all_gather_into_tensor")(o, i, group=group, async_op=True)
                      for o, i in zip(output_tensors, input_tensors, strict=True)], async_op)  # fmt: skip


def all_reduce_coalesced(
    tensors: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Sums several tensors over all ranks, in place. *Collective:* every rank of the
    group.
    """
    return _together(
        [dist.all_reduce(x, op=op, group=group, async_op=True) for x in tensors], async_op
    )


class _Works:
    """Several collectives under way."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _together(works: list[Any], async_op: bool) -> Any:
    found = _Works(works)
    return found if async_op else found.wait()


_NAMES = {
    "all_gather_into_tensor": {"input_tensor": "tensor"}, "all_to_all_single": {"input": "tensor"},
    "reduce_scatter_tensor": {"output": "output_tensor", "input": "tensor"},
}  # fmt: skip
"""DeepSpeed's names of arguments of torch's functions."""
_OF_LOG = {"prof": False, "log_name": "", "debug": ""}
"""DeepSpeed's own arguments, and their defaults."""


def _plain(name: str) -> Any:
    """torch's function with DeepSpeed's names of arguments, torch's, and those for
    DeepSpeed's log, which change nothing.
    """
    function, renamed = getattr(dist, name), _NAMES.get(name, {})
    theirs = {new: old for old, new in renamed.items()}
    given = [
        p.replace(name=renamed.get(p.name, p.name))
        for p in inspect.signature(function).parameters.values()
    ]
    of_log = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=x)
        for n, x in _OF_LOG.items()
    ]
    first, last = (
        [p for p in given if p.name.startswith("group_") is is_last] for is_last in (False, True)
    )
    known = inspect.Signature([*first, *of_log, *(p.replace(kind=p.KEYWORD_ONLY) for p in last)])

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = known.bind(
            *args, **{renamed.get(key, key): value for key, value in kwargs.items()}
        ).arguments
        return function(
            **{theirs.get(key, key): value for key, value in bound.items() if key not in _OF_LOG}
        )

    call.__signature__ = known  # type: ignore[attr-defined]
    return call


_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
_SAME = {
    "allgather_fn": "all_gather_into_tensor",
    "reduce_scatter_fn": "reduce_scatter_tensor",
    "inference_all_reduce": "all_reduce",
}
_HAS = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce_coalesced",
    "coalescing_manager",
)
globals().update({name: _plain(name) for name in _COLLECTIVES})
globals().update({name: _plain(of) for name, of in _SAME.items()})
globals().update({f"has_{name}": lambda: True for name in _HAS})


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
