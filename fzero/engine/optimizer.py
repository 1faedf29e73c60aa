"""`EngineOptimizer`, `ConfiguredScheduler`: the param groups that a script reads and writes, and a scheduler for them.

Both hold numbers only. Before an update the engine reads the learning rate and the other hyper-parameters of each group,
which a scheduler of `torch.optim.lr_scheduler`, the configuration's scheduler or the script has written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from fzero.engine.client_optimizers import Hyper, lr_of
from fzero.optim.lr_schedules import Schedule


class EngineOptimizer(torch.optim.Optimizer):
    """`engine.optimizer`: hyper-parameters for scripts and schedulers to read and write; `engine.step()` makes the update.

    Attributes:
        overflow: whether the last update was skipped because a gradient was not finite.
        loss_scale: the factor of the next loss.
    """

    def __init__(self, groups: Sequence[Hyper], scale: Callable[[], float]) -> None:
        super().__init__(groups, {})  # type: ignore[arg-type]
        self.defaults = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        self.overflow = False
        self._scale = scale

    @property
    def loss_scale(self) -> float:
        return self._scale()

    cur_scale = loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients are collected anew after each update."""

    def step(self, closure: Any = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("optimizer.step: must be called through the engine, on all ranks; call engine.step()")

    def state_dict(self) -> NoReturn:
        raise RuntimeError(
            "optimizer.state_dict: the state is sharded over the ranks; call engine.save_checkpoint(dir), or "
            "fzero.deepspeed.utils.safe_get_full_optimizer_state for one parameter"
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        raise RuntimeError(
            "optimizer.load_state_dict: the state is sharded over the ranks; call engine.load_checkpoint(dir)"
        )

    def add_param_group(self, param_group: Hyper) -> None:
        if "overflow" in self.__dict__:
            raise RuntimeError(
                "optimizer.add_param_group: groups are sharded over the ranks when the engine is made; pass all of them to "
                "initialize, including frozen parameters that are trained later"
            )
        super().add_param_group(param_group)


class ConfiguredScheduler:
    """`lr_scheduler` of a configuration: writes the learning rates of its schedule into the optimizer's groups.

    Args:
        optimizer: receives the rates in its groups.
        rates: the learning rate of each group at the update after n others.
        momentum: the first beta likewise, where the schedule changes it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Sequence[Schedule], momentum: Schedule | None) -> None:
        self.optimizer, self._rates, self._momentum = optimizer, list(rates), momentum
        self.last_batch_iteration = -1
        self._write()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one update, or to the one after `last_batch_iteration`."""
        last = self.last_batch_iteration
        self.last_batch_iteration = last + 1 if last_batch_iteration is None else last_batch_iteration
        self._write()

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate(self.last_batch_iteration + 1)
            if self._momentum is not None and "betas" in group:
                group["betas"] = (self._momentum(self.last_batch_iteration + 1), group["betas"][1])

    def get_lr(self) -> list[float]:
        """The rates of the next update."""
        return [lr_of(group) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The rates that the last `step` set."""
        assert self.last_batch_iteration >= 0, "need to call step() first"  # transformers looks for these words
        return self.get_lr()

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._write()
