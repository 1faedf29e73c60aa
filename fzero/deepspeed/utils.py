"""`deepspeed.utils`: single parameters as a whole, a loader without end, and a logger."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fzero import collectives, whole
from fzero.dataloader import RepeatingLoader as RepeatingLoader
from fzero.live_params import engine_of

logger = logging.getLogger("fzero")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on some ranks; None and -1 are all."""
    rank = collectives.job().rank
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def _found(param: Tensor) -> tuple[Any, str]:
    engine = engine_of(param)
    if engine is None:
        raise ValueError(
            f"param: must be a parameter of a module that an engine trains, got a tensor of shape {tuple(param.shape)}; take it "
            f"from engine.module"
        )
    engine._here()
    return engine, engine.live.name_of(param)


def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """The whole master weight. *Collective:* every rank."""
    engine, name = _found(param)
    return whole.weight_of(engine.train_step, engine.state, name)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Another master weight, the same on all ranks. *Collective:* every rank."""
    engine, name = _found(param)
    engine.state = whole.with_weight(engine.train_step, engine.state, name, value)
    engine._look()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole mean gradient since the last update; None where none was collected. *Collective:* every rank."""
    engine, name = _with_grads(param)
    return None if engine is None else whole.grad_of(engine.train_step, engine.state, name)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Another mean gradient for the next update, the same on all ranks. *Collective:* every rank."""
    engine, name = _with_grads(param)
    if engine is None:
        raise RuntimeError(
            "safe_set_full_grad: no backward has come since the last update; call engine.backward(loss) first"
        )
    engine.state = whole.with_grad(engine.train_step, engine.state, name, value)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor:
    """What the optimizer remembers of a parameter (`exp_avg`, `exp_avg_sq`), whole. *Collective:* every rank."""
    engine, name = _found(param)
    return whole.optimizer_state_of(engine.train_step, engine.state, name, optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Another value of what the optimizer remembers, the same on all ranks. *Collective:* every rank."""
    engine, name = _found(param)
    engine.state = whole.with_optimizer_state(engine.train_step, engine.state, name, optim_state_key, value)


def _with_grads(param: Tensor) -> tuple[Any, str]:
    engine, name = _found(param)
    if engine._round is None or not engine._round.told:
        return None, name
    if not engine._is_reduced and engine.train_step.plan.stage < 2:
        raise RuntimeError(
            "safe_get_full_grad: gradients are not reduced yet in stages 0 and 1 before the end of an accumulation; ask between "
            "the last backward and step()"
        )
    return engine, name


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], *args: Any, **kwargs: Any
) -> list[nn.Module]:
    """The modules of these classes; nothing else: units are gathered when they are used. Name them in `units=`."""
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    names = {kind for kind in leaf_module_classes if isinstance(kind, str)}
    return [m for m in model.modules() if isinstance(m, kinds) or type(m).__name__ in names]
