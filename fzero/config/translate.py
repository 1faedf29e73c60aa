"""`to_fsdp2`, `from_accelerate`, `from_fsdp2`: a configuration in the words of another
library, where there is a translation.

A key without one is named: as a comment of the code that `to_fsdp2` writes, or in the
notes beside a configuration. Where a result would train something else, the translation
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fzero.config.fields import ConfigError
from fzero.config.table import ShownConfig

DTYPES = {"bfloat16": "torch.bfloat16", "float16": "torch.float16", "float32": "torch.float32"}

OPTIMIZERS = {
    "Adam": ("Adam", ("lr", "betas", "eps", "weight_decay")),
    "AdamW": ("AdamW", ("lr", "betas", "eps", "weight_decay")),
    "SGD": ("SGD", ("lr", "momentum", "weight_decay", "nesterov")),
    "Adagrad": ("Adagrad", ("lr", "eps", "weight_decay")),
}
"""The class of torch.optim for each optimizer, and its arguments of the same meaning.
"""

TRANSLATED = (
    "zero_optimization.stage",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.pin_memory",
    "bf16.enabled",
    "data_types.reduce_dtype",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "optimizer.type",
    "activation_checkpointing.every",
)
"""The keys that `to_fsdp2` writes, beside the optimizer's."""

CODE = '''"""FSDP2 for {source}, written by `fzero config --to fsdp2`."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
{notes}

def prepare(model, blocks, device="cuda"):
    """Shards the blocks of a model, then the model; returns its optimizer."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    how = {{
        "mesh": mesh,
        "mp_policy": {policy},
        "offload_policy": {offload},
        "reshard_after_forward": {reshards},
    }}
    for block in blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return torch.optim.{optimizer}(model.parameters(){arguments})


def step(model, optimizer, micro_batches, loss_fn):
    """One update from {num_micro} micro-batch(es); returns their mean loss on this rank."""
    total = 0.0
    for number, batch in enumerate(micro_batches, 1):
        model.set_requires_gradient_sync(number == len(micro_batches))
        loss = loss_fn(model, batch) / len(micro_batches)
        loss.backward()
        total += loss.item()
{clipping}    optimizer.step()
    optimizer.zero_grad()
    return total
'''


def to_fsdp2(shown: ShownConfig, source: str) -> str:
    """A Python file that trains with FSDP2 as a configuration says.

    Raises:
        ConfigError: FSDP2 has no such stage, precision or optimizer.
    """
    cfg, now = shown.cfg, shown.values()
    if cfg.zero_optimization.stage not in (2, 3):
        raise ConfigError(
            f"zero_optimization.stage: FSDP2 has stages 2 and 3, got "
            f"{cfg.zero_optimization.stage}; use DistributedDataParallel (stage 0), with "
            f"ZeroRedundancyOptimizer for stage 1"
        )
    if cfg.scales_loss or cfg.precision.autocast:
        raise ConfigError(
            "fp16, torch_autocast: FSDP2 itself neither scales a loss nor casts operators; use bf16"
        )
    optimizer = str(now["optimizer.type"])
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer.type: must be one of {', '.join(OPTIMIZERS)} for FSDP2, got {optimizer!r}; "
            f"change it"
        )
    name, arguments = OPTIMIZERS[optimizer]
    if optimizer == "Adam" and now.get("optimizer.params.adam_w_mode"):
        name = "AdamW"  # as DeepSpeed reads it
    given = {key: now.get(f"optimizer.params.{key}") for key in arguments}
    known = {*TRANSLATED, *(f"optimizer.params.{key}" for key in arguments)}
    autos = [key for key in sorted(known) if now.get(key) == "auto"]
    param = cfg.precision.param_dtype or "float32"
    reduce = cfg.precision.reduce_dtype or param
    is_narrow = param != "float32"
    clips = f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {now['gradient_clipping']})\n"
    left = [
        f"# not translated: {key} = {value}"
        for key, value, kind, _ in shown.rows()
        if key not in known and kind in ("given", "conflict", "not yet")
    ]
    if autos:
        left.append(
            f"# left out, because only transformers' Trainer fills in auto: {', '.join(autos)}"
        )
    if every := cfg.activation_checkpointing.every:
        left.append(
            f"# before prepare: wrap each {every}. block by torch's checkpoint_wrapper "
            f"(activation_checkpointing.every)"
        )
    offloads = cfg.zero_optimization.offload_param
    return CODE.format(
        source=source,
        notes="".join(f"\n{line}" for line in left) + ("\n" if left else ""),
        policy=f"MixedPrecisionPolicy(param_dtype={DTYPES[param]}, reduce_dtype={DTYPES[reduce]})"
        if is_narrow
        else "MixedPrecisionPolicy()",
        offload="OffloadPolicy()"
        if offloads is None
        else f"CPUOffloadPolicy(pin_memory={offloads.pin_memory})",
        reshards=cfg.zero_optimization.stage == 3,
        optimizer=name,
        arguments="".join(
            f", {key}={value!r}" for key, value in given.items() if value not in (None, "auto")
        ),
        num_micro=cfg.gradient_accumulation_steps or 1,
        clipping="" if now["gradient_clipping"] in (None, 0, "auto") else clips,
    )


Translated = tuple[dict[str, Any], list[str]]
"""A configuration, and a line for each key that has no translation."""

_STRATEGIES = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0}
_ABOUT_THE_MODULE = (
    "version",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "transformer_cls_names_to_wrap",
    "use_orig_params",
    "sync_module_states",
    "cpu_ram_efficient_loading",
    "state_dict_type",
    "backward_prefetch",
    "forward_prefetch",
    "backward_prefetch_policy",
    "min_num_params",
    "limit_all_gathers",
)
"""Keys of FSDP that fzero needs nothing for: units are found, an order is learned,
`init` fills a model on meta.
"""


def from_fsdp2(block: Mapping[str, Any]) -> Translated:
    """A configuration from an `fsdp_config` of accelerate or transformers, or from all
    arguments of its Trainer.

    The keys may begin with `fsdp_`.

    >>> from_fsdp2(
    ...     {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": True}
    ... )
    ({'zero_optimization': {'stage': 3, 'offload_param': {'device': 'cpu'}, 'offload_optimizer': {'device': 'cpu'}}}, [])
    """
    inner = block.get("fsdp_config") or {}
    found = {
        key.removeprefix("fsdp_"): value
        for key, value in {**block, **inner}.items()
        if key != "fsdp_config"
    }
    words = str(found.pop("fsdp", "")).upper().split()  # "full_shard offload auto_wrap"
    zero: dict[str, Any] = {"stage": 3}
    made: dict[str, Any] = {"zero_optimization": zero}
    reshards, strategy = (
        found.pop("reshard_after_forward", None),
        found.pop("sharding_strategy", None),
    )
    if strategy is None and reshards is None:
        strategy = next((word for word in words if word in (*_STRATEGIES, "HYBRID_SHARD")), None)
    named = strategy if strategy is not None else reshards if isinstance(reshards, str) else None
    if named is not None and str(named).lower() not in ("true", "false"):
        stage = _STRATEGIES.get(str(named).upper())
        if stage is None:
            raise ConfigError(
                f"fsdp_sharding_strategy: must be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, got "
                f"{named!r}; for HYBRID_SHARD write FULL_SHARD, and pass mesh=Mesh.of(node=..., "
                f"data=...) to make_train_step"
            )
        zero["stage"] = stage
    elif str(reshards).lower() == "false":
        zero["stage"] = 2
    if found.pop("offload_params", False) or found.pop("cpu_offload", False) or "OFFLOAD" in words:
        zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    if found.pop("activation_checkpointing", False):
        made["activation_checkpointing"] = {"every": 1}
    return made, [
        f"{key} = {value!r}" for key, value in found.items() if key not in _ABOUT_THE_MODULE
    ]


def from_accelerate(given: Mapping[str, Any]) -> Translated:
    """A configuration from a file of `accelerate config`.

    >>> from_accelerate(
    ...     {
    ...         "distributed_type": "DEEPSPEED",
    ...         "mixed_precision": "bf16",
    ...         "deepspeed_config": {"zero_stage": 2},
    ...     }
    ... )
    ({'zero_optimization': {'stage': 2}, 'bf16': {'enabled': True}}, [])

    Raises:
        ConfigError: the file describes no training that fzero has.
    """
    kind = str(given.get("distributed_type"))  # `accelerate config` always writes it
    if kind == "FSDP":
        made, left = from_fsdp2(given.get("fsdp_config") or {})
    elif kind == "DEEPSPEED":
        made, left = _from_plugin(given.get("deepspeed_config") or {})
    elif kind in ("MULTI_GPU", "MULTI_CPU", "NO"):
        made, left = {"zero_optimization": {"stage": 0}}, []
    else:
        raise ConfigError(
            f"distributed_type: must be FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU or NO, got {kind!r}; "
            f"change it"
        )
    precision = str(given.get("mixed_precision", "no"))
    if precision in ("bf16", "fp16"):
        made[precision] = {"enabled": True}
    elif precision != "no":
        left.append(f"mixed_precision = {precision!r}")
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        if key in given:
            made[key] = given[key]
    return made, left


def _from_plugin(block: Mapping[str, Any]) -> Translated:
    """The block `deepspeed_config` of accelerate."""
    if "deepspeed_config_file" in block:
        raise ConfigError(
            f"deepspeed_config_file: {block['deepspeed_config_file']!r} is a configuration that "
            f"fzero reads; pass that file"
        )
    found = dict(block)
    zero: dict[str, Any] = {"stage": int(found.pop("zero_stage", 2))}
    made: dict[str, Any] = {"zero_optimization": zero}
    for part in ("optimizer", "param"):
        device, path = (
            found.pop(f"offload_{part}_device", "none"),
            found.pop(f"offload_{part}_nvme_path", None),
        )
        if device not in (None, "none"):
            zero[f"offload_{part}"] = {"device": device} | (
                {"nvme_path": path} if device == "nvme" else {}
            )
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        if key in found:
            made[key] = found.pop(key)
    if "zero3_save_16bit_model" in found:
        zero["stage3_gather_16bit_weights_on_model_save"] = found.pop("zero3_save_16bit_model")
    # `init` fills a model on meta, and a state never needs a full copy
    found.pop("zero3_init_flag", None)
    return made, [f"{key} = {value!r}" for key, value in found.items()]
