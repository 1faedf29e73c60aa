"""Valid keys that have no effect beside the others, or contradict them.

A rule is a list of names (`*` stands for any text) and a function from the values of the whole configuration, by dotted
name, to the reason why those keys have no effect there, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from fzero.config.deepspeed_keys import SPELLINGS
from fzero.config.unused_keys import Note

Values = Mapping[str, Any]

_ZERO = "zero_optimization"
_STAGE = "zero_optimization.stage"

_OF_FILES = ("nvme_path", "buffer_count", "checksums", "leftover")

_SCALE = (
    "fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale"
)


def values(block: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Every key of a block and of the blocks in it: (dotted name, value, whether it was given)."""
    for key in type(block).model_fields:
        value = getattr(block, key)
        if isinstance(value, BaseModel):
            yield from values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, key in block.model_fields_set


def _scales_loss(v: Values) -> bool:
    is_autocast = v["torch_autocast.enabled"] and v["torch_autocast.dtype"] == "float16"
    return bool(v["fp16.enabled"] or is_autocast)


def _rate_of_scheduler(v: Values) -> str | None:
    """The reason where a schedule sets a rate that differs from the optimizer's."""
    name = v.get("scheduler.type")
    key = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr",
           "LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(name or "")  # fmt: skip
    rate = v.get(f"scheduler.params.{key}")
    return None if rate in (None, v.get("optimizer.params.lr")) else f"{name} sets the rate: its {key} is {rate}"


def _warmup(v: Values) -> str | None:
    total = v.get("scheduler.params.total_num_steps")
    is_longer = total is not None and v.get("scheduler.params.warmup_num_steps", 0) > total
    return f"the warmup does not end within total_num_steps, which is {total}" if is_longer else None


def _overridden(v: Values, own: str) -> str | None:
    master = v["data_types.master_dtype"]
    return None if master in (None, own) else f"data_types.master_dtype is {master}"


def _unless(condition: Callable[[Values], Any], reason: str) -> Callable[[Values], str | None]:
    return lambda v: None if condition(v) else reason


RULES: tuple[tuple[str, Callable[[Values], str | None]], ...] = (
    (
        "zero_optimization.stage3_*",
        lambda v: f"it is for stage 3, and the stage is {v[_STAGE]}" if v[_STAGE] < 3 else None,
    ),
    *(
        (
            f"{_ZERO}.{key}",
            lambda v, key=key: (
                f"it is for stage 3, and the stage is {v[_STAGE]}" if v[_STAGE] < 3 and v[f"{_ZERO}.{key}"] else None
            ),
        )
        for key in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights")
    ),
    (
        "zero_optimization.zeropp_loco_param.*",
        _unless(lambda v: v[f"{_ZERO}.zero_quantized_gradients"], "no gradient is quantized"),
    ),
    (
        "zero_optimization.mics_shard_size",
        _unless(lambda v: v[_STAGE] or not v["zero_optimization.mics_shard_size"], "nothing is divided in stage 0"),
    ),
    (
        "zero_optimization.allgather_bucket_size",
        _unless(lambda v: v[_STAGE], "every rank updates all parameters in stage 0, and gathers none"),
    ),
    (
        "zero_optimization.round_robin_gradients",
        _unless(
            lambda v: v[_STAGE] or not v["zero_optimization.round_robin_gradients"], "nothing is divided in stage 0"
        ),
    ),
    (
        " ".join(f"{_ZERO}.offload_optimizer.{key}" for key in (*_OF_FILES, "pipeline_*")),
        _unless(
            lambda v: v.get("zero_optimization.offload_optimizer.device") == "nvme",
            "no state is in files, unless make_train_step(placements=...) says so",
        ),
    ),
    (
        " ".join(f"{_ZERO}.offload_param.{key}" for key in (*_OF_FILES, "buffer_size", "max_in_cpu")),
        _unless(
            lambda v: v.get("zero_optimization.offload_param.device") == "nvme",
            "no parameter is in files, unless make_train_step(placements=...) says so",
        ),
    ),
    (
        "aio.*",
        _unless(
            lambda v: "nvme" in (v.get(f"{_ZERO}.offload_{part}.device") for part in ("optimizer", "param")),
            "no state is in files, unless make_train_step(placements=...) says so",
        ),
    ),
    (
        "zero_optimization.sub_group_size",
        _unless(
            lambda v: any(v.get(f"{_ZERO}.offload_{part}.device") for part in ("optimizer", "param")),
            "no state lives off the device, unless make_train_step(placements=...) says so",
        ),
    ),
    (f"fp16.loss_scale {_SCALE}", _unless(_scales_loss, "no loss is scaled: fp16 is off")),
    (_SCALE, lambda v: f"the scale is fixed: loss_scale is {v['fp16.loss_scale']}" if v["fp16.loss_scale"] else None),
    ("fp16.auto_cast fp16.fp16_master_weights_and_grads", _unless(lambda v: v["fp16.enabled"], "fp16 is off")),
    (
        "bf16.auto_cast bf16.check_grad_overflow bf16.bf16_* bf16.stochastic_rounding b*16.immediate_grad_update",
        _unless(lambda v: v["bf16.enabled"], "bf16 is off"),
    ),
    (
        "torch_autocast.dtype torch_autocast.lower_precision_safe_modules",
        _unless(lambda v: v["torch_autocast.enabled"], "torch_autocast is off"),
    ),
    (
        "gradient_predivide_factor",
        _unless(lambda v: not v["prescale_gradients"], "prescale_gradients divides by all ranks beforehand"),
    ),
    (
        "prescale_gradients",
        _unless(lambda v: v["gradient_allreduce_op"] == "mean", "a sum is not divided by the ranks"),
    ),
    (
        "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bf16.stochastic_rounding",
        lambda v: _overridden(v, "bfloat16"),
    ),
    ("fp16.fp16_master_weights_and_grads", lambda v: _overridden(v, "float16")),
    (
        "data_types.param_dtype",
        lambda v: (
            "no loss is scaled: only fp16.enabled does that"
            if v["data_types.param_dtype"] == "float16" and not v["fp16.enabled"]
            else None
        ),
    ),
    (
        "activation_checkpointing.cpu_checkpointing",
        lambda v: (
            "nothing is checkpointed, unless make_train_step(checkpoint=...) says so"
            if v["activation_checkpointing.cpu_checkpointing"] and v["activation_checkpointing.every"] is None
            else None
        ),
    ),
    ("elasticity.[!e]*", _unless(lambda v: v["elasticity.enabled"], "elasticity is off")),
    (
        "elasticity.num_gpus_per_node",
        lambda v: "nodes count in version 0.2" if v["elasticity.version"] == 0.1 else None,
    ),
    (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
        _unless(lambda v: not v["elasticity.enabled"], "elasticity sets the batch sizes"),
    ),
    ("optimizer.params.lr", _rate_of_scheduler),
    ("scheduler.params.warmup_num_steps", _warmup),
)
"""For each key the first rule that applies gives the reason."""


def conflicts(cfg: BaseModel, accepted: tuple[Note, ...] = ()) -> tuple[Note, ...]:
    """The given keys that have no effect beside the others, each with the reason.

    Args:
        cfg: the configuration.
        accepted: notes of the keys that were read and are not in `cfg`. Keys accepted or not honoured yet are checked, too.
    """
    rows = list(values(cfg))
    now = {name: value for name, value, _ in rows}
    given = {name: value for name, value, is_given in rows if is_given}
    given |= {
        SPELLINGS.get(note.key, note.key): note.value for note in accepted if note.kind in ("accepted", "not yet")
    }
    found = []
    for name, value in given.items():
        reasons = (reason_of(now) for names, reason_of in RULES if any(fnmatchcase(name, p) for p in names.split()))
        if reason := next(filter(None, reasons), None):
            found.append(Note(name, value, "conflict", reason))
    return tuple(found)
