"""`EngineLog`: the lines, tables and monitors that an engine writes on rank 0."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

from rich.console import RenderableType

from fzero.common.text_tables import as_text
from fzero.deepspeed.engine.monitor import check_packages, monitors
from fzero.deepspeed.engine.step_log import CommsLog, StepLog
from fzero.profiling.reports import Profile

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine
    from fzero.step import TrainStep


class EngineLog:
    """The part of an engine that reports.

    Attributes:
        comms_log: the collectives of this rank, where `comms_logger` is enabled; else
            None.
        writers: the enabled monitors, on rank 0.
        watch: measures the parts of a step.
    """

    comms_log: CommsLog | None

    def __init__(self, engine: Engine) -> None:
        self.engine, step, keys = engine, engine.train_step, engine.keys
        check_packages(keys)
        self._says = step.rank == 0
        self.writers = monitors(keys) if self._says else []
        self.watch = StepLog(keys, step, is_on=self._says)
        self.comms_log = None
        if keys.comms_logger.enabled:
            self.comms_log = CommsLog(keys.comms_logger, self.log_line if self._says else None)

    def observed(self, step: TrainStep) -> TrainStep:
        """The step with its collectives logged, where they are."""
        return step if self.comms_log is None else step.observed(self.comms_log)

    @property
    def profile(self) -> Profile | None:
        """The profile of the step that `flops_profiler` names, on rank 0; None until
        that step is over, and on other ranks.
        """
        return self.watch.profile

    def log_line(self, line: RenderableType) -> None:
        if self._says:
            print(line if isinstance(line, str) else as_text(line), flush=True)

    def report(self, before: int) -> None:
        """Writes monitors, `steps_per_print` and the configured tables, after the
        update that followed `before` others.
        """
        engine, metrics, every = self.engine, self.engine.metrics, self.engine.keys.steps_per_print
        assert metrics is not None
        if self.writers:
            events = {"train_loss": metrics.loss.item(), "lr": metrics.lr.item()}
            if isnan(events["train_loss"]):  # the engine did not see the loss
                del events["train_loss"]
            if engine.cfg.scales_loss:
                events["loss_scale"] = metrics.loss_scale.item()
            for writer in self.writers:
                writer.write(events, engine.global_samples)
        if every and engine.global_steps % every == 0:
            counts = f"step={engine.global_steps}, skipped={engine.skipped_steps}"
            self.log_line(f"{counts}, lr={engine.get_lr()}, mom={engine.get_mom()}")
        for table in self.watch.report(before):
            self.log_line(table)
