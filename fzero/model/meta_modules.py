"""`filled`: the first values of a module on `meta`, from its own `reset_parameters` or
the user's `init_fn`.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from fzero.common import random_states


def filled(
    module: nn.Module,
    prefix: str,
    init_fn: Callable[[nn.Module], object] | None,
    seed: int,
    device: torch.device,
    *,
    added: Collection[str] = (),
) -> dict[str, Tensor]:
    """The values of a module's own tensors, filled under the module's seed; the module
    itself is left on `meta`.

    Args:
        added: names of tensors that get their values elsewhere.
    """
    where = f"module {prefix or '(root)'!r} ({type(module).__name__})"
    fill = (
        getattr(module, "reset_parameters", None)
        if init_fn is None
        else functools.partial(init_fn, module)
    )
    if fill is None:
        raise ValueError(
            f"init: {where} is on meta and has no reset_parameters; pass init_fn=, or build it "
            f"with values"
        )
    parameters, buffers = module._parameters, module._buffers
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        random_states.seed(zlib.crc32(f"{seed}/{prefix}".encode()), device)
        module.__dict__["_parameters"] = {
            key: None
            if own is None
            else nn.Parameter(_blank(own, device), requires_grad=own.requires_grad)
            for key, own in parameters.items()
        }
        module.__dict__["_buffers"] = {
            key: None if b is None else _blank(b, device) for key, b in buffers.items()
        }
        try:
            fill()
            filled = {**module._parameters, **module._buffers}
        finally:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers
    dot = f"{prefix}." if prefix else ""
    values = {
        dot + k: x.detach() for k, x in filled.items() if x is not None and dot + k not in added
    }
    for name, tensor in values.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(
                f"init: {where} leaves {name!r} without values; pass an init_fn= that fills it"
            )
    return values


def _blank(meta: Tensor, device: torch.device) -> Tensor:
    """Memory of the same shape; floating memory holds NaN, so that unfilled elements
    are found.
    """
    real = torch.empty_like(meta, device=device, requires_grad=False)
    return real.fill_(float("nan")) if real.is_floating_point() else real.zero_()
