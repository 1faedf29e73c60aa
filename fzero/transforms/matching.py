"""The weights that the patterns of a transform name, and the parameters that it adds
beside them.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fzero.model.module_index import ModuleIndex
from fzero.model.transforms import added_to

Patterns = str | Sequence[str]
"""Names of modules, with `*` for any part; a name may match several."""


def patterns_of(field: str, given: Patterns) -> tuple[str, ...]:
    """The patterns as a tuple."""
    found = (
        (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    )
    if not all(isinstance(one, str) for one in found) or not (found or given == ()):
        raise ValueError(
            f"{field}: must be a pattern of names or a list of them, got {given!r}; pass "
            f"'*.q_proj', say"
        )
    return found


def weights_of(
    model: nn.Module, field: str, patterns: Sequence[str]
) -> dict[str, tuple[nn.Module, ...]]:
    """The `weight` of each module that a pattern matches, by its first name, with its
    modules; the first is that of its name.

    Raises:
        ValueError: a pattern matches no module with a weight of two or more dimensions,
            or only one user of a tied weight.
    """
    modules = ModuleIndex.of(model).every
    owners = {id(param): name for name, param in model.named_parameters()}
    named = [name for name, module in modules.items() if len(shape_of(module)) > 1]
    for pattern in patterns:
        if not fnmatch.filter(named, pattern):
            raise ValueError(
                f"{field}: must match a module with a weight of two or more dimensions, got "
                f"{pattern!r}, which matches none of {type(model).__name__}'s; names look like "
                f"{', '.join(named[:4]) or '(none)'}, and * stands for any part"
            )
    found: dict[str, dict[int, nn.Module]] = {}
    for name in named:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            module = modules[name]
            if not math.prod(shape_of(module)):
                raise ValueError(
                    f"{field}: must match weights with elements, got {f'{name}.weight'!r} of shape "
                    f"{shape_of(module)}; leave it out"
                )
            found.setdefault(owners[id(module.weight)], {})[id(module)] = module
    for name, module in modules.items():
        for key, param in module._parameters.items():
            users = found.get(owners.get(id(param), ""), {})
            if users and id(module) not in users:
                raise ValueError(
                    f"{field}: must match all modules of a tied weight, got {owners[id(param)]!r} "
                    f"without its other name {f'{name}.{key}'!r}; match both, or untie them"
                )
    owning = {name: model.get_submodule(name.rpartition(".")[0]) for name in found}
    return {
        name: (owning[name], *(x for x in users.values() if x is not owning[name]))
        for name, users in found.items()
    }


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """The shape of a module's weight, as its forward sees it; empty if it has none."""
    weight = module._parameters.get("weight")
    return () if weight is None else added_to(module).get("weight", tuple(weight.shape))


def add_param(
    module: nn.Module, key: str, value: Tensor, *, field: str, trained: bool = True
) -> None:
    """Registers a parameter in a module, unless an earlier call of the same transform
    has.
    """
    there, added = module._parameters.get(key), added_to(module)
    if there is None and not hasattr(module, key):
        module.register_parameter(key, nn.Parameter(value, requires_grad=trained))
        added[key] = tuple(value.shape)
    elif there is None or key not in added or there.shape != value.shape:
        got = (
            type(getattr(module, key)).__name__
            if there is None
            else f"one of shape {tuple(there.shape)}"
        )
        raise ValueError(
            f"{field}: adds {key!r} of shape {tuple(value.shape)} to a {type(module).__name__}, "
            f"which must have no other, got {got}; pass a model that has not been changed"
        )


def params_of(model: nn.Module, field: str, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the parameters that any of the patterns matches, without packed
    bytes.
    """
    names = [
        name
        for name, param in model.named_parameters()
        if param.is_floating_point() or param.is_complex()
    ]
    found = set[str]()
    for pattern in patterns:
        if not (matches := fnmatch.filter(names, pattern)):
            raise ValueError(
                f"{field}: must match parameters, got {pattern!r}, which matches none of "
                f"{type(model).__name__}'s; names look like {', '.join(names[:4])}"
            )
        found.update(matches)
    return frozenset(found)


def weight_of(module: nn.Module) -> nn.Parameter:
    """Its weight."""
    return module.get_parameter("weight")


def is_input_first(module: nn.Module) -> bool:
    """Whether the first dimension of a module's weight is its input: `Conv1D` of
    transformers, transposed convolutions.
    """
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return is_conv1d or isinstance(module, nn.modules.conv._ConvTransposeNd)


def float_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of a module's own parameters that are numbers with a point."""
    return next(own.dtype for own in module.parameters(recurse=False) if own.is_floating_point())
