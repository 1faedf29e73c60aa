"""`DeepSpeedConfig`: a configuration under the names of DeepSpeed's class, for scripts
that ask it for keys.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import attrgetter
from os import PathLike
from types import SimpleNamespace
from typing import Any

from fzero.comms.process_group import job
from fzero.config.config import ConfigWarning
from fzero.config.deepspeed_models import (
    DeepSpeedConfigModel,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    zero_block,
)
from fzero.config.files import read as read_file
from fzero.deepspeed.engine.config_keys import read
from fzero.deepspeed.engine.sequences import KEYS, without_keys
from fzero.deepspeed.engine.settings_table import CONSTANT, GIVEN, look_up
from sharding.views import torch_dtype

_SIZES = {
    "train_batch_size": "train",
    "train_micro_batch_size_per_gpu": "micro",
    "gradient_accumulation_steps": "num_micro_steps",
}
_FIELDS = {
    "zero_optimization_stage": "zero_optimization.row.number",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
}
"""Attribute: a place in the configuration as fzero reads it."""
_KEYS: dict[str, tuple[str, Any]] = {
    "buffer_dtype": ("data_types.buffer_dtype", None),
    "curriculum_enabled_legacy": ("curriculum_learning.enabled", False),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "disable_allgather": ("disable_allgather", False),
    "dump_state": ("dump_state", False),
    "grad_accum_dtype": ("data_types.grad_accum_dtype", None),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "memory_breakdown": ("memory_breakdown", False),
    "mics_hierarchial_params_gather": ("zero_optimization.mics_hierarchical_params_gather", False),
    "param_dtype": ("data_types.param_dtype", None),
    "pld_enabled": ("progressive_layer_drop.enabled", False),
    "scheduler_name": ("scheduler.type", None),
    "steps_per_print": ("steps_per_print", None),
    "torch_autocast_lower_precision_safe_modules": (
        "torch_autocast.lower_precision_safe_modules",
        None,
    ),
}
"""Attribute: a key as it was given, and DeepSpeed's default."""
_OFF = dict.fromkeys(
    (
        "amp_enabled", "amp_params", "graph_harvesting", "load_universal_checkpoint",
        "use_data_before_expert_parallel_", "use_node_local_storage",
    ),
    False,
)  # fmt: skip
"""Attributes of features that fzero does not have."""
_OFFLOADS: dict[str, type[DeepSpeedConfigModel]] = {
    "offload_param": DeepSpeedZeroOffloadParamConfig,
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
}
DEEPSPEED_OPTIMIZERS = [
    "adagrad",
    "adam",
    "adamw",
    "lamb",
    "onebitadam",
    "onebitlamb",
    "zerooneadam",
    "muadam",
    "muadamw",
    "musgd",
    "lion",
    "muon",
]
"""The optimizers whose names are read in any case."""


def _block(config: DeepSpeedConfig, key: str) -> Any:
    """A block without `enabled`; False where it is not given."""
    block = look_up(config._param_dict, key, None)
    return False if block is None else {k: v for k, v in block.items() if k != "enabled"}


def _known(model: type[DeepSpeedConfigModel], block: Mapping[str, Any]) -> dict[str, Any]:
    """A block without the keys that are fzero's own."""
    known = {*model.model_fields, *(field.alias for field in model.model_fields.values())}
    return {key: value for key, value in block.items() if key in known}


def _optimizer_name(config: DeepSpeedConfig) -> Any:
    name = look_up(config._param_dict, "optimizer.type", None)
    return name.lower() if isinstance(name, str) and name.lower() in DEEPSPEED_OPTIMIZERS else name


def _monitors(config: DeepSpeedConfig) -> SimpleNamespace:
    names = ("csv_monitor", "tensorboard", "wandb", "comet")
    found = {name: getattr(config.keys, name) for name in names}
    return SimpleNamespace(enabled=any(one.enabled for one in found.values()), **found)


_MADE: dict[str, Callable[[Any], Any]] = {
    "aio_config": lambda self: (
        self.cfg.aio.model_dump()
        | {"single_submit": False, "overlap_events": True, "use_gds": False}
    ),
    "checkpoint_tag_validation_enabled": lambda self: (
        self.keys.checkpoint.tag_validation != "IGNORE"
    ),
    "checkpoint_tag_validation_fail": lambda self: self.keys.checkpoint.tag_validation == "FAIL",
    "comms_config": lambda self: SimpleNamespace(
        comms_logger_enabled=self.keys.comms_logger.enabled, comms_logger=self.keys.comms_logger
    ),
    "curriculum_params_legacy": lambda self: _block(self, "curriculum_learning"),
    "flops_profiler_config": lambda self: self.keys.flops_profiler,
    "gradient_clipping": lambda self: look_up(
        self._param_dict, "gradient_clipping", self.cfg.gradient_clipping
    ),
    "hybrid_engine": lambda self: self.keys.hybrid_engine,
    "monitor_config": _monitors,
    "optimizer_name": _optimizer_name,
    "pipeline": lambda self: (
        self.keys.pipeline.model_dump(exclude={"use_reentrant"})
        | look_up(self._param_dict, "pipeline", {})
    ),
    "pld_params": lambda self: _block(self, "progressive_layer_drop"),
    "sparse_attention": lambda self: (
        None if self.cfg.sparse_attention is None else self.cfg.sparse_attention.as_read()
    ),
    "torch_autocast_dtype": lambda self: (
        torch_dtype(self.cfg.torch_autocast.dtype)
        if look_up(self._param_dict, "torch_autocast.dtype", None)
        else None
    ),
    "wall_clock_breakdown": lambda self: (
        self.keys.wall_clock_breakdown or self.keys.flops_profiler.enabled
    ),
}


class DeepSpeedConfig:
    """The batch sizes and blocks of a configuration on the present number of ranks.

    Attributes:
        cfg, keys: the configuration as fzero reads it, for the step and for the engine.
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps:
            those that are missing are inferred.
        zero_config: the block `zero_optimization` as DeepSpeed's model.

    Other attributes are those of DeepSpeed's class that fzero has an answer for, and
    the fields of `cfg`.

    Args:
        config: a dict, or the path of a file.
        mpu, mesh_device: know the number of data-parallel ranks.
        engine: the engine whose configuration it is; its present batch sizes count, and
            no attribute can be set.

    Raises:
        ConfigError: the configuration is invalid, or its batch sizes do not fit the
            number of ranks.
    """

    def __init__(
        self,
        config: str | PathLike[str] | Mapping[str, Any],
        mpu: Any = None,
        mesh_device: Any = None,
        *,
        engine: Any = None,
    ) -> None:
        self._engine = None
        self._param_dict = dict(config if isinstance(config, Mapping) else read_file(config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if engine is not None else "default", ConfigWarning)
            self.cfg, self.keys = read(self._param_dict)
        # each group that shares sequences has whole batches
        num_sharing = without_keys(self._param_dict)[1].get(KEYS[0], 1)
        self.global_rank, self.world_size = job().rank, job().size // num_sharing
        if mesh_device is not None:
            self.world_size = mesh_device.get_group(mesh_dim="data_parallel").size()
        if mpu is not None:
            self.world_size = mpu.get_data_parallel_world_size()
        if engine is not None:
            self.world_size = engine.dp_world_size
        else:
            self._sizes = self.cfg.batch_sizes(self.world_size)
        self._engine = engine

    @property
    def zero_enabled(self) -> bool:
        return self.cfg.zero_optimization.row.shards("optimizer")

    @cached_property
    def zero_config(self) -> DeepSpeedZeroConfig:
        block = self._param_dict.get("zero_optimization", {})
        if isinstance(block, Mapping):
            block = {
                **_known(DeepSpeedZeroConfig, block),
                "stage": self.cfg.zero_optimization.row.number,
            }
            for name, model in _OFFLOADS.items():
                if isinstance(block.get(name), Mapping):
                    block[name] = _known(model, block[name])
        return zero_block({**self._param_dict, "zero_optimization": block})

    def print_user_config(self) -> None:
        """Prints the configuration as it was given."""
        print(json.dumps(self._param_dict, indent=2, sort_keys=True, default=str), flush=True)

    def print(self, name: str) -> None:
        """Prints the configuration with its effective values."""
        print(f"{name}:\n{self.cfg}", flush=True)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_engine") is not None:
            raise AttributeError(
                f"engine._config.{name}: cannot be set, because the engine has read its "
                f"configuration; set the key before initialize, learning rates in "
                f"engine.optimizer.param_groups, and batch sizes by engine.set_train_batch_size"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("cfg", "keys"):
            raise AttributeError(name)
        if name in _SIZES:
            return (
                getattr(self._sizes, _SIZES[name])
                if self._engine is None
                else getattr(self._engine, name)()
            )
        if name in _MADE:
            return _MADE[name](self)
        if name in _KEYS or name in GIVEN:
            return look_up(self._param_dict, *(_KEYS.get(name) or GIVEN[name]))
        if name in _OFF or (name.startswith("eigenvalue_") and name in CONSTANT):
            return {**CONSTANT, **_OFF}[name]
        try:
            return attrgetter(_FIELDS.get(name, name))(self.cfg)
        except AttributeError:
            raise AttributeError(
                f"DeepSpeedConfig.{name}: fzero has none; engine.config is the configuration as it "
                f"was given, and engine.cfg as fzero reads it"
            ) from None


__all__ = ["DEEPSPEED_OPTIMIZERS", "DeepSpeedConfig"]
