"""Which parameter groups and which update do a script's own optimizer, or its list of parameters, ask for?

An optimizer of `torch.optim` that is given to the engine is not stepped: its class, its hyper-parameters and its groups are
read, and become a transform. What a script writes into `param_groups` later (a scheduler does) is read before each update.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.common.arguments import refuse
from fzero.config.config import ConfigError
from fzero.config.optimizers import OPTIMIZERS, Optimizer, OptimizerBlock, with_overrides
from fzero.optim.torch_optim import torch_optimizer, torch_transform
from fzero.optim.transforms import Transform
from fzero.plans.param_groups import ParamGroup, UserTransform

_BLOCKS: dict[type[torch.optim.Optimizer], str] = {
    cls: cls.__name__ for cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
}
"""What is done by fzero's own kernels."""
_HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Keys of a group that say how an update runs through memory, or nothing of it."""

Hyper = dict[str, Any]


class Groups(NamedTuple):
    """What a step is made with, and what a script sees of it."""

    optimizer: Optimizer | None
    """In place of the configuration's; None keeps that."""
    transform: Callable[[float], Transform] | None
    """In place of both."""
    param_groups: Sequence[ParamGroup]
    """All but the first, which is everything else."""
    seen: list[Hyper]
    """The groups as a script sees them, `params` and hyper-parameters; live."""
    held: frozenset[str]
    """The names of the parameters in the groups, frozen ones too: those that are trained while they require gradients."""


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Groups:
    """What a script's optimizer asks for.

    Raises:
        ConfigError: it has been stepped, has parameters that are not the model's, or its class does not work on shards.
    """
    if optimizer.state:
        raise ConfigError(
            f"optimizer: must be new, got a {type(optimizer).__name__} that has made steps, whose state is not taken over; "
            f"pass it to initialize before training"
        )
    groups = [group for group in optimizer.param_groups if group["params"]]
    names = _names_in(model, [group["params"] for group in groups], "optimizer")
    held = frozenset().union(*names)
    kind = _block_of(optimizer)
    takers = [_taker(of_group) for of_group in names]
    if kind is not None:
        blocks = [_made(kind, group) for group in groups]
        rest = [{"params": take, **block.params.model_dump()} for take, block in zip(takers[1:], blocks[1:])]
        return Groups(blocks[0], None, rest, optimizer.param_groups, held)
    makes = [_maker(type(optimizer), group) for group in groups]
    torch_optimizer(type(optimizer), **_arguments(type(optimizer), groups[0]))  # which checks the class
    rest = [{"params": t, "transform": m, "lr": float(g["lr"])} for t, m, g in zip(takers[1:], makes[1:], groups[1:])]
    return Groups(None, makes[0], rest, optimizer.param_groups, held)


def of_parameters(model_parameters: Iterable[Any] | None, configured: Optimizer, model: nn.Module) -> Groups:
    """What the configuration's optimizer asks for, with the groups of a script's parameters.

    Raises:
        ConfigError: there are others than the model's parameters, or a group has a hyper-parameter that the optimizer has not.
    """
    if isinstance(model_parameters, str | Tensor | nn.Module):
        fix = "pass model.parameters(), or leave it out"
        refuse("model_parameters", "parameters or groups of them", model_parameters, fix)
    given = list(model.parameters() if model_parameters is None else model_parameters)
    given = [x[1] if isinstance(x, tuple) else x for x in given]  # of named_parameters()
    groups: list[Hyper] = [dict(x) for x in given if isinstance(x, Mapping)] or [{"params": given}]
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
    groups = [group for group in groups if group["params"]]
    names = _names_in(model, [group["params"] for group in groups], "model_parameters")
    blocks = [
        with_overrides(
            configured, {k: v for k, v in group.items() if k not in (*_HOW, "name")}, f"model_parameters[{index}]"
        )
        for index, group in enumerate(groups)
    ]
    takers = [_taker(of_group) for of_group in names]
    rest = [{"params": take, **block.params.model_dump()} for take, block in zip(takers[1:], blocks[1:])]
    seen = [{**group, **block.params.model_dump()} for group, block in zip(groups, blocks)]
    return Groups(blocks[0] if blocks else None, None, rest, seen, frozenset().union(*names))


def changed(optimizers: Sequence[Any], seen: Sequence[Hyper]) -> list[Any] | None:
    """The optimizers with what a script has written into its groups, but for the learning rate; None where that is nothing.

    Raises:
        ConfigError: a value that the optimizer does not take.
    """
    found = list(optimizers)
    for index, (block, group) in enumerate(zip(optimizers, seen, strict=True)):
        if not isinstance(block, UserTransform):
            now = {k: v for k, v in _values(block, group).items() if k != "lr"}
            if any(_plain(getattr(block.params, key)) != _plain(value) for key, value in now.items()):
                found[index] = with_overrides(block, now, f"optimizer.param_groups[{index}]")
    return found if any(a is not b for a, b in zip(found, optimizers)) else None


def lr_of(group: Hyper) -> float:
    """The learning rate that a group has now."""
    lr = group.get("lr", 0.0)
    return float(lr.item() if isinstance(lr, Tensor) else lr)


# --- helpers -----------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _taker(names: Collection[str]) -> Callable[[str, Tensor], bool]:
    return lambda name, param: name in names


def _block_of(optimizer: torch.optim.Optimizer) -> type[OptimizerBlock] | None:
    """fzero's own block for the optimizer, where its class and the flags of all groups have one."""
    found = next((cls for cls in type(optimizer).__mro__ if cls in _BLOCKS), None)
    if found is None or type(optimizer).step is not found.step:
        return None
    if any(group.get(flag) for group in optimizer.param_groups for flag in ("amsgrad", "maximize")):
        return None
    return OPTIMIZERS[_BLOCKS[found]]


def _values(block: OptimizerBlock | type[OptimizerBlock], group: Hyper) -> Hyper:
    """The hyper-parameters of a group that a block has."""
    params: Any = (block if isinstance(block, type) else type(block)).model_fields["params"].annotation
    values = {key: group[key] for key in params.model_fields if key in group}
    if "adam_w_mode" in params.model_fields and "decoupled_weight_decay" in group:
        values["adam_w_mode"] = group["decoupled_weight_decay"]
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}


def _made(kind: type[OptimizerBlock], group: Hyper) -> Any:
    return with_overrides(kind.model_validate({"type": kind.__name__}), _values(kind, group), "optimizer.param_groups")  # type: ignore[arg-type]


def _arguments(cls: type[torch.optim.Optimizer], group: Hyper) -> Hyper:
    known = inspect.signature(cls).parameters
    return {key: value for key, value in group.items() if key in known and key not in _HOW}


def _maker(cls: type[torch.optim.Optimizer], group: Hyper) -> Callable[[float], Transform]:
    """The class' update with what its group holds at that time, and a learning rate."""
    return lambda lr: torch_transform(cls, _arguments(cls, group) | ({"lr": lr} if "lr" in group else {}))


def _names_in(model: nn.Module, groups: Sequence[Sequence[Tensor]], field: str) -> list[frozenset[str]]:
    """The names of the parameters in each group.

    Raises:
        ConfigError: a group holds something else, or a parameter stands twice.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    seen: set[int] = set()
    for param in (param for group in groups for param in group):
        if id(param) not in names:
            raise ConfigError(
                f"{field}: must hold parameters of the model, got a tensor of shape {tuple(param.shape)} that is none; make it "
                f"from model.parameters(), after the last model.to(...)"
            )
        if id(param) in seen:
            raise ConfigError(f"{field}: must hold each parameter once, got {names[id(param)]!r} twice; remove one")
        seen.add(id(param))
    return [frozenset(names[id(param)] for param in group) for group in groups]
