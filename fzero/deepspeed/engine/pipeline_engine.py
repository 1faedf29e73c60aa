"""`PipelineEngine`: the engine of a `PipelineModule`, under DeepSpeed's names.
`train_batch` makes a whole step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fzero.config.config import ConfigError, ConfigWarning
from fzero.deepspeed.engine.config_keys import EngineKeys, PipelineKeys
from fzero.deepspeed.engine.dataloader import RepeatingLoader
from fzero.deepspeed.engine.engine import Engine
from fzero.deepspeed.topology import PipelineParallelGrid
from fzero.pipeline.execution import PipelineProgram, stages_of
from fzero.pipeline.module import PipelineModule
from fzero.step import TrainStep


class PipelineEngine(Engine):
    """Made by `initialize` of a `PipelineModule`. A step is one call of `train_batch`,
    on every rank.

    Attributes:
        total_loss, agg_train_loss: the loss of the last batch, the mean over
            micro-batches and data ranks; None before it.
        loss: on the last stage this rank's loss of the micro-batch that ran last, in
            training or evaluation, without its graph; 0 on other stages and before the
            first one.
        is_pipe_parallel, is_data_parallel: whether there are several stages, and
            several ranks of each.
    """

    module: PipelineModule
    total_loss: Tensor | None = None
    agg_train_loss: Tensor | None = None
    _last_loss: Tensor | None = None
    _data_iterator: Iterator[Any] | None = None
    _batch_fn: Any = None
    is_model_parallel = False

    # --- steps ------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One update from the next micro-batches, `micro_batches` of them; returns the
        mean loss, equal on all ranks.

        *Collective:* every rank.

        Args:
            data_iter: yields (inputs, labels); only the first and the last stage read
                theirs. None takes that of `set_dataiterator`, `set_dataloader` or
                `training_data`.

        Raises:
            RuntimeError: gradients are disabled, there is no data, or the engine has no
                optimizer.
            ValueError: on every rank, where one has fewer micro-batches, or no (inputs,
                labels).
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "train_batch: must be called with gradients enabled; call eval_batch in "
                "torch.no_grad"
            )
        if self.live_optimizer is None:
            raise RuntimeError(
                "train_batch: this engine has no optimizer; give initialize one, or the "
                "configuration"
            )
        self.live.check()
        self._begin_batch()
        self.live_optimizer.settle()
        before, step = self.global_steps, self.progress.following()
        with self.engine_log.watch.of("update", before):
            with self.live_optimizer.stepping():
                self.state, self.metrics = step(self.state, self._items(data_iter))
                self.train_step = step
                overflow = self.metrics.overflow
                self.progress.has_updated(
                    overflow=lambda: int(overflow), num_micro_steps=self.micro_batches
                )
            self.progress.step_scheduler({})
        self.micro_steps += self.micro_batches
        self.engine_log.report(before)
        self.total_loss = self.agg_train_loss = self.metrics.loss
        self._keep_loss(step)
        return self.metrics.loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: Literal["avg"] | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of the next micro-batches, without gradients and in evaluation
        mode; equal on all ranks.

        *Collective:* every rank.

        Args:
            data_iter: as for `train_batch`, for this call alone.
            return_logits: also returns the last layer's outputs, joined along their
                first dimension; None on other stages.
            compute_loss: False returns the outputs of the last layer instead of a loss;
                None on other stages.
            reduce_output: `"avg"` returns their mean; None returns them as a list.
            bcast_loss: has no effect: every stage gets the loss.
            num_micro_batches: None is `micro_batches`.

        Raises:
            ValueError: `reduce_output` or `num_micro_batches` is none of these; and as
                `train_batch`.
        """
        number = self.micro_batches if num_micro_batches is None else num_micro_batches
        if number < 1:
            raise ValueError(
                f"eval_batch: num_micro_batches must be at least 1, got {number}; leave it out"
            )
        if reduce_output not in ("avg", None):
            raise ValueError(
                f"eval_batch: reduce_output must be 'avg' or None, got {reduce_output!r}; pass one "
                f"of these"
            )
        self._begin_batch()
        active, of_training = self.active_step(), self._data_iterator
        run = active.runtime
        stages, program = stages_of(run), run.program
        assert isinstance(program, PipelineProgram)
        try:
            items = stages.agreed(
                self.state, self._items(data_iter), lambda one: list(islice(one, number))
            )
        finally:
            self._data_iterator = of_training
        passes = program.outputs(run, self.state, items, computes_loss=compute_loss)
        outputs = passes.results if stages.is_last else None
        if not compute_loss:
            is_mean = outputs is not None and reduce_output == "avg"
            return sum(outputs) / len(outputs) if is_mean and outputs is not None else outputs
        loss = program.mean_loss(run, passes, len(items))
        self._keep_loss(active)
        if not return_logits:
            return loss
        return loss, None if outputs is None else torch.cat(
            [out.reshape(-1, *out.shape[1:]) for out in outputs]
        )

    @property
    def loss(self) -> Tensor:
        return torch.zeros((), device=self.device) if self._last_loss is None else self._last_loss

    def _keep_loss(self, step: TrainStep) -> None:
        program = step.runtime.program
        assert isinstance(program, PipelineProgram)
        self._last_loss = program.last_loss[0] if program.last_loss else None

    def _begin_batch(self) -> None:
        """Brings the curriculum to the next step; the layers get no argument of it, and
        `set_batch_fn` may cut the batch.
        """
        if self.curriculum_scheduler_legacy is not None:
            self.curriculum_scheduler_legacy.update_difficulty(self.global_steps + 1)

    def _items(self, data_iter: Iterator[Any] | None) -> Any:
        """This rank's iterator of (inputs, labels); None on stages that read none."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return None
        if data_iter is not None:
            self._data_iterator = data_iter
        elif self._data_iterator is None:
            if self.training_dataloader is None:
                raise RuntimeError(
                    "train_batch: needs an iterator of (inputs, labels), got none; pass data_iter, "
                    "call set_dataiterator or set_dataloader, or give initialize training_data"
                )
            self._data_iterator = iter(RepeatingLoader(self.training_dataloader))
        return (
            self._data_iterator
            if self._batch_fn is None
            else map(self._batch_fn, self._data_iterator)
        )

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """The iterator of (inputs, labels) for `train_batch()`."""
        self._data_iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """The loader of (inputs, labels) for `train_batch()`; it begins again at its
        end.
        """
        self._data_iterator = iter(RepeatingLoader(loader))  # type: ignore[arg-type]

    def set_batch_fn(self, fn: Any) -> None:
        """`fn` is applied to what the iterators yield, and returns (inputs, labels)."""
        self._batch_fn = fn

    # --- the place of this rank -------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        return stages_of(self.train_step.runtime).is_first

    def is_last_stage(self) -> bool:
        return stages_of(self.train_step.runtime).is_last

    @property
    def num_stages(self) -> int:
        return stages_of(self.train_step.runtime).num_stages

    @property
    def stage_id(self) -> int:
        return stages_of(self.train_step.runtime).stage

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return self.accumulation.steps

    @property
    def grid(self) -> PipelineParallelGrid:
        """The places of all ranks."""
        grid = self.engine_tools.mpu
        assert grid is not None
        return grid

    @property
    def is_pipe_parallel(self) -> bool:
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        return self.train_step.data_world_size > 1

    @property
    def gas_boundary_ctr(self) -> int:
        """The updates so far."""
        return self.global_steps

    def reset_activation_shape(self) -> None:
        """Does nothing: shapes may change at any time."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Does nothing: tensors of any dtype are sent as they are."""


def prepare(model: nn.Module, engine_keys: EngineKeys, mpu: Any) -> None:
    """Builds the own layers of a `PipelineModule`, under the configuration's block
    `pipeline`. Does nothing to other modules.

    Raises:
        ConfigError: the block or `mpu` contradicts the module.
    """
    keys = engine_keys.pipeline
    if not isinstance(model, PipelineModule):
        if "pipeline" in engine_keys.model_fields_set:
            text = (
                f"pipeline: has no effect on a {type(model).__name__}; it is for a PipelineModule"
            )
            warnings.warn(text, ConfigWarning, stacklevel=3)
        return
    if mpu is not None:
        raise ConfigError(
            "mpu: must be None with a PipelineModule, which has its own topology; leave it out"
        )
    if keys.stages not in ("auto", model.num_stages):
        raise ConfigError(
            f"pipeline.stages: must be 'auto' or the module's num_stages, {model.num_stages}, got "
            f"{keys.stages!r}; leave it out"
        )
    for key, instead in (("partition", "partition_method="), ("seed_layers", "base_seed=")):
        if getattr(keys, key) != PipelineKeys.model_fields[key].default:
            text = (
                f"pipeline.{key}: has no effect, as in DeepSpeed; pass {instead} to PipelineModule"
            )
            warnings.warn(text, ConfigWarning, stacklevel=3)
    if keys.activation_checkpoint_interval:
        model.set_checkpoint_interval(keys.activation_checkpoint_interval)
    model.build_own()
