"""`EngineKeys`: the configuration keys of the engine alone, for printing, files and
data; a step does not read them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationError, field_validator

from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.config.fields import (
    PER_RANK,
    Block,
    Count,
    Elements,
    FolderOrFile,
    Number,
    number,
    problems_of,
)
from fzero.config.files import read as read_file
from fzero.config.unknown_keys import without_unknown
from fzero.deepspeed.engine.sequences import without_keys


class Monitor(Block):
    """DeepSpeed keys `csv_monitor` and `tensorboard`: files for loss, learning rate and
    loss scale of each step.
    """

    enabled: bool = False
    output_path: FolderOrFile = ""
    """A folder; if empty, `csv_monitor`, or `runs` for tensorboard."""
    job_name: str = "DeepSpeedJobName"
    """The sub-folder of `output_path`."""


class WandbKeys(Block):
    """DeepSpeed key `wandb`: the same numbers in a run of Weights & Biases; needs the
    package wandb.
    """

    enabled: bool = False
    group: str | None = None
    """The group of runs."""
    team: str | None = None
    """The team or user who owns the run; null is wandb's default."""
    project: str = "deepspeed"


class CometKeys(Block):
    """DeepSpeed key `comet`: the same numbers in an experiment of Comet; needs the
    package comet_ml.

    Null is Comet's own setting: from its environment variables, or its file
    .comet.config.
    """

    enabled: bool = False
    samples_log_interval: Elements = 100
    """The number of samples after which an event is logged again."""
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: Literal["get", "create", "get_or_create"] | None = None


class FlopsProfilerKeys(Block):
    """DeepSpeed key `flops_profiler`: one step of rank 0, module by module
    (`fzero.profiling.Profile`).
    """

    enabled: bool = False
    recompute_fwd_factor: Number = 0.0
    """Must be 0: forwards that run again in a backward are counted as they run."""
    profile_step: Elements = 1
    """The number of updates before the profiled step."""
    module_depth: Annotated[int, BeforeValidator(number)] = -1
    """The depth of the deepest modules shown; -1 shows all."""
    top_modules: Count = 1
    """The number of largest classes named at each depth."""
    detailed: bool = True
    """Whether the tree of modules is shown."""
    output_file: FolderOrFile | None = None
    """The file of the profile; None prints it."""


class CommsLoggerKeys(Block):
    """DeepSpeed key `comms_logger`: logs collectives;
    `fzero.deepspeed.comm.log_summary()` prints the totals.
    """

    enabled: bool = False
    verbose: bool = False
    """Rank 0 prints every collective when it starts."""
    prof_all: bool = True
    """Whether all collectives are logged; False logs those of `prof_ops`."""
    debug: bool = False
    """Whether rows also name the purpose of each collective."""
    prof_ops: tuple[str, ...] = ()
    """Names of collectives, fzero's or those of torch.distributed."""

    @property
    def only(self) -> frozenset[str]:
        """The names of the collectives to log; empty is all."""
        named = {_OPERATIONS.get(name, name) for name in self.prof_ops}
        return frozenset() if self.prof_all else frozenset(named or {"none"})

    @field_validator("prof_ops")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = {*_OPERATIONS, *_OPERATIONS.values()}
        for name in names:
            if name not in known:
                raise ValueError(
                    f"must name collectives ({', '.join(sorted(known))}), and {name!r} is none"
                )
        return names


_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "stack",
    "swap",
    "reduce_scatter",
    "all_to_all",
)
_OPERATIONS = dict(zip(_COLLECTIVES, _COLLECTIVES)) | {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Collectives of fzero by their names and those of torch.distributed."""


_UPPER = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
_NULL_IS_NEVER = BeforeValidator(lambda value: None if value in (0, float("inf"), "inf") else value)


class CheckpointKeys(Block):
    """The parts of DeepSpeed's key `checkpoint` that the engine honours."""

    tag_validation: Annotated[Literal["IGNORE", "WARN", "FAIL"], _UPPER] = "WARN"
    """The reaction to ranks that save under different tags."""
    load_universal: bool = False
    """Whether `load_checkpoint` takes the checkpoint that `latest_universal` names.
    Every checkpoint of fzero is universal.
    """


class PipelineKeys(Block):
    """DeepSpeed key `pipeline`: for the engine of a `PipelineModule`. The other keys of
    the module are its arguments.
    """

    stages: int | Literal["auto"] = "auto"
    """The number of stages; "auto" is that of the module."""
    partition: str = "best"
    """No effect, as in DeepSpeed: the module's `partition_method` counts."""
    seed_layers: bool = False
    """No effect, as in DeepSpeed: fzero builds each layer under a seed of its own."""
    activation_checkpoint_interval: Elements = 0
    """So many layers are run again together in the backward; 0 is the module's own
    number.
    """
    pipe_partitioned: bool = True
    """No effect: there is no model axis."""
    grad_partitioned: bool = True
    """No effect: there is no model axis."""
    use_reentrant: bool = True
    """No effect: fzero's checkpoints need no reentrant autograd."""


class HybridEngineKeys(Block):
    """DeepSpeed key `hybrid_engine`: generation between updates (`engine.generate`)."""

    enabled: bool = False
    """Whether `engine.module.generate` is `engine.generate`, too, and `engine.eval()`
    prints where the time went.
    """
    max_out_tokens: Count = 512
    """The largest number of tokens of prompt and answer."""
    inference_tp_size: Count = 1
    """Must be 1: nothing is tensor-parallel here."""
    release_inference_cache: bool = False
    """Has no effect: no memory is kept after `generate`."""
    pin_parameters: bool = True
    """Whether stage 3 gathers all parameters once for a call; if not, each unit in each
    forward.
    """
    tp_gather_partition_size: Count = 8
    """Has no effect: nothing is tensor-parallel here."""
    enable_cuda_graph: bool = False
    """Has no effect; a warning if true."""

    @field_validator("inference_tp_size")
    @classmethod
    def _is_one(cls, size: int) -> int:
        if size != 1:
            raise ValueError(
                f"must be 1, got {size}: no rank is tensor-parallel here, and each generates for "
                f"its own prompts"
            )
        return size

    @field_validator("enable_cuda_graph")
    @classmethod
    def _warns(cls, given: bool) -> bool:
        if given:
            warnings.warn(
                "hybrid_engine.enable_cuda_graph: has no effect here; leave it out",
                ConfigWarning,
                stacklevel=2,
            )
        return given


class EngineKeys(Block):
    """The keys that `fzero.initialize` honours besides those of a step."""

    steps_per_print: Annotated[Count | None, _NULL_IS_NEVER, PER_RANK] = None
    """Rank 0 prints step, skipped steps, learning rate and momentum every
    `steps_per_print` steps.
    """
    wall_clock_breakdown: Annotated[bool | None, PER_RANK] = False
    """Rank 0 prints after each step the duration of its parts, and the waits for
    collectives in them.
    """
    memory_breakdown: Annotated[bool | None, PER_RANK] = False
    """Rank 0 prints the plan, with the bytes of model state, when the engine is made,
    and memory after each part of a step.
    """
    dump_state: Annotated[bool | None, PER_RANK] = False
    """Rank 0 prints the configuration and the plan when the engine is made."""
    dataloader_drop_last: bool | None = False
    """Whether the loader of `training_data` drops samples that do not fill a batch on
    every rank.
    """
    managed_gradient_accumulation: bool | None = True
    """Whether the engine counts micro-steps, and updates at the end of an accumulation.
    False: every `step()` updates.
    """
    csv_monitor: Annotated[Monitor, PER_RANK] = Monitor()
    tensorboard: Annotated[Monitor, PER_RANK] = Monitor()
    wandb: Annotated[WandbKeys, PER_RANK] = WandbKeys()
    comet: Annotated[CometKeys, PER_RANK] = CometKeys()
    checkpoint: CheckpointKeys = CheckpointKeys()
    flops_profiler: Annotated[FlopsProfilerKeys, PER_RANK] = FlopsProfilerKeys()
    comms_logger: Annotated[CommsLoggerKeys, PER_RANK] = CommsLoggerKeys()
    hybrid_engine: HybridEngineKeys = HybridEngineKeys()
    pipeline: PipelineKeys = PipelineKeys()


def read(source: Mapping[str, Any] | str | Path | Config) -> tuple[Config, EngineKeys]:
    """The configuration of the step, and that of the engine.

    Unknown keys that DeepSpeed ignores, such as those of the top level, are ignored
    with a warning, which names the nearest key.

    Raises:
        ConfigError: one line per invalid field.
    """
    if isinstance(source, str | Path):
        source = read_file(source)
    if isinstance(source, Mapping):
        source, _ = without_keys(source)
        source, lines = without_unknown(_without_param_offload(source))
        for line in lines:
            warnings.warn(f"{line} (ignored, as in DeepSpeed)", ConfigWarning, stacklevel=3)
    own = "|".join(EngineKeys.model_fields)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"({own}):", category=ConfigWarning)
        cfg = Config.load(source)
    given = {note.key: note.value for note in cfg.notes if note.key in EngineKeys.model_fields}
    if isinstance(given.get("checkpoint"), Mapping):
        given["checkpoint"] = _known(given["checkpoint"])
    try:
        keys = EngineKeys.model_validate(
            {key: value for key, value in given.items() if value is not None}
        )
    except ValidationError as error:
        raise ConfigError("\n".join(problems_of(error))) from None
    if keys.flops_profiler.enabled and (factor := keys.flops_profiler.recompute_fwd_factor):
        text = (
            f"flops_profiler.recompute_fwd_factor: must be 0, got {factor:g}, which is ignored: "
            f"forwards that run again in a backward are counted as they run; leave it out"
        )
        warnings.warn(text, ConfigWarning, stacklevel=3)
    return cfg, keys


def _without_param_offload(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration without `offload_param` below stage 3, which DeepSpeed ignores
    there; a warning says so.
    """
    zero = source.get("zero_optimization")
    if not isinstance(zero, Mapping) or not isinstance(zero.get("offload_param"), Mapping):
        return source
    if str(zero.get("stage", 0)) not in ("0", "1", "2") or zero["offload_param"].get(
        "device", "none"
    ) in (
        "none",
        "auto",
    ):
        return source
    warnings.warn(
        f"zero_optimization.offload_param: has no effect in stage {zero.get('stage', 0)}, as in "
        f"DeepSpeed, because only stage 3 divides parameters; set the stage to 3, or leave it out",
        ConfigWarning,
        stacklevel=4,
    )
    return {
        **source,
        "zero_optimization": {key: value for key, value in zero.items() if key != "offload_param"},
    }


_CHECKPOINT_OFF = {"use_node_local_storage": False}
"""Keys of `checkpoint` that ask for other files, with the values that do not."""
_CHECKPOINT_WRITERS = {
    "checkpoint_serialization": True,
    "writer": None,
    "parallel_write": {"pipeline_stage": False},
}
"""Keys of `checkpoint` that choose how files are written, with DeepSpeed's defaults."""


def _known(block: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the block `checkpoint` that the engine honours.

    Raises for others that ask for other files, and warns of those that would write them
    faster.
    """
    for key, value in block.items():
        if key in _CHECKPOINT_OFF and value not in (_CHECKPOINT_OFF[key], None):
            raise ConfigError(
                f"checkpoint.{key}: must be {_CHECKPOINT_OFF[key]!r}, got {value!r}: checkpoints "
                f"are fzero's, which load on any number of ranks; remove it (`fzero "
                f"import-deepspeed` reads DeepSpeed's)"
            )
        if key in _CHECKPOINT_WRITERS and value not in (_CHECKPOINT_WRITERS[key], None):
            text = (
                f"checkpoint.{key}: has no effect: fzero writes checkpoints itself, a file "
                f"per rank at once; leave it out"
            )
            warnings.warn(text, ConfigWarning, stacklevel=4)
    return {
        key: value
        for key, value in block.items()
        if key in CheckpointKeys.model_fields and value is not None
    }
