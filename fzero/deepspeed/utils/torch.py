"""`deepspeed.utils.torch`: questions about the installed PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether PyTorch is at least `min_version`, and at most `max_version`, where they
    are given.
    """
    if not (min_version or max_version):
        raise AssertionError(
            "required_torch_version: needs min_version or max_version, got neither; pass one"
        )
    here = Version(torch.__version__)
    is_new = not min_version or Version(str(min_version)) <= here
    return is_new and (not max_version or here <= Version(str(max_version)))


def is_functorch_transforming() -> bool:
    """Whether torch.func.grad, vmap or another transform is active."""
    return bool(torch._C._are_functorch_transforms_active())


def register_grad_hook(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Calls `hook` after a gradient has been added to `param.grad`, for tensors outside
    of an engine.
    """
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function under `torch.compile`."""
    return torch.compile(fn)
