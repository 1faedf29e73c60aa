"""How many floating point operations is an operator? torch's formulas, also for fused attention on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
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
    """torch's counter, which knows these, too, and prints nothing."""
    known = {name: formula for name, formula in ON_CPU.items() if name not in flop_registry}
    return FlopCounterMode(display=False, custom_mapping=known)


_FORMULAS = counter().flop_registry


def flops_of_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Of one operator that was called; 0 of what is no matrix product, convolution or attention."""
    formula = _FORMULAS.get(getattr(func, "overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
