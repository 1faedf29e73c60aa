"""`Settings`: DeepSpeed's methods that read an engine's configuration."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import torch

from fzero.config.config import Config
from fzero.engine.config_keys import EngineKeys
from fzero.step import TrainStep
from sharding.views import torch_dtype

Value = TypeVar("Value", bool, int, float)


def _reads(kind: type[Value], place: str) -> Callable[[Settings], Value]:
    """A method that returns an attribute of the engine, such as a key of its configuration; null counts as false."""
    read = attrgetter(place)
    return lambda self: kind(read(self))


class Settings:
    """The part of `Engine` that reads its configuration."""

    train_step: TrainStep
    keys: EngineKeys

    @property
    def cfg(self) -> Config:
        return self.train_step.recipe.cfg

    zero_optimization_stage = _reads(int, "train_step.plan.stage")
    zero_optimization = _reads(bool, "train_step.plan.stage")

    def zero_optimization_partition_gradients(self) -> bool:
        return self.train_step.plan.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.train_step.plan.stage == 3

    def zero_offload_optimizer(self) -> Any:
        """The block of the configuration, or None; likewise `zero_offload_param`."""
        return self.cfg.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> Any:
        return self.cfg.zero_optimization.offload_param

    def zero_cpu_offload(self) -> bool:
        return getattr(self.zero_offload_optimizer(), "device", None) == "cpu"

    def zero_reduce_bucket_size(self) -> int | None:
        return self.cfg.zero_optimization.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int | None:
        return self.cfg.zero_optimization.allgather_bucket_size

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: the weights can always be gathered."""
        return True

    fp16_enabled = _reads(bool, "cfg.fp16.enabled")
    bfloat16_enabled = _reads(bool, "cfg.bf16.enabled")
    dynamic_loss_scale = _reads(bool, "train_step.runtime.rules.scaling.dynamic")

    def amp_enabled(self) -> bool:
        """False: a configuration with the block `amp` raises."""
        return False

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the largest flat buffer's parameters and of its accumulated gradients."""
        dtypes = max(self.train_step.plan.flat_buffers, key=lambda buffer: buffer.padded_numel).dtypes
        return torch_dtype(dtypes.param), torch_dtype(dtypes.grad)

    gradient_clipping = _reads(float, "cfg.gradient_clipping")

    def optimizer_name(self) -> str | None:
        """The name of the configuration's optimizer, in lower case as in DeepSpeed."""
        return str(self.cfg.optimizer.type).lower() if "optimizer" in self.cfg.model_fields_set else None

    def get_type(self) -> list[str | None]:
        """The optimizer of each group."""
        return [str(getattr(one, "type", one)).lower() for one in self.train_step.runtime.updater.optimizers]

    def scheduler_name(self) -> str | None:
        return None if self.cfg.scheduler is None else self.cfg.scheduler.type

    def steps_per_print(self) -> int | None:
        return self.keys.steps_per_print

    wall_clock_breakdown = _reads(bool, "keys.wall_clock_breakdown")
    memory_breakdown = _reads(bool, "keys.memory_breakdown")
    dump_state = _reads(bool, "keys.dump_state")
    dataloader_drop_last = _reads(bool, "keys.dataloader_drop_last")
    flops_profiler_enabled = _reads(bool, "keys.flops_profiler.enabled")
    flops_profiler_profile_step = _reads(int, "keys.flops_profiler.profile_step")
    flops_profiler_module_depth = _reads(int, "keys.flops_profiler.module_depth")
    flops_profiler_top_modules = _reads(int, "keys.flops_profiler.top_modules")
    flops_profiler_detailed = _reads(bool, "keys.flops_profiler.detailed")

    def flops_profiler_output_file(self) -> str | None:
        return self.keys.flops_profiler.output_file

    get_data_parallel_rank = _reads(int, "train_step.rank")

    def get_model_parallel_rank(self) -> int:
        """0: all ranks are data-parallel."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank
