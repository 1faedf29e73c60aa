"""`get_accelerator()`: the device of this process, CUDA or the CPU, with the methods of
DeepSpeed's accelerators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from fzero.storage.host_memory import available_memory, machine_memory, process_memory


def _process_bytes() -> int:
    return process_memory("VmRSS")


_ON_CPU: dict[str, Any] = {
    "memory_allocated": _process_bytes,
    "max_memory_allocated": lambda: process_memory("VmHWM"),
    "memory_reserved": _process_bytes,
    "max_memory_reserved": lambda: process_memory("VmHWM"),
    "memory_stats": lambda: {"allocated_bytes.all.current": _process_bytes()},
    **dict.fromkeys(
        (
            "empty_cache",
            "reset_peak_memory_stats",
            "reset_max_memory_allocated",
            "reset_max_memory_cached",
            "range_push",
            "range_pop",
            "current_stream",
            "default_stream",
        )
    ),
}
"""Methods on the CPU, without their arguments; None returns None. On CUDA they are
those of `torch.cuda`.
"""
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


class _Stream:
    """A stream or an event on the CPU, where everything is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("record", "wait", "synchronize", "wait_stream", "wait_event", "record_event"):
            return lambda *args, **kwargs: None
        if name == "query":
            return lambda: True
        raise AttributeError(name)


class DeepSpeedAccelerator:
    """The device of this process. Attributes that are not named here are those of
    `torch.cuda`, if CUDA is available.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"
        self._compile_backend = "inductor"

    # --- the device -------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        return (
            self._name
            if device_index is None or self._name == "cpu"
            else f"{self._name}:{device_index}"
        )

    def device(self, device_index: int | None = None) -> Any:
        """A context in which this is the current device."""
        return torch.cuda.device(device_index) if self._name == "cuda" else contextlib.nullcontext()

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._name == "cuda" else 0

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self._name == "cuda" else "cpu"

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._name == "cuda" else 1

    def set_device(self, device_index: int) -> None:
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: list[int]
    ) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Prefixes of variables that a launcher passes on."""
        return ["NCCL", "LD_LIBRARY", "PATH"]

    # --- what it can do ---------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [
            torch.float32,
            torch.float16,
            *([torch.bfloat16] if self.is_bf16_supported() else []),
        ]

    def is_triton_supported(self) -> bool:
        return self._name == "cuda" and torch.cuda.get_device_capability()[0] >= 7

    def supports_nvtx_domain(self) -> bool:
        return False

    prefer_triton_grouped_mm = supports_nvtx_domain

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = (
        is_synchronized_device
    )

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    # --- random numbers ---------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self, seed: int | None = None) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return (
            torch.get_rng_state()
            if self._name == "cpu"
            else torch.cuda.get_rng_state(*_given(device_index))
        )

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, *_given(device_index))

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return (
            torch.default_generator
            if self._name == "cpu"
            else torch.cuda.default_generators[device_index]
        )

    # --- streams, graphs, memory ------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        return _Stream if self._name == "cpu" else torch.cuda.Stream

    @property
    def Event(self) -> Any:
        return _Stream if self._name == "cpu" else torch.cuda.Event

    def stream(self, stream: Any) -> Any:
        """A context in which work goes to a stream."""
        return contextlib.nullcontext() if self._name == "cpu" else torch.cuda.stream(stream)

    def create_graph(self) -> Any:
        return None if self._name == "cpu" else torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return (
            contextlib.nullcontext()
            if self._name == "cpu"
            else torch.cuda.graph(graph, pool, stream)
        )

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            graph.replay()

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        if self._name == "cpu":
            callback()
        else:
            torch.cuda._lazy_call(callback)  # type: ignore[attr-defined,no-untyped-call]

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device, or of the machine."""
        if self._name == "cpu":
            return machine_memory()
        return int(
            torch.cuda.get_device_properties(
                self.current_device() if device_index is None else device_index
            ).total_memory
        )

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the device, or of the machine."""
        if self._name == "cpu":
            return available_memory()
        return int(torch.cuda.mem_get_info(*_given(device_index))[0])

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1, **how: Any) -> Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def unpin_memory(self, tensor: Tensor) -> None:
        """Does nothing: pinned memory is freed with its tensor."""

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._name == "cpu" or tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    # --- the kernels that DeepSpeed builds --------------------------------------------------------

    def op_builder_dir(self) -> NoReturn:
        raise NotImplementedError(
            "get_accelerator: builds no operators, fzero's are torch's own; leave the call out"
        )

    def build_extension(self) -> NoReturn:
        self.op_builder_dir()

    def create_op_builder(self, class_name: str) -> None:
        """None: there is nothing to build."""

    get_op_builder = create_op_builder

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            return partial(torch.tensor, dtype=_TENSORS[name], device=self.current_device_name())
        own = _CUDA_NAMES.get(name, name)
        if self._name == "cuda":
            return getattr(
                torch.cuda.nvtx if own in ("range_push", "range_pop") else torch.cuda, own
            )
        if own in _ON_CPU:
            function = _ON_CPU[own]
            return lambda *args, **kwargs: None if function is None else function()
        raise AttributeError(
            f"accelerator: has no {name!r} on the CPU; ask get_accelerator().device_name() first"
        )


Accelerator = DeepSpeedAccelerator


def _given(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)


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
