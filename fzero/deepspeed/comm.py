"""`deepspeed.comm`: torch.distributed, and `init_distributed`, which initialises the process group of a launcher's job."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fzero.common.text_tables import as_text
from fzero.comms import collectives, process_group
from fzero.comms.failures import TIMEOUT
from fzero.engine.initialize import check_may_join
from fzero.engine.param_views import ENGINES
from fzero.engine.step_log import merged


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
    """Initialises the process group that the launcher describes, if necessary; without a launcher, a group of this process.

    *Collective:* every rank of the job.

    Args:
        dist_backend: "nccl" or "gloo"; None is the device's.
        timeout: how long a collective waits for a missing rank.
        init_method, rank, world_size: as for torch.distributed.init_process_group.
        dist_init_required: False initialises nothing.
        auto_mpi_discovery, distributed_port, verbose, config: ignored.

    Raises:
        ConfigError: `dist_init_required` is False, and ranks of a launcher have no process group yet.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        check_may_join(False)
        return
    if init_method is not None or rank >= 0:
        dist.init_process_group(
            dist_backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
        )
        return
    if dist_backend not in (None, "nccl", "gloo"):
        raise ValueError(f"init_distributed: dist_backend must be 'nccl' or 'gloo', got {dist_backend!r}; leave it out")
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    process_group.join("cuda" if backend == "nccl" else "cpu", timeout=timeout)


def get_rank(group: Any = None) -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier(group: Any = None) -> None:
    """Waits for all ranks."""
    if dist.is_initialized():
        dist.barrier(group)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Prints on rank 0 the collectives of all engines with `comms_logger`, and how long this process waited for them.

    *Collective:* every rank; sends a few bytes.

    Args:
        show_straggler: whether to print also the shortest and longest wait of any rank.
        return_dict: whether to return this rank's numbers: `{"summary": {collective: {bytes: {"count": …}}}, …}`.
    """
    log = merged([engine.comms_log for engine in ENGINES if engine.comms_log is not None])
    waited = collectives.exchange(dict(log.waited), process_group.job()) if show_straggler else [log.waited]
    if get_rank() == 0:
        for table in log.tables(waited):
            print(as_text(table), flush=True)
        if not log.counts:
            print("nothing was logged: comms_logger.enabled of an engine's configuration switches it on", flush=True)
    barrier()
    return log.as_dict() if return_dict else None


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
