"""`deepspeed.utils`: single full parameters, an endless loader, and a logger."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fzero.comms.process_group import job
from fzero.engine.dataloader import RepeatingLoader as RepeatingLoader
from fzero.engine.param_views import engine_of
from fzero.resharding import parameters as whole

logger = logging.getLogger("fzero")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the given ranks; None and -1 are all ranks."""
    rank = job().rank
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def _found(param: Tensor) -> tuple[Any, str]:
    engine = engine_of(param)
    if engine is None:
        raise ValueError(
            f"param: must be a parameter of a module that an engine trains, got a tensor of shape {tuple(param.shape)}; take it "
            f"from engine.module"
        )
    engine.active_step()
    return engine, engine.live.name_of(param)


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The full master weight; None for a frozen parameter, which has none. *Collective:* every rank."""
    engine, name = _found(param)
    return None if _is_frozen(engine, name) else whole.weight_of(engine.train_step, engine.state, name)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets the master weight, to the same value on all ranks. *Collective:* every rank."""
    engine, name = _found(param)
    engine.state = whole.with_weight(engine.train_step, engine.state, name, value)
    engine.show_state()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The full mean gradient since the last update; None if none was collected. *Collective:* every rank."""
    engine, name = _with_grads(param)
    return None if engine is None or _is_frozen(engine, name) else whole.grad_of(engine.train_step, engine.state, name)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Sets the mean gradient of the next update, to the same value on all ranks. *Collective:* every rank."""
    engine, name = _with_grads(param)
    if engine is None:
        raise RuntimeError(
            "safe_set_full_grad: must follow a backward since the last update; call engine.backward(loss) first"
        )
    engine.state = whole.with_grad(engine.train_step, engine.state, name, value)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The full optimizer state of a parameter (`exp_avg`, `exp_avg_sq`); None for a frozen one.

    *Collective:* every rank.
    """
    engine, name = _found(param)
    if _is_frozen(engine, name):
        return None
    return whole.optimizer_state_of(engine.train_step, engine.state, name, optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets an optimizer state of a parameter, to the same value on all ranks. *Collective:* every rank."""
    engine, name = _found(param)
    engine.state = whole.with_optimizer_state(engine.train_step, engine.state, name, optim_state_key, value)


def _is_frozen(engine: Any, name: str) -> bool:
    return not whole.is_trained(engine.train_step, name)


def _with_grads(param: Tensor) -> tuple[Any, str]:
    engine, name = _found(param)
    if engine.open_window is None or not engine.open_window.loss_stats:
        return None, name
    if not engine.grads_are_reduced and engine.train_step.plan.stage < 2:
        raise RuntimeError(
            "safe_get_full_grad: gradients are not reduced yet in stages 0 and 1 before the end of an accumulation; ask between "
            "the last backward and step()"
        )
    return engine, name


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes. Changes nothing, because units are gathered when they are used; name them in `units=`.

    Args:
        leaf_module_classes: classes, or their names, with or without module path.
        raise_if_not_found: False returns an empty list where no module has one of these classes.

    Raises:
        ValueError: no module has one of these classes, or the argument is no list of classes.
    """
    given = leaf_module_classes
    if isinstance(given, str | type) or not all(isinstance(kind, type | str) for kind in given):
        raise ValueError(
            f"set_z3_leaf_modules: leaf_module_classes must be a list of classes or their names, got {given!r}; pass a list"
        )
    kinds = tuple(kind for kind in given if isinstance(kind, type))
    names = {kind for kind in given if isinstance(kind, str)}
    found = [m for m in model.modules() if isinstance(m, kinds) or names & _names_of(type(m))]
    if not found and raise_if_not_found:
        known = ", ".join(sorted({type(m).__name__ for m in model.modules()})[:8])
        raise ValueError(
            f"set_z3_leaf_modules: leaf_module_classes must be those of some modules of {type(model).__name__}, got {given!r}; "
            f"its modules are of {known}, or pass raise_if_not_found=False"
        )
    return found


def _names_of(cls: type) -> set[str]:
    return {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
