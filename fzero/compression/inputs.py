"""`quantized_inputs`: inside, the modules that a plan names compute with quantized
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fzero.compression.techniques import QuantizeInput
from fzero.model.changes import replaced_forwards
from fzero.model.transforms import Number, Wrap

if TYPE_CHECKING:
    from fzero.compression.plan import CompressionPlan


def quantized_inputs(
    model: nn.Module, plan: CompressionPlan, n: Number | None = None
) -> AbstractContextManager[None]:
    """Inside, the first input of each module in `plan.inputs` is quantized; afterwards
    the model is unchanged.

    A static range is the module's buffer `x_min_max`. In training mode it follows the
    inputs, also before the offset.

    Args:
        n: the number of updates so far; None is past every offset, for a model that has
            been trained.
    """
    last = max((technique.offset for technique in plan.inputs.values()), default=0)
    found = quantizing(plan.inputs, last if n is None else n)
    return replaced_forwards(model, [*found], lambda name, module: found[name](name, module))


def quantizing(inputs: Mapping[str, QuantizeInput], n: Number) -> dict[str, Wrap]:
    """Forwards with quantized inputs, by module; n: the number of updates so far."""
    return {name: partial(_quantizing, technique, n) for name, technique in inputs.items()}


def _quantizing(
    technique: QuantizeInput, n: Number, name: str, module: nn.Module
) -> Callable[..., Any]:
    own = module.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(first, Tensor) or not first.is_floating_point() or not first.numel():
            return own(*args, **kwargs)
        bounds: Tensor | None = None
        if technique.range_of is not None:
            bounds = module.get_buffer("x_min_max")
            if module.training:
                bounds.copy_(technique.moved(bounds, first))
        seen = technique.seen(first, bounds, n)
        return (
            own(seen, *args[1:], **kwargs) if args else own(**kwargs | {next(iter(kwargs)): seen})
        )

    return forward
