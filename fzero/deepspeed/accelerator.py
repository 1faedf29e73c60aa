"""`deepspeed.accelerator.get_accelerator()`: the device of this process, CUDA or the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


class Accelerator:
    """The device of this process, with DeepSpeed's methods. Other attributes are those of `torch.cuda`, if CUDA is available."""

    def __init__(self, kind: str) -> None:
        self._name = kind

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

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
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def __getattr__(self, name: str) -> Any:
        if self._name == "cpu":
            raise AttributeError(f"accelerator: has no {name!r} on the CPU; ask get_accelerator().device_name() first")
        return getattr(torch.cuda, name)


@cache
def get_accelerator() -> Accelerator:
    """The device of this process."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")
