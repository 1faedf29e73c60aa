"""How `zero.Init` divides a model: over which ranks, in which dtype, and where shards
are until an engine takes them over.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.comms.process_group import is_joined, job, join
from fzero.config.config import ConfigError
from fzero.config.files import read
from fzero.deepspeed.engine.divided_params import Rules

_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
_DEVICES = (None, "none", "cpu", "nvme")


def rules_of(
    source: Mapping[str, Any] | str | Path | None,
    *,
    dtype: torch.dtype | None,
    remote_device: Any,
    pins: bool,
) -> Rules:
    """The rules of `zero.Init`, which documents the arguments. *Collective* if no
    process group exists: every rank.

    Raises:
        ConfigError: a value is not supported.
    """
    given = dict(read(source)) if isinstance(source, str | Path) else source or {}
    offload = _block(given, "zero_optimization").get("offload_param") or {}
    if "device" in offload:  # as in DeepSpeed, the configuration counts
        remote_device, pins = offload["device"], _is_on(offload.get("pin_memory", True))
    name = getattr(remote_device, "value", remote_device)
    if name not in _DEVICES:
        known = ", ".join(map(repr, _DEVICES[1:]))
        raise ConfigError(
            f"remote_device: must be one of {known}, got {name!r}; pass one, or leave it out"
        )
    if dtype is None and source is not None:
        on = [kind for kind in _DTYPES if _is_on(_block(given, kind).get("enabled"))]
        dtype = _DTYPES[on[0]] if on else torch.float32
    device = own_device()
    return Rules(join(device), device, dtype, _keeper(name, offload.get("nvme_path"), pins=pins))


def check_all_ranks(groups: Iterable[Any], mpu: Any) -> None:
    """Raises a ConfigError unless every group is None or has all ranks, and the mpu has
    no model parallelism.
    """
    world = job().size
    for group in groups:
        if group is not None and group.size() != world:
            raise ConfigError(
                f"zero.Init: its group must have all {world} ranks, got one of {group.size()}; "
                f"leave it out, and set zero_optimization.mics_shard_size or "
                f"zero_hpz_partition_size for shards within a node"
            )
    check_mpu(mpu, world)


def check_mpu(mpu: Any, world_size: int) -> None:
    """Raises a ConfigError for DeepSpeed's object of model parallelism if there is any."""
    if mpu is not None and mpu.get_data_parallel_world_size() != world_size:
        raise ConfigError(
            f"mpu: must have no model parallelism, so that all {world_size} ranks are "
            f"data-parallel, got {mpu.get_data_parallel_world_size()} data-parallel ranks; leave "
            f"it out"
        )


def _block(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = given.get(key)
    return found if isinstance(found, Mapping) else {}


def _is_on(value: Any) -> bool:
    """Whether a switch is on; `"auto"` is off, which a program is to fill in.
    `initialize` checks the types.
    """
    return str(value).lower() in ("true", "1")


def own_device() -> torch.device:
    """The device of this process, which is the current one from here on."""
    if not torch.cuda.is_available() or is_joined(without="nccl"):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    torch.cuda.set_device(device)
    return device


def _keeper(name: str | None, path: Any, *, pins: bool) -> Callable[[Tensor], Tensor]:
    """A function that moves a shard to where it stays."""
    if name == "nvme":
        if path is None:
            raise ConfigError(
                "remote_device: 'nvme' needs offload_param.nvme_path in the configuration; give it "
                "a folder"
            )
        path = Path(path).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return lambda shard_S: _in_file(shard_S, path)
    if name == "cpu":
        pins = pins and torch.cuda.is_available()
        return lambda shard_S: shard_S.cpu().pin_memory() if pins else shard_S.cpu()
    return lambda shard_S: shard_S


def _in_file(shard_S: Tensor, folder: str | Path) -> Tensor:
    """A copy in a file without a name, whose pages the kernel may write back and drop;
    it ends with the tensor.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="fzero-init-") as file:
        mapped = torch.from_file(file.name, shared=True, size=shard_S.numel(), dtype=shard_S.dtype)
    return mapped.copy_(shard_S)
