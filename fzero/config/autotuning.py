"""DeepSpeed's block `autotuning`: how `fzero tune` searches. It has no effect on a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from fzero.config.fields import Block, ConfigError, Count, FolderOrFile, message_of, number, only
from fzero.config.unused_keys import unknown_key


class Autotuning(Block):
    """DeepSpeed key `autotuning`: how `fzero tune` searches."""

    enabled: bool = False
    """DeepSpeed's switch. Here the command decides; a run always uses the values of the
    other keys.
    """
    fast: bool = True
    """Whether only stage, micro-batch and checkpointing are varied; false also tries a
    small `reduce_bucket_size`.
    """
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    """The measure to optimize: samples per second, seconds per step, or the model's
    floating point operations per second.
    """
    start_profile_step: Count = 3
    """The first step that is timed, counted from 1."""
    end_profile_step: Count = 5
    """The last step that is timed. The job ends after it."""
    tuner_type: Literal["model_based", "random", "gridsearch"] = "model_based"
    """The configurations to measure: the most promising by the plans and measurements
    so far, random ones, or one after the other."""
    tuner_early_stopping: Annotated[int, BeforeValidator(number), Field(ge=0)] = 5
    """The search ends when so many measurements in a row were no better than the best;
    0 is never.
    """
    tuner_num_trials: Count | None = None
    """Most configurations to measure. None is 50; for `model_based`, a third of all (at
    least 5).
    """
    num_tuning_micro_batch_sizes: Count = 3
    """The number of micro-batch sizes to try: the given one and its nearest, doubled
    and halved; with `train_batch_size` its divisors, so that the batch does not change.
    """
    min_train_micro_batch_size_per_gpu: Count = 1
    """The smallest micro-batch to try."""
    max_train_micro_batch_size_per_gpu: Count = 1024
    """The largest micro-batch to try."""
    min_train_batch_size: Count | None = None
    """The smallest batch of a step to try."""
    max_train_batch_size: Count | None = None
    """The largest batch of a step to try."""
    mp_size: Annotated[
        Count, only(lambda value: value == 1, "must be 1, for there is no model parallelism")
    ] = 1
    """Ranks of model parallelism: 1."""
    results_dir: FolderOrFile = "autotuning_results"
    """The folder for the measurements, the picture and `best.json`."""
    exps_dir: FolderOrFile = "autotuning_exps"
    """The folder for each measured configuration and the output of its run."""
    overwrite: bool = False
    """Whether everything is measured again. False continues from `results_dir`.
    (DeepSpeed's default is true.)
    """
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    """Arguments of the script that must have the same values as the configuration, such
    as `{"train_micro_batch_size_per_gpu": "--batch-size"}`."""


ABOUT_MODELS = ("model_info", "model_info_path", "metric_path")
"""Keys of DeepSpeed without effect: the script's own model is planned, and results are
in `results_dir`.
"""


def autotuning(keys: Mapping[str, Any]) -> Autotuning:
    """The block `autotuning` of a configuration, which is given as read from a file.

    Raises:
        ConfigError: one line for every field that is wrong.

    >>> autotuning({"autotuning": {"tuner_type": "random"}}).tuner_type
    'random'
    >>> autotuning({"autotuning": {"fats": True}})
    Traceback (most recent call last):
    fzero.config.fields.ConfigError: autotuning.fats: unknown key; did you mean 'fast'?
    """
    block = keys.get("autotuning") or {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"autotuning: must be an object, got {block!r}; remove it, or give one")
    try:
        made = Autotuning.model_validate(
            {key: value for key, value in block.items() if key not in ABOUT_MODELS}
        )
    except ValidationError as error:
        named = [
            (f"autotuning.{'.'.join(map(str, detail['loc']))}", detail) for detail in error.errors()
        ]
        lines = [
            unknown_key(name, tuple(Autotuning.model_fields))
            if detail["type"] == "extra_forbidden"
            else f"{name}: {message_of(detail)}, got {detail['input']!r}; mend or remove it"
            for name, detail in named
        ]
        raise ConfigError("\n".join(lines)) from None
    if made.end_profile_step < made.start_profile_step:
        raise ConfigError(
            f"autotuning.end_profile_step: must be at least start_profile_step, "
            f"{made.start_profile_step}, got {made.end_profile_step}; raise it"
        )
    return made
