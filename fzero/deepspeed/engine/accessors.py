"""`Accessors`: an engine's counters, learning rates, weights and log output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isnan
from typing import TYPE_CHECKING, Any, Self

import torch
from rich.console import RenderableType
from torch import Tensor

from fzero.common.arguments import refuse
from fzero.common.random_states import random_states, set_random_states
from fzero.common.text_tables import as_text
from fzero.comms.rendezvous import launched
from fzero.config.config import Config
from fzero.deepspeed.engine.client_optimizers import lr_of
from fzero.deepspeed.engine.config_keys import EngineKeys
from fzero.deepspeed.engine.step_log import CommsLog, StepLog
from fzero.profiling.reports import Profile
from fzero.profiling.writers import Writer
from fzero.state import Metrics, TrainState

if TYPE_CHECKING:
    from collections.abc import Callable

    from fzero.data.loader import CurriculumLoader
    from fzero.deepspeed.engine.dataloader import ResumableLoader
    from fzero.deepspeed.engine.optimizer import EngineOptimizer
    from fzero.step import TrainStep


class LossScaleNumber(float):
    """A loss scale, which returns the configured one when it is called.

    >>> scale = LossScaleNumber(1024.0, configured=0.0)
    >>> scale == 1024, scale()
    (True, 0.0)
    """

    def __new__(cls, value: float, configured: float = 0.0) -> Self:
        return super().__new__(cls, value)

    def __init__(self, value: float, configured: float = 0.0) -> None:
        self._configured = configured

    def __call__(self) -> float:
        return self._configured


class Accessors:
    """The part of `Engine` that computes nothing."""

    active_step: Callable[[], TrainStep]
    train_step: TrainStep
    keys: EngineKeys
    config: dict[str, Any]
    """The configuration as the script gave it."""
    state: TrainState[Tensor]
    live_optimizer: EngineOptimizer | None
    lr_scheduler: Any
    training_dataloader: ResumableLoader | CurriculumLoader | None
    metrics: Metrics | None
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    _is_applied: bool
    _monitors: list[Writer]
    _watch: StepLog
    comms_log: CommsLog | None

    @property
    def cfg(self) -> Config:
        return self.train_step.spec.cfg

    # --- device and rank --------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.train_step.device

    @property
    def local_rank(self) -> int:
        """The index of this rank on its machine."""
        me = launched()
        return self.device.index or 0 if me is None else me.local_rank

    @property
    def global_rank(self) -> int:
        return self.train_step.rank

    @property
    def world_size(self) -> int:
        return self.train_step.world_size

    @property
    def dp_world_size(self) -> int:
        return self.train_step.data_world_size

    # --- progress ---------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> LossScaleNumber:
        """The factor of the next loss. Called, as in DeepSpeed, it returns the
        configured one, which is 0 where dynamic.
        """
        return LossScaleNumber(self.state.loss_scale.scale.item(), self.cfg.fp16.loss_scale)

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last update, unscaled and before clipping; None
        before the first.
        """
        return None if self.metrics is None else float(self.metrics.grad_norm.item())

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated: it ended an accumulation, and was not
        skipped for an overflow.
        """
        return self._is_applied

    def get_lr(self) -> list[float]:
        return [lr_of(group) for group in self._groups]

    def get_mom(self) -> list[Any]:
        """The momentum of each group, or its betas."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all groups, until a scheduler writes one."""
        if isinstance(lr, bool) or not isinstance(lr, int | float | Tensor):
            fix = "pass one rate for all groups, or write optimizer.param_groups[i]['lr']"
            refuse("set_lr", "given a number", lr, fix)
        for group in self._groups:
            group["lr"] = lr

    @property
    def hyper(self) -> list[dict[str, Any]]:
        """The param groups with parameters, in the step's order; the first, where none
        has any (a stage of a pipeline).
        """
        return [group for group in self._groups if group["params"]] or self._groups[:1]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.live_optimizer is None else self.live_optimizer.param_groups

    def module_state_dict(
        self,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """The full weights, on every rank's CPU. *Collective:* every rank.

        Args:
            destination: a dict to which the weights are added.
            prefix: the prefix of their names.
            keep_vars: must be False, because the weights are copies.
            exclude_frozen_parameters: whether to omit frozen parameters.
        """
        if keep_vars:
            raise ValueError(
                "module_state_dict: keep_vars must be False, got True: gathered weights are "
                "copies; leave it out"
            )
        frozen = self._frozen if exclude_frozen_parameters else set()
        found = {} if destination is None else destination
        for name, x in self.active_step().gather(self.state).items():
            if name not in frozen:
                found[f"{prefix}{name}"] = x
        return found

    @property
    def _frozen(self) -> set[str]:
        params = self.train_step.spec.model.named_parameters(remove_duplicate=False)
        return {name for name, param in params if not param.requires_grad}

    def consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """The full weights in the model's dtypes, on rank 0; None on the others.
        *Collective:* every rank.
        """
        step = self.active_step()
        full = step.gather(self.state, to="rank0")
        frozen = self._frozen if exclude_frozen_parameters else set()
        like = {
            name: x.dtype for name, x in step.spec.model.named_parameters(remove_duplicate=False)
        }
        found = {
            name: x.to(like.get(name, x.dtype)) for name, x in full.items() if name not in frozen
        }
        return found if step.rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict = (
        consolidated_16bit_state_dict
    )

    @property
    def profile(self) -> Profile | None:
        """The profile of the step that `flops_profiler` names, on rank 0; None until
        that step is over, and on other ranks.
        """
        return self._watch.profile

    def random_state(self) -> Mapping[str, Tensor]:
        """The random state of the process, which the module uses."""
        return {
            kind: state
            for kind, state in random_states(self.device).items()
            if kind in self.state.rng
        }

    def set_random_state(self) -> None:
        set_random_states(self.state.rng, self.device)

    # --- log output -------------------------------------------------------------------------------

    def log_line(self, line: RenderableType) -> None:
        if self.train_step.rank == 0:
            print(line if isinstance(line, str) else as_text(line), flush=True)

    def _report(self, before: int) -> None:
        """Writes monitors, `steps_per_print` and the configured tables, after the
        update that followed `before` others.
        """
        metrics, every = self.metrics, self.keys.steps_per_print
        assert metrics is not None
        if self._monitors:
            events = {"train_loss": metrics.loss.item(), "lr": metrics.lr.item()}
            if isnan(events["train_loss"]):  # the engine did not see the loss
                del events["train_loss"]
            if self.cfg.scales_loss:
                events["loss_scale"] = metrics.loss_scale.item()
            for writer in self._monitors:
                writer.write(events, self.global_samples)
        if every and self.global_steps % every == 0:
            counts = f"step={self.global_steps}, skipped={self.skipped_steps}"
            self.log_line(f"{counts}, lr={self.get_lr()}, mom={self.get_mom()}")
        for table in self._watch.report(before):
            self.log_line(table)
