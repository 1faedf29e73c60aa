"""Valid keys that have no effect beside the others, or contradict them.

A rule is a list of names (`*` stands for any text) and a function from the values of
the whole configuration, by dotted name, to the reason why those keys have no effect
there, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from fzero.config.deepspeed_keys import SPELLINGS
from fzero.config.unused_keys import Note

Values = Mapping[str, Any]
Rule = tuple[str, Callable[[Values], str | None]]

_ZERO, _CHECKPOINTING = "zero_optimization", "activation_checkpointing"
_STAGE = f"{_ZERO}.stage"

_OF_FILES = ("nvme_path", "buffer_count", "checksums", "leftover")

_SCALE = (
    "fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis "
    "fp16.consecutive_hysteresis fp16.min_loss_scale"
)


def values(block: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Every key of a block and of the blocks in it: (dotted name, value, whether it was
    given).
    """
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
    return (
        None
        if rate in (None, v.get("optimizer.params.lr"))
        else f"{name} sets the rate: its {key} is {rate}"
    )


def _warmup(v: Values) -> str | None:
    total = v.get("scheduler.params.total_num_steps")
    is_longer = total is not None and v.get("scheduler.params.warmup_num_steps", 0) > total
    return (
        f"the warmup does not end within total_num_steps, which is {total}" if is_longer else None
    )


def _overridden(v: Values, own: str) -> str | None:
    master = v["data_types.master_dtype"]
    return None if master in (None, own) else f"data_types.master_dtype is {master}"


def _is_set_below(stage: int, key: str) -> Callable[[Values], Any]:
    return lambda v: v[_STAGE] < stage and v[f"{_ZERO}.{key}"]


def _offloads(v: Values, *parts: str, to: tuple[str, ...] = ("cpu", "nvme")) -> bool:
    return any(v.get(f"{_ZERO}.offload_{part}.device") in to for part in parts)


def _when(names: str, holds: Callable[[Values], Any], reason: str) -> Rule:
    """The rule that these keys have no effect where `holds` does; `reason` may name a
    value, as `str.format` does.
    """
    return names, lambda v: reason.format(v) if holds(v) else None


_FOR_STAGE_3 = f"it is for stage 3, and the stage is {{0[{_STAGE}]}}"
_NO_FILES = "no state is in files, unless make_train_step(placements=...) says so"

RULES: tuple[Rule, ...] = (
    _when(f"{_ZERO}.stage3_*", lambda v: v[_STAGE] < 3, _FOR_STAGE_3),
    *(
        _when(f"{_ZERO}.{key}", _is_set_below(3, key), _FOR_STAGE_3)
        for key in (
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
        )
    ),
    _when(
        f"{_ZERO}.zeropp_loco_param.*",
        lambda v: not v[f"{_ZERO}.zero_quantized_gradients"],
        "no gradient is quantized",
    ),
    *(
        _when(f"{_ZERO}.{key}", _is_set_below(1, key), "nothing is divided in stage 0")
        for key in ("mics_shard_size", "round_robin_gradients")
    ),
    _when(
        f"{_ZERO}.allgather_bucket_size",
        lambda v: not v[_STAGE],
        "every rank updates all parameters in stage 0, and gathers none",
    ),
    _when(
        " ".join(f"{_ZERO}.offload_optimizer.{key}" for key in (*_OF_FILES, "pipeline_*")),
        lambda v: not _offloads(v, "optimizer", to=("nvme",)),
        _NO_FILES,
    ),
    _when(
        " ".join(
            f"{_ZERO}.offload_param.{key}" for key in (*_OF_FILES, "buffer_size", "max_in_cpu")
        ),
        lambda v: not _offloads(v, "param", to=("nvme",)),
        "no parameter is in files, unless make_train_step(placements=...) says so",
    ),
    _when("aio.*", lambda v: not _offloads(v, "optimizer", "param", to=("nvme",)), _NO_FILES),
    _when(
        f"{_ZERO}.sub_group_size",
        lambda v: not _offloads(v, "optimizer", "param"),
        "no state lives off the device, unless make_train_step(placements=...) says so",
    ),
    _when(
        f"fp16.loss_scale {_SCALE}", lambda v: not _scales_loss(v), "no loss is scaled: fp16 is off"
    ),
    _when(
        _SCALE,
        lambda v: v["fp16.loss_scale"],
        "the scale is fixed: loss_scale is {0[fp16.loss_scale]}",
    ),
    _when(
        "fp16.auto_cast fp16.fp16_master_weights_and_grads",
        lambda v: not v["fp16.enabled"],
        "fp16 is off",
    ),
    _when(
        "bf16.auto_cast bf16.check_grad_overflow bf16.bf16_* bf16.stochastic_rounding "
        "b*16.immediate_grad_update",
        lambda v: not v["bf16.enabled"],
        "bf16 is off",
    ),
    _when(
        "torch_autocast.dtype torch_autocast.lower_precision_safe_modules",
        lambda v: not v["torch_autocast.enabled"],
        "torch_autocast is off",
    ),
    _when(
        "gradient_predivide_factor",
        lambda v: v["prescale_gradients"],
        "prescale_gradients divides by all ranks beforehand",
    ),
    _when(
        "prescale_gradients",
        lambda v: v["gradient_allreduce_op"] != "mean",
        "a sum is not divided by the ranks",
    ),
    (
        "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bf16.stochastic_rounding",
        lambda v: _overridden(v, "bfloat16"),
    ),
    ("fp16.fp16_master_weights_and_grads", lambda v: _overridden(v, "float16")),
    _when(
        "data_types.param_dtype",
        lambda v: v["data_types.param_dtype"] == "float16" and not v["fp16.enabled"],
        "no loss is scaled: only fp16.enabled does that",
    ),
    _when(
        f"{_CHECKPOINTING}.cpu_checkpointing",
        lambda v: v[f"{_CHECKPOINTING}.cpu_checkpointing"] and v[f"{_CHECKPOINTING}.every"] is None,
        "nothing is checkpointed, unless make_train_step(checkpoint=...) says so",
    ),
    _when("elasticity.[!e]*", lambda v: not v["elasticity.enabled"], "elasticity is off"),
    _when(
        "elasticity.num_gpus_per_node",
        lambda v: v["elasticity.version"] == 0.1,
        "nodes count in version 0.2",
    ),
    _when(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
        lambda v: v["elasticity.enabled"],
        "elasticity sets the batch sizes",
    ),
    ("optimizer.params.lr", _rate_of_scheduler),
    _when(
        "optimizer.params.adam_w_mode",
        lambda v: v.get("optimizer.type") == "AdamW" and not v["optimizer.params.adam_w_mode"],
        "AdamW always decouples the weight decay; Adam has the mode",
    ),
    ("scheduler.params.warmup_num_steps", _warmup),
)
"""For each key the first rule that applies gives the reason."""


def conflicts(cfg: BaseModel, accepted: tuple[Note, ...] = ()) -> tuple[Note, ...]:
    """The given keys that have no effect beside the others, each with the reason.

    Args:
        accepted: notes of the keys that were read and are not in `cfg`. Keys accepted
            or not honoured yet are checked, too.
    """
    rows = list(values(cfg))
    now = {name: value for name, value, _ in rows}
    given = {name: value for name, value, is_given in rows if is_given}
    given |= {
        SPELLINGS.get(note.key, note.key): note.value
        for note in accepted
        if note.kind in ("accepted", "not yet")
    }
    found = []
    for name, value in given.items():
        reasons = (
            reason_of(now)
            for names, reason_of in RULES
            if any(fnmatchcase(name, p) for p in names.split())
        )
        if reason := next(filter(None, reasons), None):
            found.append(Note(name, value, "conflict", reason))
    return tuple(found)
