"""Where do the first values of a state come from? A model's weights, a state dict, or nothing but a seed.

Values arrive unit by unit, so that a model built on `meta`, larger than a rank's memory, is never whole anywhere. A
module on `meta` is filled by its own `reset_parameters` (or a function of the user's) under a seed made of the run's
seed and the module's name: the numbers depend neither on the world size nor on the order of units.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

InitFn = Callable[[nn.Module], object]


def values_of(
    model: nn.Module,
    names: Iterable[str],
    *,
    aliases: Mapping[str, str],
    given: Mapping[str, Tensor] | None,
    init_fn: InitFn | None,
    seed: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """The first values of the parameters and buffers `names`, whole, on `device`, in the dtype in which they are given.

    Args:
        given: a state dict that has them all, under a first or a further name; None takes the model's present values,
            and initialises those on `meta`.
        init_fn: called with a module whose own tensors are to be filled, instead of its `reset_parameters`.

    Raises:
        ValueError: a tensor is missing, has another shape, or cannot be initialised; the message names it.
    """
    values: dict[str, Tensor] = {}
    initialised: dict[str, dict[str, Tensor]] = {}  # by module
    for name in names:
        prefix, _, key = name.rpartition(".")
        module = model.get_submodule(prefix)
        own = module._parameters[key] if key in module._parameters else module._buffers[key]
        assert own is not None, name
        found = None if given is None else _lookup(given, name, aliases)
        if found is not None:
            if found.shape != own.shape:
                raise ValueError(
                    f"params: {name!r} must have the model's shape {tuple(own.shape)}, got {tuple(found.shape)}; "
                    f"pass the state dict of the same model"
                )
            values[name] = found.detach().to(device)
        elif given is not None and key in module._parameters:
            raise ValueError(f"params: {name!r} is missing; pass a state dict with every parameter of the model")
        elif own.device.type != "meta":
            values[name] = own.detach().to(device)
        else:
            if prefix not in initialised:
                initialised[prefix] = _initialise(module, prefix, init_fn, seed, device)
            values[name] = initialised[prefix][name]
    return values


def check_names(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a name in the state dict `given` that the model does not have."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"params: {unknown[0]!r} is not a parameter or buffer of {type(model).__name__} ({len(unknown)} such names); "
            f"pass the state dict of the same model"
        )


def _lookup(given: Mapping[str, Tensor], name: str, aliases: Mapping[str, str]) -> Tensor | None:
    names = [name, *(alias for alias, owner in aliases.items() if owner == name)]
    return next((given[n] for n in names if n in given), None)


def _initialise(
    module: nn.Module, prefix: str, init_fn: InitFn | None, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """The module's own tensors, made real, filled under their own seed, and given back; the module stays on `meta`."""
    where = f"module {prefix or '(root)'!r} ({type(module).__name__})"
    fill = getattr(module, "reset_parameters", None) if init_fn is None else functools.partial(init_fn, module)
    if fill is None:
        raise ValueError(
            f"init: {where} is on meta and has no reset_parameters; pass init_fn=, or build it with values"
        )
    parameters, buffers = module._parameters, module._buffers
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        torch.manual_seed(zlib.crc32(f"{seed}/{prefix}".encode()))
        module.__dict__["_parameters"] = {
            key: None if own is None else nn.Parameter(_blank(own, device), requires_grad=own.requires_grad)
            for key, own in parameters.items()
        }
        module.__dict__["_buffers"] = {key: None if b is None else _blank(b, device) for key, b in buffers.items()}
        try:
            fill()
            filled = {**module._parameters, **module._buffers}
        finally:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers
    dot = f"{prefix}." if prefix else ""
    values = {dot + key: tensor.detach() for key, tensor in filled.items() if tensor is not None}
    for name, tensor in values.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(f"init: {where} leaves {name!r} without values; pass an init_fn= that fills it")
    return values


def _blank(meta: Tensor, device: torch.device) -> Tensor:
    """Memory of the same shape, full of NaN where it can be, so that what nobody fills is found."""
    real = torch.empty_like(meta, device=device, requires_grad=False)
    return real.fill_(float("nan")) if real.is_floating_point() else real.zero_()
