"""`deepspeed.utils.init_on_device`: a model made on a device and in a dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CONSTRUCTORS = (torch.empty, torch.zeros, torch.ones, torch.full)


class _AsDtype(TorchFunctionMode):
    """Inside, new floating tensors have a dtype, also where another one is asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.to(self._dtype) if func in _CONSTRUCTORS and made.is_floating_point() else made


class OnDevice(AbstractContextManager[None]):
    """Inside, tensors and modules are made on a device, those of floating point in a
    dtype.

    `initialize` fills a model from `device="meta"` unit by unit with each module's
    `reset_parameters`.

    Args:
        dtype: of floating tensors; None changes none.
        enabled: False does nothing.
    """

    def __init__(
        self, dtype: torch.dtype | None, device: Any = "meta", enabled: bool = True
    ) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> None:
        self._inside = ExitStack()
        if self.enabled:
            self._inside.enter_context(torch.device(self.device))
            if self.dtype is not None:
                self._inside.enter_context(_AsDtype(self.dtype))

    def __exit__(self, *error: Any) -> None:
        self._inside.close()
