"""`get_accelerator()`: the device of this process, CUDA or the CPU, with the methods of
DeepSpeed's accelerators.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, MutableMapping
from functools import cache, partial
from typing import Any, NoReturn

import torch

from fzero.storage.host_memory import available_memory, machine_memory, process_memory


class _Stream:
    """A stream or an event on the CPU, where everything is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("record", "wait", "synchronize", "wait_stream", "wait_event", "record_event"):
            return lambda *args, **kwargs: None
        if name == "query":
            return lambda: True
        raise AttributeError(name)


def _given(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


def _no_context(*args: Any, **kwargs: Any) -> Any:
    """A context without effect."""
    return contextlib.nullcontext()


def _process_bytes(device_index: Any = None) -> int:
    return process_memory("VmRSS")


def _most_bytes(device_index: Any = None) -> int:
    return process_memory("VmHWM")


def _memory_stats(device_index: Any = None) -> dict[str, int]:
    return {"allocated_bytes.all.current": _process_bytes()}


def _set_visible(current_env: MutableMapping[str, str], local_accelerator_ids: list[int]) -> None:
    current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))


def _total_memory(device_index: int | None = None) -> int:
    index = torch.cuda.current_device() if device_index is None else device_index
    return int(torch.cuda.get_device_properties(index).total_memory)


def _dtypes(*, has_bf16: bool) -> list[torch.dtype]:
    return [torch.float32, torch.float16, *([torch.bfloat16] if has_bf16 else [])]


def _no_operators(*args: Any) -> NoReturn:
    raise NotImplementedError(
        "get_accelerator: builds no operators, fzero's are torch's own; leave the call out"
    )


def _called_now(callback: Callable[[], Any]) -> None:
    callback()


def _replay(graph: Any) -> None:
    if graph is not None:
        graph.replay()


_BOTH: dict[str, Callable[..., Any]] = {
    "build_extension": _no_operators,
    "create_op_builder": _nothing,
    "export_envs": lambda: ["NCCL", "LD_LIBRARY", "PATH"],
    "get_op_builder": _nothing,
    "initial_seed": lambda seed=None: torch.initial_seed(),
    "is_available": lambda: True,
    "is_fp16_supported": lambda: True,
    "is_fp64_supported": lambda: True,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "op_builder_dir": _no_operators,
    "prefer_triton_grouped_mm": lambda: False,
    "random": lambda: torch.random,
    "replay_graph": _replay,
    "set_visible_devices_envs": _set_visible,
    "supports_nvtx_domain": lambda: False,
    "unpin_memory": _nothing,  # pinned memory is freed with its tensor
    "visible_devices_envs": lambda: ["CUDA_VISIBLE_DEVICES"],
}
"""Methods that are the same on every device."""

_BY_DEVICE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "available_memory": (
        lambda device_index=None: available_memory(),
        lambda device_index=None: int(torch.cuda.mem_get_info(*_given(device_index))[0]),
    ),
    "capture_to_graph": (
        _no_context,
        lambda graph, pool=None, stream=None: torch.cuda.graph(graph, pool, stream),
    ),
    "create_graph": (_nothing, lambda: torch.cuda.CUDAGraph()),
    "current_device": (lambda: 0, lambda: torch.cuda.current_device()),
    "current_device_name": (lambda: "cpu", lambda: f"cuda:{torch.cuda.current_device()}"),
    "default_generator": (
        lambda device_index=0: torch.default_generator,
        lambda device_index=0: torch.cuda.default_generators[device_index],
    ),
    "device": (_no_context, lambda device_index=None: torch.cuda.device(device_index)),
    "device_count": (lambda: 1, lambda: torch.cuda.device_count()),
    "device_name": (
        lambda device_index=None: "cpu",
        lambda device_index=None: "cuda" if device_index is None else f"cuda:{device_index}",
    ),
    "get_rng_state": (
        lambda device_index=None: torch.get_rng_state(),
        lambda device_index=None: torch.cuda.get_rng_state(*_given(device_index)),
    ),
    "handles_memory_backpressure": (lambda: True, lambda: False),
    "is_bf16_supported": (lambda: True, lambda: torch.cuda.is_bf16_supported()),
    "is_pinned": (lambda tensor: True, lambda tensor: tensor.is_pinned()),
    "is_synchronized_device": (lambda: True, lambda: False),
    "is_triton_supported": (
        lambda: False,
        lambda: torch.cuda.get_device_capability()[0] >= 7,
    ),
    "lazy_call": (
        _called_now,
        lambda callback: torch.cuda._lazy_call(callback),  # type: ignore[attr-defined, no-untyped-call]
    ),
    "on_accelerator": (
        lambda tensor: tensor.device.type == "cpu",
        lambda tensor: tensor.device.type == "cuda",
    ),
    "pin_memory": (
        lambda tensor, align_bytes=1, **how: tensor,
        lambda tensor, align_bytes=1, **how: tensor.pin_memory(),
    ),
    "resolves_data_dependency": (lambda: True, lambda: False),
    "set_device": (_nothing, lambda device_index: torch.cuda.set_device(device_index)),
    "set_rng_state": (
        lambda new_state, device_index=None: torch.set_rng_state(new_state),
        lambda new_state, device_index=None: torch.cuda.set_rng_state(
            new_state, *_given(device_index)
        ),
    ),
    "stream": (_no_context, lambda stream: torch.cuda.stream(stream)),
    "supported_dtypes": (
        lambda: _dtypes(has_bf16=True),
        lambda: _dtypes(has_bf16=torch.cuda.is_bf16_supported()),
    ),
    "synchronize": (_nothing, lambda device_index=None: torch.cuda.synchronize(device_index)),
    "total_memory": (lambda device_index=None: machine_memory(), _total_memory),
    "use_host_timers": (lambda: True, lambda: False),
}
"""Methods that differ: on the CPU, and on CUDA."""

_ON_CPU: dict[str, Callable[..., Any]] = {
    "max_memory_allocated": _most_bytes,
    "max_memory_reserved": _most_bytes,
    "memory_allocated": _process_bytes,
    "memory_reserved": _process_bytes,
    "memory_stats": _memory_stats,
    "Event": _Stream,
    "Stream": _Stream,
    **dict.fromkeys(
        (
            "current_stream",
            "default_stream",
            "empty_cache",
            "range_pop",
            "range_push",
            "reset_max_memory_allocated",
            "reset_max_memory_cached",
            "reset_peak_memory_stats",
        ),
        _nothing,
    ),
}
"""Methods on the CPU; on CUDA they are those of `torch.cuda`."""
_CUDA_NAMES = {"memory_cached": "memory_reserved", "max_memory_cached": "max_memory_reserved"}
_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class DeepSpeedAccelerator:
    """The device of this process: `kind` is "cpu" or "cuda". Its methods are the rows of
    the tables; others are those of `torch.cuda`, if CUDA is available.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"
        self._compile_backend = "inductor"

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    def __getattr__(self, name: str) -> Any:
        if name == "_name" or name.startswith("__"):  # of a copy that is not filled yet
            raise AttributeError(name)
        is_cpu, own = self._name == "cpu", _CUDA_NAMES.get(name, name)
        if name in _TENSORS:
            return partial(torch.tensor, dtype=_TENSORS[name], device=self.current_device_name())
        if not is_cpu:
            return getattr(torch.cuda.nvtx if own.startswith("range_") else torch.cuda, own)
        if own in _ON_CPU:
            return _ON_CPU[own]
        raise AttributeError(
            f"accelerator: has no {name!r} on the CPU; ask get_accelerator().device_name() first"
        )


def _method(on_cpu: Callable[..., Any], on_cuda: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a row, with the arguments that the one on CUDA has."""

    def call(self: DeepSpeedAccelerator, *args: Any, **kwargs: Any) -> Any:
        return (on_cpu if self._name == "cpu" else on_cuda)(*args, **kwargs)

    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    given = inspect.signature(on_cuda).parameters.values()
    call.__signature__ = inspect.Signature([*own, *given])  # type: ignore[attr-defined]
    return call


for _name, _row in (_BY_DEVICE | {name: (one, one) for name, one in _BOTH.items()}).items():
    setattr(DeepSpeedAccelerator, _name, _method(*_row))

Accelerator = DeepSpeedAccelerator


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The device of this process."""
    return DeepSpeedAccelerator("cuda" if torch.cuda.is_available() else "cpu")


def set_accelerator(accel_obj: object) -> None:
    """Accepts the accelerator in use only."""
    if accel_obj is not get_accelerator():
        raise ValueError(
            f"set_accelerator: must be the device in use, {get_accelerator().device_name()}, got "
            f"{accel_obj!r}; leave it out (CUDA_VISIBLE_DEVICES='' hides the GPUs)"
        )


def is_current_accelerator_supported() -> bool:
    return True
