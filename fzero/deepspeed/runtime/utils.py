"""`deepspeed.runtime.utils`: seeds, memory, and tensors moved between devices."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fzero.deepspeed.accelerator import get_accelerator
from fzero.deepspeed.comm import get_rank
from fzero.deepspeed.engine.param_status import ZeroParamStatus
from fzero.storage.host_memory import available_memory, machine_memory

_GIB = 1024**3


class DummyOptim(torch.optim.Optimizer):
    """An optimizer that trains nothing: groups for an engine that does not train."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""


def set_random_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """A copy in which the tensors for which the function is true are on a device; also
    inside lists, tuples and dicts.
    """
    if criterion_func(item):
        return item.to(device)
    if isinstance(item, list | tuple):
        return type(item)([copy_to_device(x, device, criterion_func) for x in item])
    if isinstance(item, dict):
        return {key: copy_to_device(x, device, criterion_func) for key, x in item.items()}
    return item


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Moves tensors to a device, also inside lists, tuples and dicts.

    With a function, the tensors for which it is true move by their storage, so that
    other references see it; other things stay.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, list | tuple):
        return type(item)([move_to_device(x, device, criterion_func) for x in item])
    if isinstance(item, dict):
        return {key: move_to_device(x, device, criterion_func) for key, x in item.items()}
    return item.to(device) if criterion_func is None and hasattr(item, "to") else item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints the memory of the device and of the machine on rank 0, with `force` only,
    and resets the peak.
    """
    if not force or get_rank():
        return
    gc.collect()
    here, total, free = get_accelerator(), machine_memory(), available_memory()
    used = [
        here.memory_allocated(),
        here.max_memory_allocated(),
        here.memory_reserved(),
        here.max_memory_reserved(),
    ]
    names = ("MA", "Max_MA", "CA", "Max_CA")
    print(message)
    print("  ".join(f"{name} {round(nbytes / _GIB, 2)} GB" for name, nbytes in zip(names, used)))
    used_gb, percent = round((total - free) / _GIB, 2), round(100 * (total - free) / total, 1)
    print(f"CPU Virtual Memory:  used = {used_gb} GB, percent = {percent}%", flush=True)
    here.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Prints the memory of the device on one rank, or on every rank; `reset_max` first
    resets its peaks.
    """
    if print_rank not in (-1, get_rank()):
        return
    here = get_accelerator()
    if reset_max:
        here.reset_peak_memory_stats()
    used = [
        here.memory_allocated(),
        here.max_memory_allocated(),
        here.memory_reserved(),
        here.max_memory_reserved(),
    ]
    shown = "  ".join(
        f"{name} {n / _GIB:.4f} GB" for name, n in zip(("MA", "Max_MA", "CA", "Max_CA"), used)
    )
    print(f"RANK={get_rank()} {msg}  {shown}", flush=True)


def get_ma_status() -> int:
    """Bytes allocated on the device of rank 0; 0 on other ranks."""
    return 0 if get_rank() else int(get_accelerator().memory_allocated())


def torch_memory_reserved(device_index: int | None = None) -> int:
    return int(get_accelerator().memory_reserved(device_index))


def torch_max_memory_reserved(device_index: int | None = None) -> int:
    return int(get_accelerator().max_memory_reserved(device_index))


def empty_cache() -> None:
    """Returns cached memory to the device, and resets its peak."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def ensure_directory_exists(filename: str | Path) -> None:
    """Makes the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def get_tensor_bytes(item: Any) -> int:
    """The bytes of the tensors in lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return item.nbytes
    if isinstance(item, dict):
        item = list(item.values())
    return sum(map(get_tensor_bytes, item)) if isinstance(item, list | tuple) else 0


def get_checkpoint_folder_size(
    save_dir: str | Path, tag: str, local_rank: int | None = None
) -> int:
    """The bytes of the files of a checkpoint, on local rank 0; 0 on others."""
    if local_rank not in (None, 0):
        return 0
    return sum(file.stat().st_size for file in Path(save_dir, tag).rglob("*") if file.is_file())


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a script marks the parameter as model-parallel."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """The parameters whose values this rank does not hold now (stage 3)."""
    return [p for p in param_list if getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call.

    >>> call_to_str("f", 1, b=2)
    'f(1, b=2)'
    """
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Clips `.grad` of parameters outside an engine. An engine's are never in `.grad`:
    set the key `gradient_clipping`.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return nn.utils.clip_grad_norm_(params, max_norm, norm_type)


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    return func
