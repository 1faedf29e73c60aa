"""What scripts ask of an engine besides training: its sizes, switches and counters, and what it tells meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.client_optimizers import lr_of
from fzero.config import Config, ConfigError
from fzero.engine_keys import EngineKeys
from fzero.launched import launched
from fzero.monitor import CsvMonitor, TensorBoardMonitor, Watch
from fzero.state import Metrics, TrainState
from fzero.step import TrainStep

if TYPE_CHECKING:
    from fzero.dataloader import ResumableLoader
    from fzero.engine_optimizer import EngineOptimizer


class Accessors:
    """The part of `Engine` that computes nothing."""

    train_step: TrainStep
    state: TrainState[Tensor]
    keys: EngineKeys
    optimizer: EngineOptimizer | None
    lr_scheduler: Any
    training_dataloader: ResumableLoader | None
    metrics: Metrics | None
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    _gas: int
    _counted_from: int
    """The micro-step at which the first accumulation of `_gas` began."""
    _micro_batch: int | None
    _boundary: bool | None
    _monitors: list[CsvMonitor | TensorBoardMonitor]
    _watch: Watch

    # --- batch sizes ---------------------------------------------------------------------------------------------

    def gradient_accumulation_steps(self) -> int:
        return self._gas

    def train_micro_batch_size_per_gpu(self) -> int:
        if self._micro_batch is None:
            raise ConfigError(
                "train_micro_batch_size_per_gpu: is not configured, nor is train_batch_size; give one of them"
            )
        return self._micro_batch

    def train_batch_size(self) -> int:
        """Samples per update, all ranks together."""
        return self.train_micro_batch_size_per_gpu() * self._gas * self.train_step.world_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of accumulation steps, from here on: an accumulation must not have begun."""
        one = self.train_micro_batch_size_per_gpu() * self.train_step.world_size
        if train_batch_size % one or train_batch_size < one:
            raise ConfigError(
                f"train_batch_size: must be a multiple of {one} (train_micro_batch_size_per_gpu × ranks), got {train_batch_size}"
            )
        if self._num_collected and self._boundary is None:
            raise RuntimeError(
                f"engine.set_train_batch_size: must be called between an update and the next micro-step, got a call after "
                f"{self._num_collected} of {self._gas} micro-steps; call it after an update"
            )
        self._gas, self._counted_from = train_batch_size // one, self.micro_steps

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of samples per rank and micro-step; the accumulation steps stay."""
        if micro_batch_size < 1:
            raise ConfigError(f"train_micro_batch_size_per_gpu: must be at least 1, got {micro_batch_size}")
        self._micro_batch = micro_batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        return self._num_collected + 1 == self._gas if self._boundary is None else self._boundary

    @property
    def _num_collected(self) -> int:
        """Micro-steps since an accumulation began, by count."""
        return (self.micro_steps - self._counted_from) % self._gas

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says itself whether the next `step` updates, in place of counting; call it before the backward."""
        self._boundary = bool(is_boundary)

    def _samples(self) -> int:
        """Of one update, where that is configured."""
        return 0 if self._micro_batch is None else self.train_batch_size()

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def cfg(self) -> Config:
        """The configuration of the step."""
        return self.train_step.recipe.cfg

    @property
    def device(self) -> torch.device:
        return self.train_step.device

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine."""
        me = launched()
        return self.device.index or 0 if me is None else me.local_rank

    @property
    def global_rank(self) -> int:
        return self.train_step.rank

    @property
    def world_size(self) -> int:
        return self.train_step.world_size

    dp_world_size = world_size

    def zero_optimization_stage(self) -> int:
        return self.train_step.plan.stage

    def zero_optimization(self) -> bool:
        return self.train_step.plan.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.train_step.plan.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.train_step.plan.stage == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: the weights can always be gathered."""
        return True

    def fp16_enabled(self) -> bool:
        return self.cfg.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.cfg.bf16.enabled

    def gradient_clipping(self) -> float:
        return self.cfg.gradient_clipping

    def steps_per_print(self) -> int | None:
        return self.keys.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return bool(self.keys.wall_clock_breakdown)

    def dynamic_loss_scale(self) -> bool:
        return self.train_step._scaling.dynamic

    # --- where it stands -----------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(self.state.loss_scale.scale.item())

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last update, not scaled and before clipping; None before the first."""
        return None if self.metrics is None else float(self.metrics.grad_norm.item())

    def was_step_applied(self) -> bool:
        """Whether the last update was made, and not skipped for an overflow."""
        return self.metrics is not None and not bool(self.metrics.overflow)

    def get_lr(self) -> list[float]:
        return [] if self.optimizer is None else [lr_of(group) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum of each group, or its betas."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def module_state_dict(self) -> dict[str, Tensor]:
        """The full weights, on every rank's CPU. *Collective:* every rank."""
        return self.train_step.gather(self.state)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The full weights as the model computes with them, on rank 0; None on the others. *Collective:* every rank."""
        step = self.train_step
        full = step.gather(self.state, to="rank0")
        params = dict(step.recipe.model.named_parameters(remove_duplicate=False))
        frozen = {name for name, param in params.items() if exclude_frozen_parameters and not param.requires_grad}
        like = {name: param.dtype for name, param in params.items()}
        told = {name: x.to(like.get(name, x.dtype)) for name, x in full.items() if name not in frozen}
        return told if step.rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    # --- what it tells -------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if self.train_step.rank == 0:
            print(line, flush=True)

    def _report(self) -> None:
        """After an update: monitors, and what `steps_per_print` and `wall_clock_breakdown` promise."""
        metrics, every = self.metrics, self.keys.steps_per_print
        assert metrics is not None
        if self._monitors:
            events = {"train_loss": metrics.loss.item(), "lr": metrics.lr.item()}
            if self.cfg.scales_loss:
                events["loss_scale"] = metrics.loss_scale.item()
            for monitor in self._monitors:
                monitor.write(events, self.global_samples)
        if every and self.global_steps % every == 0:
            self._say(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
            )
        if self.keys.wall_clock_breakdown:
            self._say(self._watch.told())
