"""`deepspeed.runtime.config`: a configuration as DeepSpeed reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fzero.config.fields import ConfigError
from fzero.config.files import read
from fzero.deepspeed.engine.deepspeed_config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from fzero.deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, ZeroStageEnum, get_zero_config

DeepSpeedConfigError = ConfigError
(
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    ONEBIT_ADAM_OPTIMIZER,
    ONEBIT_LAMB_OPTIMIZER,
    ZERO_ONE_ADAM_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUSGD_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
) = DEEPSPEED_OPTIMIZERS


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


__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUADAMW_OPTIMIZER",
    "MUADAM_OPTIMIZER",
    "MUON_OPTIMIZER",
    "MUSGD_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER",
    "ONEBIT_LAMB_OPTIMIZER",
    "ZERO_ONE_ADAM_OPTIMIZER",
    "ZERO_OPTIMIZATION",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedConfigWriter",
    "ZeroStageEnum",
    "get_zero_config",
]
