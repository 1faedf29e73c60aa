"""Floating-point operations of operators: torch's formulas, and those of fused
attention on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)


def _attention(
    query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def counter() -> FlopCounterMode:
    """torch's counter, with the formulas of `ON_CPU`; it prints nothing."""
    known = {name: formula for name, formula in ON_CPU.items() if name not in flop_registry}
    return FlopCounterMode(display=False, custom_mapping=known)


_ON_CPU = {name: formula for name, formula in counter().flop_registry.items() if name in ON_CPU}


def _formula(func: Any) -> Callable[..., Any] | None:
    packet = getattr(func, "overloadpacket", None)
    # a later torch may have these formulas, too
    return flop_registry.get(packet) or _ON_CPU.get(packet)


def flops_of_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """The operations of one call of an operator; 0 unless it is a matrix product, a
    convolution or attention.
    """
    formula = _formula(func)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def is_counted(func: Any) -> bool:
    """Whether there is a formula for the operations of an operator."""
    return _formula(func) is not None


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `report` with the operations of every operator that runs inside, unless
    they are 0.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flops = flops_of_call(func, args, kwargs or {}, out)
        if flops:
            self._report(flops)
        return out
