"""`quantized_inputs`: inside, the modules that a plan names see quantized inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fzero.compression.formulas import Number
from fzero.compression.plan import CompressionPlan
from fzero.compression.techniques import QuantizeInput


@contextmanager
def quantized_inputs(model: nn.Module, plan: CompressionPlan, n: Number | None = None) -> Iterator[None]:
    """Inside, the first input of each module in `plan.inputs` is quantized; afterwards the model is unchanged.

    A static range is the module's buffer `x_min_max`. In training mode it follows the inputs, also before the offset.

    Args:
        n: the number of updates so far; None is past every offset, for a model that has been trained.
    """
    hooks = []
    try:
        for name, technique in plan.inputs.items():
            now = technique.offset if n is None else n
            module, quantizes = model.get_submodule(name), _hook(technique, now)
            hooks.append(module.register_forward_pre_hook(quantizes, prepend=True, with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hook(technique: QuantizeInput, n: Number) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(first, Tensor) or not first.is_floating_point() or not first.numel():
            return None
        bounds: Tensor | None = None
        if technique.range_of is not None:
            bounds = module.get_buffer("x_min_max")
            if module.training:
                bounds.copy_(technique.moved(bounds, first))
        seen = technique.seen(first, bounds, n)
        return ((seen, *args[1:]), kwargs) if args else (args, kwargs | {next(iter(kwargs)): seen})

    return hook
