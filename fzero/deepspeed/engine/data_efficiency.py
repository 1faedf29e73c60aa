"""`DataSchedules`: an engine's curricula, samplers and dropped layers, under
DeepSpeed's names.

With g updates behind it (skipped ones included, as DeepSpeed counts `global_steps`) a
forward in training mode has the sequence length of step g + 1, and θ(max(g − 1, 0)).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fzero.config import data_efficiency as blocks
from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.config.fields import Block
from fzero.data.index_files import read_metric
from fzero.data.loader import CurriculumLoader
from fzero.data.sampler import Admission, CurriculumSampler
from fzero.data.schedules import Schedule
from fzero.data.token_dropping import RandomLTD, TokenDropping
from fzero.deepspeed.engine.data_schedulers import (
    CurriculumScheduler,
    ProgressiveLayerDrop,
    RandomLTDScheduler,
)

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine

Schedules = Mapping[str, Schedule]
NOT_CONVERTED = (
    "random_ltd: drops no tokens, as in DeepSpeed, because convert_to_random_ltd was not called; "
    "call convert_to_random_ltd(engine, LayerClass) after initialize, or switch the block off"
)


class DataSchedules:
    """The part of an engine for the blocks `curriculum_learning`, `data_efficiency` and
    `progressive_layer_drop`.
    """

    curriculum_scheduler_legacy: CurriculumScheduler | None = None
    """Of the block `curriculum_learning`."""
    random_ltd_scheduler: RandomLTDScheduler | None = None
    """Of the block `random_ltd`; its steps are updates that were applied."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        block = engine.cfg.curriculum_learning
        if block is not None and block.enabled:
            self.curriculum_scheduler_legacy = CurriculumScheduler(
                block.model_dump(exclude_none=True)
            )
        if engine.cfg.drops_tokens:
            config = self.random_ltd_config()
            if config["total_layer_num"] is None:
                raise ConfigError(
                    "random_ltd.total_layer_num: is required for the engine's count of layer "
                    "tokens; give the number of layers"
                )
            self.random_ltd_scheduler = RandomLTDScheduler(config)

    def resume_data(self) -> None:
        """Brings the schedulers to the present step, after a checkpoint."""
        scheduler = self.curriculum_scheduler_legacy
        if scheduler is not None and self.engine.global_steps and scheduler.has_schedule:
            scheduler.update_difficulty(self.engine.global_steps)
        if self.random_ltd_scheduler is not None and int(self.engine.state.step):
            self.random_ltd_scheduler.update_seq(int(self.engine.state.step) - 1)

    def data_arguments(self) -> dict[str, Any]:
        """The keyword arguments that the model's forward gets in training mode, besides
        the script's.
        """
        found: dict[str, Any] = {}
        if self.random_ltd_scheduler is not None:
            self.random_ltd_scheduler.update_seq(int(self.engine.state.step))
            if "random_ltd" not in self.engine.train_step.runtime.changes.texts:
                warnings.warn(NOT_CONVERTED, ConfigWarning, stacklevel=4)
        if (drop := self.progressive_layer_drop) is not None:
            found |= drop.get_state()
        if (scheduler := self.curriculum_scheduler_legacy) is not None:
            found["curriculum_seqlen"] = scheduler.update_difficulty(self.engine.global_steps + 1)
        return found

    # --- the block curriculum_learning ------------------------------------------------------------

    def curriculum_params_legacy(self) -> Any:
        """The block without `enabled`; False if there is none."""
        block = self.engine.cfg.curriculum_learning
        return (
            False if block is None else _given(block) | {"curriculum_type": block.curriculum_type}
        )

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Schedules | Schedule
    ) -> None:
        """Sets functions from the step, counted from 1, to the difficulty, for
        `schedule_type` custom.

        Args:
            schedule_func_dict: functions by metric, for the loader of `training_data`;
                or one function, for the block `curriculum_learning`.
        """
        if callable(schedule_func_dict):
            if self.curriculum_scheduler_legacy is None:
                raise ConfigError(
                    "engine.set_custom_curriculum_learning_schedule: a function needs the block "
                    "curriculum_learning, which is not enabled; pass a mapping from metrics to "
                    "functions, or enable it"
                )
            self.curriculum_scheduler_legacy.set_custom_get_difficulty(schedule_func_dict)
            return
        loader = self._curriculum_loader("set_custom_curriculum_learning_schedule")
        known = loader.sampler.admissions
        for name in schedule_func_dict:
            if name not in known:
                raise ConfigError(
                    f"engine.set_custom_curriculum_learning_schedule: {name!r} must be one of the "
                    f"metrics {', '.join(known)}; name it in curriculum_metrics"
                )
        admissions = {
            n: replace(a, schedule=schedule_func_dict.get(n, a.schedule)) for n, a in known.items()
        }
        loader.sampler = replace(loader.sampler, admissions=admissions)

    def set_data_post_process_func(self, post_process_func: Callable[..., Any] | None) -> None:
        """Sets `function(batch, sampler_state) -> batch`, which changes the batches of
        the loader of `training_data`.

        `sampler_state["current_difficulties"]` has the difficulty of each metric.
        """
        if post_process_func is not None or isinstance(
            self.engine.training_dataloader, CurriculumLoader
        ):
            self._curriculum_loader(
                "set_data_post_process_func"
            ).post_process_func = post_process_func

    def _curriculum_loader(self, method: str) -> CurriculumLoader:
        if not isinstance(self.engine.training_dataloader, CurriculumLoader):
            raise ConfigError(
                f"engine.{method}: needs the loader of training_data with "
                f"data_efficiency.data_sampling enabled, and there is none; enable the block and "
                f"pass training_data to initialize, or transform batches in collate_fn"
            )
        return self.engine.training_dataloader

    # --- the block data_efficiency ----------------------------------------------------------------

    @property
    def efficiency(self) -> blocks.DataEfficiency:
        """The block, or one that is off."""
        return efficiency_of(self.engine.cfg)

    def curriculum_learning_config(self) -> dict[str, Any]:
        block = self.efficiency.data_sampling.curriculum_learning
        return block.model_dump() if block.enabled else {"enabled": False}

    def random_ltd_config(self) -> dict[str, Any]:
        """The block `random_ltd`, with the batch sizes."""
        block = self.efficiency.data_routing.random_ltd
        sizes = self.engine.cfg.batch_sizes(self.engine.dp_world_size)
        number = block.random_ltd_layer_num or len(block.random_ltd_layer_id)
        found = block.model_dump() | {"random_ltd_layer_num": number}
        return found | {"global_batch_size": sizes.train or 0, "micro_batch_size": sizes.micro or 0}

    # --- the block progressive_layer_drop ---------------------------------------------------------

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """θ of the next forward; None if the block is not enabled."""
        block = self.layer_drop
        if not block.enabled:
            return None
        drop = ProgressiveLayerDrop(block.theta, block.gamma)
        drop.update_state(max(self.engine.global_steps - 1, 0))
        return drop

    def get_pld_theta(self) -> float | None:
        """θ of the next forward; None if the block is not enabled."""
        drop = self.progressive_layer_drop
        return None if drop is None else drop.get_theta()

    def pld_params(self) -> Any:
        """`theta` and `gamma`; False if the block is not enabled."""
        block = self.layer_drop
        return {"theta": block.theta, "gamma": block.gamma} if block.enabled else False

    @property
    def layer_drop(self) -> blocks.ProgressiveLayerDrop:
        """The block, or one that is off."""
        return self.engine.cfg.progressive_layer_drop or blocks.ProgressiveLayerDrop()


def efficiency_of(cfg: Config) -> blocks.DataEfficiency:
    """The block `data_efficiency`, or one that is off."""
    return cfg.data_efficiency or blocks.DataEfficiency()


def _given(block: Block) -> dict[str, Any]:
    """The keys of a block that were given, without `enabled`."""
    return block.model_dump(exclude={"enabled"}, exclude_unset=True)


def dropping_of_block(cfg: Config, model: nn.Module, kind: type[nn.Module]) -> TokenDropping:
    """The layers of a class that drop tokens, as the block `random_ltd` asks for.

    Raises:
        ConfigError: the block is off, or a number of a layer is out of range.
    """
    efficiency = efficiency_of(cfg)
    block = efficiency.data_routing.random_ltd
    if not efficiency.drops_tokens or block.random_ltd_schedule is None:
        raise ConfigError(
            "convert_to_random_ltd: needs data_efficiency, data_routing and random_ltd enabled, "
            "and one is not; enable them"
        )
    order: Literal["batch_seq", "seq_batch"] = (
        "batch_seq" if block.hidden_state_order == "batch_seq_dim" else "seq_batch"
    )
    ltd = RandomLTD(
        block.random_ltd_layer_id,
        block.random_ltd_schedule.schedule(),
        block.model_mask_name,
        order=order,
        seed=efficiency.seed,
    )
    try:
        return ltd.plan(model, kind)
    except ValueError as error:
        raise ConfigError(f"convert_to_random_ltd: {error}") from None


def sampler_of(cfg: Config, num_samples: int) -> CurriculumSampler:
    """The sampler of the block `data_efficiency`; reads the analyzer's files.

    Raises:
        ConfigError: a file is missing, or its metric is of another dataset.
    """
    efficiency = efficiency_of(cfg)
    metrics: Mapping[str, blocks.CurriculumMetric] = {}
    if efficiency.samples_by_difficulty:
        metrics = efficiency.data_sampling.curriculum_learning.curriculum_metrics
    try:
        admissions = {name: _admission(name, metric) for name, metric in metrics.items()}
        return CurriculumSampler(num_samples, admissions, efficiency.seed)
    except ValueError as error:
        raise ConfigError(f"data_efficiency.data_sampling: {error}") from None


def _admission(name: str, block: blocks.CurriculumMetric) -> Admission:
    def unset(step: int) -> int:
        raise ConfigError(
            f"curriculum_metrics.{name}: needs a function for schedule_type 'custom', and none is "
            f"set; call engine.set_custom_curriculum_learning_schedule({{{name!r}: function}}) "
            f"before the first batch"
        )

    schedule = block.schedule() or unset
    if block.clustering_type == "single_cluster":
        return Admission(schedule)
    assert block.index_to_sample_path is not None
    by_value = block.index_to_metric_path if block.difficulty_type == "value" else None
    metric = read_metric(block.index_to_sample_path, by_value)
    return Admission(schedule, metric, block.difficulty_type, block.max_difficulty or 100)
