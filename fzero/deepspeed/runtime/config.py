"""`deepspeed.runtime.config`: a configuration as DeepSpeed reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from fzero.config.config import Config
from fzero.config.fields import ConfigError
from fzero.config.files import read
from fzero.deepspeed.comm import get_rank, get_world_size
from fzero.engine.settings_table import look_up

DeepSpeedConfigError = ConfigError
ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adagrad", "adam", "adamw", "lamb"
LION_OPTIMIZER, MUON_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = (
    "lion",
    "muon",
    "onebitadam",
    "onebitlamb",
)
ZERO_ONE_ADAM_OPTIMIZER, MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = (
    "zerooneadam",
    "muadam",
    "muadamw",
    "musgd",
)
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER,
    ZERO_ONE_ADAM_OPTIMIZER, MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER,
]  # fmt: skip


_SIZES = {
    "train_batch_size": "train", "train_micro_batch_size_per_gpu": "micro", "gradient_accumulation_steps": "num_micro_steps",
}  # fmt: skip
_KEYS = {
    "optimizer_name": "optimizer.type", "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type", "scheduler_params": "scheduler.params",
}  # fmt: skip
_FIELDS = {
    "zero_config": "zero_optimization", "zero_optimization_stage": "zero_optimization.stage", "float16_config": "fp16",
    "bfloat16_config": "bf16", "elasticity_enabled": "elasticity.enabled",
}  # fmt: skip


class DeepSpeedConfig:
    """The batch sizes and blocks of a configuration on the present number of ranks.

    Attributes:
        cfg: the configuration as fzero reads it; other attributes are its fields.
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: those that are missing are inferred.

    Raises:
        ConfigError: the configuration is invalid, or its batch sizes do not fit the number of ranks.
    """

    def __init__(self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = dict(read(config) if isinstance(config, str | Path) else config)
        self.cfg = Config.load(self._param_dict)
        self.global_rank = get_rank()
        self.world_size = get_world_size() if mpu is None else mpu.get_data_parallel_world_size()
        self._sizes = self.cfg.batch_sizes(self.world_size)

    @property
    def zero_enabled(self) -> bool:
        return self.cfg.zero_optimization.row.shards("optimizer")

    def print_user_config(self) -> None:
        """Prints the configuration as it was given."""
        print(json.dumps(self._param_dict, indent=2, sort_keys=True, default=str), flush=True)

    def print(self, name: str) -> None:
        """Prints the configuration with its effective values."""
        print(f"{name}:\n{self.cfg}", flush=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "cfg":
            raise AttributeError(name)
        if name == "sparse_attention":
            return None if self.cfg.sparse_attention is None else self.cfg.sparse_attention.as_read()
        if name in _SIZES:
            return getattr(self._sizes, _SIZES[name])
        return (
            look_up(self._param_dict, _KEYS[name], None)
            if name in _KEYS
            else attrgetter(_FIELDS.get(name, name))(self.cfg)
        )


class DeepSpeedConfigWriter:
    """Collects keys, and writes them to a JSON file."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = {} if data is None else data

    def add_config(self, key: str, value: Any) -> None:
        self.data[key] = value

    def load_config(self, filename: str | Path) -> None:
        self.data = dict(read(Path(filename)))

    def write_config(self, filename: str | Path) -> None:
        Path(filename).write_text(json.dumps(self.data), "utf-8")
