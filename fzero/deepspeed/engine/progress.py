"""`Progress`: an engine's updates, the counters of them, and the numbers of its param
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from fzero.common.arguments import refuse
from fzero.deepspeed.engine.client_optimizers import changed, lr_of, with_parameters
from fzero.state import Metrics

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine
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


class Progress:
    """The part of an engine that counts its updates.

    Attributes:
        metrics: of the last update, or None. Its loss is NaN where the script called
            `loss.backward()` on a loss that the engine did not see (`engine.scale`
            shows it).
        micro_steps, global_steps, global_samples, skipped_steps: as DeepSpeed counts
            them.
        is_applied: whether the last `step()` updated.
    """

    metrics: Metrics | None
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.metrics = None
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.is_applied = False
        # rates, a step, and it with these rates
        self._followed: tuple[list[float], TrainStep, TrainStep] | None = None

    # --- an update --------------------------------------------------------------------------------

    def following(self) -> TrainStep:
        """The step with the present numbers of the param groups."""
        step, groups = self.engine.active_step(), self.hyper
        rates = [lr_of(group) for group in groups]
        others = changed(step.runtime.updater.optimizers, groups)
        if others is None and self._followed is not None:
            known, *same = self._followed
            if rates == known and any(step is one for one in same):
                return same[-1]
        made: TrainStep = step.following(rates, others)
        self._followed = (rates, step, made)
        return made

    def has_updated(self, *, overflow: Callable[[], int], num_micro_steps: int) -> None:
        """Counts an update. `overflow` reads whether it was skipped."""
        engine, metrics = self.engine, self.metrics
        assert engine.live_optimizer is not None and metrics is not None
        self.global_samples += engine.accumulation.samples(num_micro_steps)
        engine.live_optimizer.state.refresh()
        engine.held_module.show_buffers()
        is_skipped = engine.cfg.skips_overflow and bool(overflow())
        engine.live_optimizer.overflow = is_skipped
        self.global_steps += 1
        self.is_applied = not is_skipped
        self.skipped_steps += is_skipped
        if is_skipped:
            engine.log_line(
                f"OVERFLOW! Rank 0 skipped the step. Attempted loss scale: "
                f"{metrics.loss_scale.item():g}, next: {engine.live_optimizer.loss_scale:g}"
            )

    def step_scheduler(self, lr_kwargs: Mapping[str, Any]) -> None:
        """After an update: steps the scheduler, if it was not skipped."""
        scheduler = self.engine.lr_scheduler
        if scheduler is not None and self.is_applied:
            owner: Any = getattr(scheduler, "optimizer", None)
            if owner is not None:  # torch warns about a scheduler whose optimizer was never stepped
                owner._opt_called = True
            scheduler.step(**lr_kwargs)

    # --- numbers for the script -------------------------------------------------------------------

    @property
    def loss_scale(self) -> LossScaleNumber:
        """The factor of the next loss. Called, as in DeepSpeed, it returns the
        configured one, which is 0 where dynamic.
        """
        scale = self.engine.state.loss_scale.scale.item()
        return LossScaleNumber(scale, self.engine.cfg.fp16.loss_scale)

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last update, unscaled and before clipping; None
        before the first.
        """
        return None if self.metrics is None else float(self.metrics.grad_norm.item())

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated: it ended an accumulation, and was not
        skipped for an overflow.
        """
        return self.is_applied

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
        return with_parameters(self._groups)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self.engine.live_optimizer
        return [] if optimizer is None else optimizer.param_groups
