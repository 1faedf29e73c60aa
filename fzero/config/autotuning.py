"""How does `fzero tune` search? DeepSpeed's block `autotuning`, which changes nothing about a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from fzero.config.fields import Block, Count, number, said
from fzero.config.files import ConfigError
from fzero.config.unused_keys import unknown_key


def _only_one(value: int) -> int:
    if value != 1:
        raise ValueError("must be 1, for there is no model parallelism")
    return value


class Autotuning(Block):
    """DeepSpeed key `autotuning`: how `fzero tune` searches."""

    enabled: bool = False
    """DeepSpeed's switch. Here the command decides, and a run uses the values of the other keys in any case."""
    fast: bool = True
    """Whether stage, micro-batch and checkpointing alone are tried; false tries a small `reduce_bucket_size`, too."""
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    """What is to be best: samples per second, seconds per step, or the model's floating point operations per second."""
    start_profile_step: Count = 3
    """The first step that is timed, counted from 1."""
    end_profile_step: Count = 5
    """The last one. The job is ended after it."""
    tuner_type: Literal["model_based", "random", "gridsearch"] = "model_based"
    """Which configurations are measured: those that promise the most given what was planned and measured, any, or one after the
    other."""
    tuner_early_stopping: Annotated[int, BeforeValidator(number), Field(ge=0)] = 5
    """The search is over when so many in a row were no better than the best; 0 is never."""
    tuner_num_trials: Count | None = None
    """Most configurations that are measured. None is 50, and a third of them all (at least 5) for `model_based`."""
    num_tuning_micro_batch_sizes: Count = 3
    """How many micro-batch sizes are tried: the given one and its nearest, doubled and halved; with `train_batch_size` its
    divisors, so that the batch stays as it is."""
    min_train_micro_batch_size_per_gpu: Count = 1
    """The smallest micro-batch that is tried."""
    max_train_micro_batch_size_per_gpu: Count = 1024
    """The largest one."""
    min_train_batch_size: Count | None = None
    """The smallest batch of a step that is tried."""
    max_train_batch_size: Count | None = None
    """The largest one."""
    mp_size: Annotated[Count, AfterValidator(_only_one)] = 1
    """Ranks of model parallelism: 1."""
    results_dir: str = "autotuning_results"
    """The folder of what was measured, the picture and `best.json`."""
    exps_dir: str = "autotuning_exps"
    """The folder of each configuration that was measured, and of what its run wrote."""
    overwrite: bool = False
    """Whether everything is measured again. False goes on with what is in `results_dir`; in DeepSpeed the default is true."""
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    """Arguments of the script that must say the same as the configuration, such as
    `{"train_micro_batch_size_per_gpu": "--batch-size"}`."""


ABOUT_MODELS = ("model_info", "model_info_path", "metric_path")
"""Keys of DeepSpeed with nothing to do: the script's own model is planned, and results are in `results_dir`."""


def autotuning(keys: Mapping[str, Any]) -> Autotuning:
    """The block of a configuration as in a file.

    Raises:
        ConfigError: one line for every field that is wrong.

    >>> autotuning({"autotuning": {"tuner_type": "random"}}).tuner_type
    'random'
    >>> autotuning({"autotuning": {"fats": True}})
    Traceback (most recent call last):
    fzero.config.files.ConfigError: autotuning.fats: unknown key; did you mean 'fast'?
    """
    block = keys.get("autotuning") or {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"autotuning: must be an object, got {block!r}; remove it, or give one")
    try:
        made = Autotuning.model_validate({key: value for key, value in block.items() if key not in ABOUT_MODELS})
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error))) from None
    if made.end_profile_step < made.start_profile_step:
        raise ConfigError(
            f"autotuning.end_profile_step: must be at least start_profile_step, {made.start_profile_step}, got "
            f"{made.end_profile_step}; raise it"
        )
    return made


def _lines(error: ValidationError) -> list[str]:
    lines = []
    for detail in error.errors():
        name = "autotuning." + ".".join(map(str, detail["loc"]))
        if detail["type"] == "extra_forbidden":
            lines.append(unknown_key(name, tuple(Autotuning.model_fields)))
        else:
            lines.append(f"{name}: {said(detail)}, got {detail['input']!r}; mend or remove it")
    return lines
