"""DeepSpeed's own models of the block `zero_optimization`, for scripts that make or
read them; a step reads `fzero.config.zero`.

A field has DeepSpeed's name, alias, default and bounds. `docs/config.md` says what
fzero does with each key.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator


class pp_int(int):
    """An integer whose `repr` has commas, or is a text of its own.

    >>> pp_int(5e8), pp_int(2**63 - 1, "sys.maxsize")
    (500,000,000, sys.maxsize)
    """

    def __new__(cls, val: float, custom_print_str: str | None = None) -> Self:
        return super().__new__(cls, val)

    def __init__(self, val: float, custom_print_str: str | None = None) -> None:
        self.custom_print_str = custom_print_str

    def __repr__(self) -> str:
        return self.custom_print_str or f"{self.real:,}"


class DeepSpeedConfigModel(BaseModel):
    """The base of DeepSpeed's blocks, and of a script's own.

    A field is deprecated where its `json_schema_extra` has `deprecated: True`. Where
    such a field is given, a warning is logged with the `deprecated_msg`, and its value
    moves to the field `new_param` ("a.b" is one of a sub-block), after `new_param_fn`,
    unless `set_new_param` is False.

    >>> class Optimizer(DeepSpeedConfigModel):
    ...     lr: float = 0.1
    ...     rate: str = Field(
    ...         "0",
    ...         json_schema_extra={"deprecated": True, "new_param": "lr", "new_param_fn": float},
    ...     )
    >>> Optimizer(rate="0.5").lr
    0.5
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = (
            data
            if strict
            else {k: value for k, value in data.items() if value != "auto" or k == "replace_method"}
        )
        super().__init__(**given)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if (
                isinstance(extra, Mapping)
                and extra.get("deprecated", False)
                and name in self.model_fields_set
            ):
                self._move(name, extra)

    def _move(self, name: str, how: Mapping[str, Any]) -> None:
        """Moves the value of a deprecated field to the one that replaces it."""
        new, said = how.get("new_param", ""), how.get("deprecated_msg", "")
        text = f"Config parameter {name} is deprecated" + (f" use {new} instead" if new else "")
        logging.getLogger("fzero").warning(text + (f". {said}" if said else ""))
        if not new or not how.get("set_new_param", True):
            return
        value = how.get("new_param_fn", lambda x: x)(getattr(self, name))
        delattr(self, name)
        *outer, last = new.split(".")
        owner: DeepSpeedConfigModel = reduce(getattr, outer, self)
        assert last not in owner.model_fields_set, (
            f"Cannot provide deprecated parameter '{name}' and replacing parameter '{new}' together"
        )
        setattr(owner, last, value)

    @field_serializer("dtype", check_fields=False)
    # pydantic takes it so
    def serialize_torch_dtype(dtype: torch.dtype) -> str:  # type: ignore[misc]
        return str(dtype)


class ZeroStageEnum(int, Enum):
    """The stages by what they shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 - DeepSpeed's name for the last


class OffloadDeviceEnum(str, Enum):  # noqa: UP042 - its str() is DeepSpeed's
    """Where state may be."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """The block `offload_param`."""

    # as DeepSpeed, so that it stays a plain string
    device: OffloadDeviceEnum = "none"  # type: ignore[assignment]
    nvme_path: Path | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(pp_int(1e8), ge=0)
    max_in_cpu: int = Field(pp_int(1e9), ge=0)
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """The block `offload_optimizer`. Its attribute `pipeline` is whether reads or
    writes are pipelined.
    """

    device: OffloadDeviceEnum = "none"  # type: ignore[assignment]
    nvme_path: Path | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def set_pipeline(self) -> Self:
        self.__dict__["pipeline"] = self.pipeline_read or self.pipeline_write
        return self


class ZenFlowConfig(DeepSpeedConfigModel):
    """The block `zenflow`, which fzero can read and does not run."""

    topk_ratio: float = Field(0.1, gt=0.0, lt=1.0)
    select_strategy: str = "auto"
    select_interval: str | int = "auto"
    update_interval: str | int = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: float = Field(0.99, ge=0.0, le=1.0)
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: float = Field(0.5, ge=0.0, le=1.0)
    steps_per_epoch: int | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def validate_fields(self) -> Self:
        if self.select_strategy not in ("auto", "step", "epoch"):
            raise ValueError('select_strategy must be one of "auto", "step", or "epoch"')
        for name in ("select_interval", "update_interval"):
            if isinstance(value := getattr(self, name), str) and value != "auto":
                raise ValueError(f'If {name} is a string, it must be "auto"')
        if isinstance(self.update_interval, int) and self.update_interval < 1:
            raise ValueError("If update_interval is a number, it must be at least 1")
        return self


LEAF_CLASSES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """The block `leaf_module`. A name stands for a list of one; each list holds a name
    once.
    """

    classes: list[str] = Field(default_factory=lambda: [*LEAF_CLASSES])
    names: list[str] = Field(default_factory=list)
    name_suffixes: list[str] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _as_lists(cls, values: Any) -> Any:
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise TypeError("leaf_module configuration must be a mapping of fields to values")
        return {
            k: [x] if isinstance(x, str) and k in cls.model_fields else x for k, x in values.items()
        }

    @model_validator(mode="after")
    def _without_repeats(self) -> Self:
        for name in type(self).model_fields:
            object.__setattr__(self, name, [*dict.fromkeys(getattr(self, name))])
        return self


def _on_cpu(model: type[DeepSpeedConfigModel]) -> Any:
    return lambda given: model(device=OffloadDeviceEnum.cpu) if given else None


def _deprecated(**how: Any) -> dict[str, Any]:
    return {"deprecated": True, **how}


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The block `zero_optimization`."""

    stage: ZeroStageEnum = 0  # type: ignore[assignment]
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(pp_int(5e8), gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(pp_int(5e8), ge=0)
    overlap_comm: bool | None = None
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: ZenFlowConfig | None = None
    sub_group_size: int = Field(pp_int(1e9), ge=0)
    cpu_offload_param: bool | None = Field(
        None,
        json_schema_extra=_deprecated(
            new_param="offload_param", new_param_fn=_on_cpu(DeepSpeedZeroOffloadParamConfig)
        ),
    )
    cpu_offload_use_pin_memory: bool | None = Field(
        None,
        json_schema_extra=_deprecated(
            new_param="offload_param or offload_optimizer", set_new_param=False
        ),
    )
    cpu_offload: bool | None = Field(
        None,
        json_schema_extra=_deprecated(
            new_param="offload_optimizer", new_param_fn=_on_cpu(DeepSpeedZeroOffloadOptimizerConfig)
        ),
    )
    prefetch_bucket_size: int = Field(pp_int(5e7), ge=0, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(
        pp_int(1e5), ge=0, alias="stage3_param_persistence_threshold"
    )
    model_persistence_threshold: int = Field(
        pp_int(sys.maxsize, "sys.maxsize"), ge=0, alias="stage3_model_persistence_threshold"
    )
    max_live_parameters: int = Field(pp_int(1e9), ge=0, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(pp_int(1e9), ge=0, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(
        False, alias="stage3_gather_16bit_weights_on_model_save"
    )
    module_granularity_threshold: int = Field(
        pp_int(0), alias="stage3_module_granularity_threshold"
    )
    use_all_reduce_for_fetch_params: bool = Field(
        False, alias="stage3_use_all_reduce_for_fetch_params"
    )
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool = Field(
        False, json_schema_extra=_deprecated(new_param="gather_16bit_weights_on_model_save")
    )
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: dict[str, Any] | None = None
    mics_shard_size: int = Field(-1, json_schema_extra={"new_param": "mics_shard_size"})
    mics_hierarchical_params_gather: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(
        default_factory=DeepSpeedZeroLeafModuleConfig
    )

    @model_validator(mode="after")
    def overlap_comm_valid(self) -> Self:
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        return self

    @model_validator(mode="after")
    def offload_ratio_check(self) -> Self:
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1:
            assert self.stage == ZeroStageEnum.weights, (
                "Partial offloading only supported for ZeRO Stage 3."
            )
        return self

    @model_validator(mode="after")
    def elastic_checkpoint_deprecated(self) -> Self:
        if self.stage == ZeroStageEnum.weights and self.elastic_checkpoint:
            logging.getLogger("fzero").warning(
                "elastic_checkpoint: has no effect; fzero's checkpoints load on any number of ranks"
            )
        return self


def zero_block(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The block `zero_optimization` of a configuration. The oldest form is a bool:
    stage 1 or none.
    """
    block = param_dict.get("zero_optimization", {})
    if isinstance(block, bool):
        logging.getLogger("fzero").warning(
            'zero_optimization: a bool is an old form; write {"stage": 1} for true, and {"stage": 0} for false'
        )
        block = (
            {"stage": 1, "allgather_bucket_size": param_dict.get("allgather_size", 5e8)}
            if block
            else {"stage": 0}
        )
    return DeepSpeedZeroConfig(**block)
