"""`Groups`: parameter groups and update rule of a script's own optimizer, or of its
list of parameters.

An optimizer of `torch.optim` that is passed to the engine is never stepped: its class,
hyper-parameters and groups are read, and converted to a transform. Later changes to
`param_groups` (by a scheduler, say) are read before each update.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.common.arguments import refuse, shown
from fzero.config.config import ConfigError
from fzero.config.optimizer_block import OptimizerBlock, with_overrides
from fzero.config.optimizers import OPTIMIZERS
from fzero.optim.torch_optim import torch_optimizer, torch_transform
from fzero.optim.transforms import Transform
from fzero.optim.whole_params import WholeParams, check_shapes_do_not_matter, check_whole
from fzero.plans.param_groups import ParamGroup, UserTransform

_BLOCKS: dict[type[torch.optim.Optimizer], str] = {
    cls: cls.__name__
    for cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
}
"""The optimizer classes that fzero implements itself."""
_HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Keys of a group that do not change the result of an update."""

Hyper = dict[str, Any]


class Groups(NamedTuple):
    """The optimizer and groups of a step, and the groups as the script sees them."""

    param_groups: Sequence[ParamGroup]
    """All groups but the first, which has the remaining parameters."""
    seen: list[Hyper]
    """The live groups of the script: `params` and hyper-parameters."""
    held: frozenset[str]
    """The names of the parameters in the groups, including frozen ones; they are
    trained while they require gradients.
    """
    optimizer: OptimizerBlock | None = None
    """Replaces the configuration's optimizer; None keeps that."""
    transform: Callable[[float], Transform] | None = None
    """Replaces both."""


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Groups:
    """The groups of a script's optimizer.

    Raises:
        ConfigError: it has been stepped, has parameters that are not the model's, or
            its class does not work on shards.
    """
    # the constructor of torch.optim.Adagrad makes state, of step 0
    if any(entry.get("step", 1) for entry in optimizer.state.values()):
        raise ConfigError(
            f"optimizer: must be new, got a {type(optimizer).__name__} that has made steps and "
            f"whose state would be lost; pass it to initialize before training"
        )
    _check_own_step(optimizer)
    groups = with_parameters(optimizer.param_groups)
    names = _names_in(model, groups, "optimizer")
    kind = _block_of(optimizer)
    if kind is not None:
        blank: Any = kind.model_validate({"type": kind.__name__})
        blocks = [
            with_overrides(blank, _values(blank, group), "optimizer.param_groups")
            for group in groups
        ]
        rules = [block.params.model_dump() for block in blocks]
        return _grouped(names, optimizer.param_groups, rules, optimizer=blocks[0])
    cls = type(optimizer)
    is_whole = _needs_whole_params(cls, _arguments(cls, groups[0]))
    rules = [
        {"transform": _maker(cls, group, is_whole=is_whole), "lr": lr_of(group)} for group in groups
    ]
    return _grouped(names, optimizer.param_groups, rules, transform=rules[0]["transform"])


def of_parameters(
    model_parameters: Iterable[Any] | None, configured: OptimizerBlock, model: nn.Module
) -> Groups:
    """The groups of a script's parameters, under the configuration's optimizer.

    Raises:
        ConfigError: a parameter is not the model's, or a group has a hyper-parameter
            that the optimizer lacks.
    """
    if isinstance(model_parameters, str | Tensor | nn.Module):
        fix = "pass model.parameters(), or leave it out"
        refuse("model_parameters", "parameters or groups of them", model_parameters, fix)
    given = list(model.parameters() if model_parameters is None else model_parameters)
    groups: list[Hyper] = [dict(x) for x in given if isinstance(x, Mapping)] or [{"params": given}]
    for group in groups:
        if "params" not in group:
            fix = "give each group its parameters"
            refuse("model_parameters", "groups with the key 'params'", group, fix)
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        group["params"] = [x[1] if isinstance(x, tuple) else x for x in params]  # named ones
    groups = with_parameters(groups)
    names = _names_in(model, groups, "model_parameters")
    own = [{k: v for k, v in group.items() if k not in (*_HOW, "name")} for group in groups]
    blocks = [
        with_overrides(configured, values, f"model_parameters[{i}]") for i, values in enumerate(own)
    ]
    rules = [block.params.model_dump() for block in blocks]
    seen = [{**group, **of_group} for group, of_group in zip(groups, rules)]
    return _grouped(names, seen, rules, optimizer=blocks[0])


def with_parameters(groups: Sequence[Hyper]) -> list[Hyper]:
    """The groups that have some; the first, where none has any (a stage of a pipeline)."""
    return [group for group in groups if group["params"]] or list(groups[:1])


def _grouped(
    names: Sequence[frozenset[str]], seen: list[Hyper], rules: Sequence[Hyper], **first: Any
) -> Groups:
    """Groups with these names and rules; `first` is the optimizer of the first one."""
    every = [
        {"params": lambda name, param, own=own: name in own, **of_group}
        for own, of_group in zip(names, rules, strict=True)
    ]
    return Groups(every[1:], seen, frozenset().union(*names), **first)


def changed(optimizers: Sequence[Any], seen: Sequence[Hyper]) -> list[Any] | None:
    """The optimizers with the script's changes to its groups, the learning rate aside;
    None where nothing has changed.

    Raises:
        ConfigError: the optimizer does not accept a value.
    """
    found = list(optimizers)
    for index, (block, group) in enumerate(zip(optimizers, seen, strict=True)):
        if not isinstance(block, UserTransform):
            now = {k: v for k, v in _values(block, group).items() if k != "lr"}
            if any(
                _plain(getattr(block.params, key)) != _plain(value) for key, value in now.items()
            ):
                found[index] = with_overrides(block, now, f"optimizer.param_groups[{index}]")
    return found if any(a is not b for a, b in zip(found, optimizers)) else None


def lr_of(group: Hyper) -> float:
    """The present learning rate of a group."""
    lr = group.get("lr", 0.0)
    return float(lr.item() if isinstance(lr, Tensor) else lr)


def plain_values(group: Hyper) -> Hyper:
    """The hyper-parameters of a group that are numbers."""
    values = {k: v for k, v in group.items() if isinstance(v, bool | int | float) or k == "betas"}
    return values | ({"lr": lr_of(group)} if "lr" in group else {})


def _check_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises where a script has replaced `step` on the object: it would never be
    called. A scheduler's wrapper is none.
    """
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"optimizer: must not have its step replaced on the object, which is never called, got "
            f"{shown(own)}; use register_step_pre_hook and register_step_post_hook, or a subclass"
        )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _block_of(optimizer: torch.optim.Optimizer) -> type[OptimizerBlock] | None:
    """fzero's own block for the optimizer; None where fzero does not implement its
    class or a flag of its groups.
    """
    found = next((cls for cls in type(optimizer).__mro__ if cls in _BLOCKS), None)
    if found is None or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(found.step):
        # torch wraps `step` in the class that is made first, so that the functions themselves may
        # differ
        return None
    if any(group.get(flag) for group in optimizer.param_groups for flag in ("amsgrad", "maximize")):
        return None
    return OPTIMIZERS[_BLOCKS[found]]


def _values(block: OptimizerBlock, group: Hyper) -> Hyper:
    """The hyper-parameters of a group that a block also has."""
    known = type(block.params).model_fields
    values = {key: group[key] for key in known if key in group}
    if "adam_w_mode" in known and "decoupled_weight_decay" in group:
        values["adam_w_mode"] = group["decoupled_weight_decay"]
    return {
        key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()
    }


def _arguments(cls: type[torch.optim.Optimizer], group: Hyper) -> Hyper:
    known = inspect.signature(cls).parameters
    return {key: value for key, value in group.items() if key in known and key not in _HOW}


def _needs_whole_params(cls: type[torch.optim.Optimizer], arguments: Hyper) -> bool:
    """Whether a class works on whole parameters alone.

    Raises:
        ValueError: it works neither on shards nor on whole parameters one by one.
    """
    try:
        torch_optimizer(cls, **arguments)
        check_shapes_do_not_matter(cls, arguments)
    except ValueError as error:
        try:
            check_whole(cls, arguments)
        except Exception:  # a class may raise any error
            if issubclass(cls, torch.optim.Muon):
                raise ConfigError(
                    "optimizer: must not be torch.optim.Muon, which takes matrices only; give "
                    "initialize no optimizer, and name "
                    'it in the configuration, "optimizer": {"type": "Muon"}, which has Adam for the other parameters'
                ) from None
            raise error from None
        return True
    return False


def _maker(
    cls: type[torch.optim.Optimizer], group: Hyper, *, is_whole: bool
) -> Callable[[float], Transform]:
    """A function of the learning rate that makes the class's transform with the present
    values of its group.
    """
    if is_whole:
        return WholeParams(cls, lambda: _arguments(cls, group))
    return lambda lr: torch_transform(
        cls, _arguments(cls, group) | ({"lr": lr} if "lr" in group else {})
    )


def _names_in(model: nn.Module, groups: Sequence[Hyper], field: str) -> list[frozenset[str]]:
    """The names of the parameters in each group; raises for a group that holds
    something else, or one parameter twice.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    seen: set[int] = set()
    for param in (param for group in groups for param in group["params"]):
        if not isinstance(param, Tensor):
            refuse(field, "parameters of the model", param, "pass model.parameters()")
        if id(param) not in names:
            raise ConfigError(
                f"{field}: must hold parameters of the model, got another tensor, of shape "
                f"{tuple(param.shape)}; make it from model.parameters(), after the last "
                f"model.to(...)"
            )
        if id(param) in seen:
            raise ConfigError(
                f"{field}: must hold each parameter once, got {names[id(param)]!r} twice; remove "
                f"one"
            )
        seen.add(id(param))
    return [frozenset(names[id(param)] for param in group["params"]) for group in groups]
