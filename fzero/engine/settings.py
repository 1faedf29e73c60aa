"""`Settings`: DeepSpeed's methods that read an engine's configuration."""

from __future__ import annotations

from typing import Any

import torch

from fzero.config.config import Config
from fzero.engine.config_keys import EngineKeys
from fzero.step import TrainStep
from sharding.views import torch_dtype


class Settings:
    """The part of `Engine` that reads its configuration."""

    train_step: TrainStep
    keys: EngineKeys

    @property
    def cfg(self) -> Config:
        """The configuration of the step."""
        return self.train_step.recipe.cfg

    # --- stage and placements ------------------------------------------------------------------------------------

    def zero_optimization_stage(self) -> int:
        return self.train_step.plan.stage

    def zero_optimization(self) -> bool:
        return self.train_step.plan.stage > 0

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
        block = self.zero_offload_optimizer()
        return block is not None and block.device == "cpu"

    def zero_reduce_bucket_size(self) -> int | None:
        return self.cfg.zero_optimization.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int | None:
        return self.cfg.zero_optimization.allgather_bucket_size

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: the weights can always be gathered."""
        return True

    # --- dtypes --------------------------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        return self.cfg.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.cfg.bf16.enabled

    def amp_enabled(self) -> bool:
        """False: a configuration with the block `amp` raises."""
        return False

    def dynamic_loss_scale(self) -> bool:
        return self.train_step.runtime.rules.scaling.dynamic

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the largest flat buffer's parameters and of its accumulated gradients."""
        dtypes = max(self.train_step.plan.flat_buffers, key=lambda buffer: buffer.padded_numel).dtypes
        return torch_dtype(dtypes.param), torch_dtype(dtypes.grad)

    # --- optimizer and schedule ----------------------------------------------------------------------------------

    def gradient_clipping(self) -> float:
        return self.cfg.gradient_clipping

    def optimizer_name(self) -> str | None:
        """The name of the configuration's optimizer, in lower case as in DeepSpeed."""
        return str(self.cfg.optimizer.type).lower() if "optimizer" in self.cfg.model_fields_set else None

    def get_type(self) -> list[str | None]:
        """The optimizer of each group."""
        return [str(getattr(one, "type", one)).lower() for one in self.train_step.runtime.updater.optimizers]

    def scheduler_name(self) -> str | None:
        return None if self.cfg.scheduler is None else self.cfg.scheduler.type

    # --- log output ----------------------------------------------------------------------------------------------

    def steps_per_print(self) -> int | None:
        return self.keys.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return bool(self.keys.wall_clock_breakdown)

    def memory_breakdown(self) -> bool:
        return bool(self.keys.memory_breakdown)

    def dump_state(self) -> bool:
        return bool(self.keys.dump_state)

    def dataloader_drop_last(self) -> bool:
        return bool(self.keys.dataloader_drop_last)

    def flops_profiler_enabled(self) -> bool:
        return self.keys.flops_profiler.enabled

    def flops_profiler_profile_step(self) -> int:
        return self.keys.flops_profiler.profile_step

    def flops_profiler_module_depth(self) -> int:
        return self.keys.flops_profiler.module_depth

    def flops_profiler_top_modules(self) -> int:
        return self.keys.flops_profiler.top_modules

    def flops_profiler_detailed(self) -> bool:
        return self.keys.flops_profiler.detailed

    def flops_profiler_output_file(self) -> str | None:
        return self.keys.flops_profiler.output_file

    # --- ranks ---------------------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        return self.train_step.rank

    def get_model_parallel_rank(self) -> int:
        """0: all ranks are data-parallel."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank
