"""Which keys of a configuration concern the engine alone? Those about printing, files and data, which no step needs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationError

from fzero.config import Config, ConfigError, ConfigWarning
from fzero.config_fields import Block, Count, said


class Monitor(Block):
    """DeepSpeed keys `csv_monitor` and `tensorboard`: where loss, learning rate and loss scale of each step are written."""

    enabled: bool = False
    output_path: str = ""
    """A folder; empty is `csv_monitor`, or `runs` for tensorboard."""
    job_name: str = "DeepSpeedJobName"
    """The folder in it."""


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _steps(value: object) -> object:
    return None if value in (0, float("inf"), "inf") else value


class CheckpointKeys(Block):
    """DeepSpeed key `checkpoint`, of which the engine honours what follows."""

    tag_validation: Annotated[Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(_upper)] = "WARN"
    """What happens when ranks save under different tags."""


class EngineKeys(Block):
    """The keys that `fzero.initialize` honours beside those of a step."""

    steps_per_print: Annotated[Count | None, BeforeValidator(_steps)] = None
    """Rank 0 prints step, skipped steps, learning rate and momentum after so many steps."""
    wall_clock_breakdown: bool | None = False
    """Rank 0 prints how long forward, backward and step took, after each step."""
    memory_breakdown: bool | None = False
    """Rank 0 prints the plan, with the bytes of model state, when the engine is made."""
    dump_state: bool | None = False
    """Rank 0 prints the configuration and the plan when the engine is made."""
    dataloader_drop_last: bool | None = False
    """Whether the loader of `training_data` drops what does not fill a batch on every rank."""
    csv_monitor: Monitor = Monitor()
    tensorboard: Monitor = Monitor()
    checkpoint: CheckpointKeys = CheckpointKeys()


def read(source: Mapping[str, Any] | str | Path | Config) -> tuple[Config, EngineKeys]:
    """The configuration of the step, and the engine's.

    Raises:
        ConfigError: one line for every field that is wrong.
    """
    own = "|".join(EngineKeys.model_fields)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"({own}):", category=ConfigWarning)
        cfg = Config.load(source)
    given = {note.key: note.value for note in cfg.notes if note.key in EngineKeys.model_fields}
    if isinstance(given.get("checkpoint"), Mapping):
        given["checkpoint"] = _known(given["checkpoint"])
    try:
        return cfg, EngineKeys.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {said(e)}, got {e['input']!r}" for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


_CHECKPOINT_OFF = {
    "load_universal": False, "use_node_local_storage": False, "checkpoint_serialization": True, "writer": None,
    "parallel_write": {"pipeline_stage": False},
}  # fmt: skip


def _known(block: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine honours of the block `checkpoint`; what else it says must ask for nothing."""
    for key, value in block.items():
        if key in _CHECKPOINT_OFF and value not in (_CHECKPOINT_OFF[key], None):
            raise ConfigError(
                f"checkpoint.{key}: must be {_CHECKPOINT_OFF[key]!r}, got {value!r}: checkpoints are fzero's, which load on any "
                f"number of ranks; remove it (`fzero import-deepspeed` reads DeepSpeed's)"
            )
    return {key: value for key, value in block.items() if key == "tag_validation"}
