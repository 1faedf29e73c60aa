"""Module buffers that stay in fp32 beside parameters in 16 bits (the key
`data_types.keep_in_fp32_modules`; DeepSpeed's module `runtime.keep_in_fp32`).

An engine leaves buffers in their dtype, so this is for those that a script, or the
loading of a model, has made 16 bits wide: the routing bias of a mixture of experts,
say, whose values differ by less than bf16 tells apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

KEEP_IN_FP32_AUTO = "auto"


def keep_in_fp32_pattern(
    module: nn.Module, setting: Literal["auto"] | Sequence[str] | None, dtype: torch.dtype | None
) -> re.Pattern[str] | None:
    """The names of buffers that stay in fp32; None where there are none.

    Args:
        setting: names, in which `*` stands for any characters; "auto" or None takes
            those of transformers' models: `_keep_in_fp32_modules_strict`, and in fp16
            `_keep_in_fp32_modules`, too.
        dtype: that of the parameters; in fp32 nothing needs a pattern.

    >>> keep_in_fp32_pattern(nn.Linear(1, 1), ["gate.*bias"], torch.bfloat16).pattern
    'gate..*bias'
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    if setting not in (None, KEEP_IN_FP32_AUTO):
        patterns = {name.replace("*", ".*") for name in setting}
    else:
        patterns = {
            (rf"^{re.escape(prefix)}\..*" if prefix else "") + name.replace("*", ".*")
            for prefix, child in module.named_modules()
            for name in _listed(child, is_fp16=dtype == torch.float16)
        }
    return re.compile("|".join(sorted(patterns))) if patterns else None


def _listed(module: nn.Module, *, is_fp16: bool) -> list[str]:
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if is_fp16 else [])]
    return [name for of in lists for name in getattr(module, of, None) or ()]


def buffers_to_keep_in_fp32(module: nn.Module, pattern: re.Pattern[str]) -> list[Tensor]:
    """The floating buffers in whose name the pattern is found."""
    buffers = module.named_buffers(remove_duplicate=False)
    return [x for name, x in buffers if x.is_floating_point() and pattern.search(name)]


def keep_buffers_in_fp32(module: nn.Module, pattern: re.Pattern[str]) -> int:
    """Makes these buffers fp32, in place; returns the number of those that were not."""
    narrow = {
        id(x): x
        for x in buffers_to_keep_in_fp32(module, pattern)
        if x.dtype in (torch.float16, torch.bfloat16)
    }
    for buffer in narrow.values():
        buffer.data = buffer.data.float()
    return len(narrow)
