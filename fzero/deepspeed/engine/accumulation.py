"""`Accumulation`: an engine's batch sizes, and when an accumulation of micro-steps
ends.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fzero.common.arguments import check_whole
from fzero.config.config import ConfigError
from fzero.deepspeed.engine.call_errors import CallError
from fzero.pipeline.execution import PipelineProgram, stages_of
from fzero.pipeline.order_check import plan_order
from fzero.step import TrainStep

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine


class Accumulation:
    """The part of an engine that counts micro-steps.

    Attributes:
        steps: micro-steps of an accumulation.
        micro_batch: samples per rank and micro-step; None where none are configured.
        counted_from: the micro-step at which the first accumulation of so many `steps`
            began.
        boundary: whether the next `step` updates, as the script says; None where
            micro-steps are counted.
        is_syncing: whether backwards reduce gradients, which they do outside of
            `no_sync`.
    """

    def __init__(self, engine: Engine, *, steps: int, micro_batch: int | None) -> None:
        self.engine, self.steps, self.micro_batch = engine, steps, micro_batch
        self.counted_from = 0
        self.boundary: bool | None = None
        self.is_syncing = True

    def gradient_accumulation_steps(self) -> int:
        return self.steps

    def train_micro_batch_size_per_gpu(self) -> int:
        if self.micro_batch is None:
            raise ConfigError(
                "train_micro_batch_size_per_gpu: is not configured, nor is train_batch_size; give "
                "one of them"
            )
        return self.micro_batch

    def train_batch_size(self) -> int:
        """Samples per update, all ranks together."""
        return self.train_micro_batch_size_per_gpu() * self.steps * self.engine.dp_world_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Sets the number of accumulation steps from here on; allowed only between
        accumulations.
        """
        check_whole("train_batch_size", train_batch_size, 1)
        one = self.train_micro_batch_size_per_gpu() * self.engine.dp_world_size
        if train_batch_size % one or train_batch_size < one:
            raise ConfigError(
                f"train_batch_size: must be a multiple of {one} (train_micro_batch_size_per_gpu × "
                f"ranks), got {train_batch_size}"
            )
        if self._num_collected and self.boundary is None:
            raise RuntimeError(
                f"engine.set_train_batch_size: must be called between an update and the next "
                f"micro-step, got a call after {self._num_collected} of {self.steps} micro-steps; "
                f"call it after an update"
            )
        self.steps, self.counted_from = train_batch_size // one, self.engine.micro_steps
        self.engine.train_step = _with_micro_batches(self.engine.train_step, self.steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Sets the number of samples per rank and micro-step; the number of
        accumulation steps is unchanged.
        """
        check_whole("train_micro_batch_size_per_gpu", micro_batch_size, 1)
        self.micro_batch = micro_batch_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """(Samples per update over all ranks, samples per rank and micro-step,
        micro-steps per update).
        """
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates. Without `managed_gradient_accumulation`
        every one does, and this is False. In a pipeline it is True: `train_batch`
        makes a whole step.
        """
        if self.engine.train_step.runtime.spec.is_part:
            return True
        if self._is_unmanaged:
            return False
        return self._num_collected + 1 == self.steps if self.boundary is None else self.boundary

    @property
    def _is_unmanaged(self) -> bool:
        """Whether the script decides when an accumulation ends, by calling `step`."""
        return not self.engine.managed_gradient_accumulation()

    @property
    def ends(self) -> bool:
        """Whether the next `step` of the script updates."""
        return self._is_unmanaged or self.engine.is_gradient_accumulation_boundary()

    @property
    def _num_collected(self) -> int:
        """The number of micro-steps since the accumulation began."""
        return (self.engine.micro_steps - self.counted_from) % self.steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Sets whether the next `step` updates, until None returns to counting
        micro-steps; call it before the backward.
        """
        if self._is_unmanaged:
            raise RuntimeError(
                "engine.set_gradient_accumulation_boundary: needs managed_gradient_accumulation, "
                "which is false, so that every engine.step() updates; leave one of them out"
            )
        self.boundary = None if is_boundary is None else bool(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are collected but not reduced, in stages 0 and 1; the
        backward after it reduces them all.
        """
        plan = self.engine.train_step.plan
        if plan.row.shards("grads"):
            raise CallError(
                f"engine.no_sync: must be used in stage 0 or 1, got stage {plan.stage}, which "
                f"keeps no full gradients; leave it out"
            )
        if not self.is_syncing:
            raise CallError("engine.no_sync: must not be nested; leave the inner one out")
        self.is_syncing = False
        try:
            yield
        finally:
            self.is_syncing = True

    def samples(self, num_backwards: int = 0) -> int:
        """Samples of one update; 0 where no batch size is configured.

        Args:
            num_backwards: how many there were, which are counted where the script
                decides when an accumulation ends.
        """
        if self.micro_batch is None:
            return 0
        return (
            self.train_batch_size() // self.steps * num_backwards
            if self._is_unmanaged
            else self.train_batch_size()
        )


def _with_micro_batches(step: TrainStep, number: int) -> TrainStep:
    """A pipelined step with another number of micro-batches; any other step as it is,
    which takes whatever number it gets.
    """
    program = step.runtime.program
    if not isinstance(program, PipelineProgram):
        return step
    order: Any = getattr(step.spec.parallelism, "order", None)
    stages = stages_of(step.runtime).num_stages
    program = replace(program, order=plan_order(order, stages, number))
    batches = replace(step.runtime.batches, num_micro_steps=number)
    twin = copy.copy(step)
    twin.runtime = replace(step.runtime, runs=program, batches=batches)
    return twin
