"""Which of DeepSpeed's configuration keys change nothing here, and which are not honoured yet?

Names of DeepSpeed 0.19. What fzero honours stands in `fzero.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

ACCEPTED = {
    "steps_per_print": "fzero prints nothing by itself; a step returns its metrics",
    "wall_clock_breakdown": "fzero prints nothing by itself; use torch.profiler",
    "memory_breakdown": "fzero prints nothing by itself; print(step.plan) tells the bytes of model state",
    "dump_state": "fzero prints nothing by itself; print the configuration and step.plan",
    "dataloader_drop_last": "fzero makes no data loader",
    "zero_allow_untested_optimizer": "it allows nothing more: every optimizer that is taken works in every stage",
    "zero_force_ds_cpu_optimizer": "there is one kind of optimizer",
    "prescale_gradients": "gradients are divided before they are added up in any case",
    "gradient_predivide_factor": "the mean is the same; gradients are divided by all ranks before they are added up",
    "zero_optimization.contiguous_gradients": "gradients are always written into flat buffers",
    "zero_optimization.reduce_scatter": "stages 1 to 3 always reduce-scatter",
    "zero_optimization.use_multi_rank_bucket_allreduce": "stages 1 to 3 always reduce-scatter",
    "zero_optimization.allgather_partitions": "updated shards are always joined by all-gathers",
    "zero_optimization.allgather_bucket_size": "updated shards are joined unit by unit",
    "zero_optimization.allgather_size": "updated shards are joined unit by unit",
    "zero_optimization.overlap_comm": "collectives always run beside the compute",
    "zero_optimization.sub_group_size": "the update goes unit by unit",
    "zero_optimization.load_from_fp32_weights": "parameters are their own master copy",
    "zero_optimization.elastic_checkpoint": "the layout does not depend on it",
    "zero_optimization.stage3_max_reuse_distance": "a unit is released after use and gathered again at the next",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "step.gather gives the weights whenever you ask",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "step.gather gives the weights whenever you ask",
    "zero_optimization.stage3_module_granularity_threshold": "units are found by their repetition; name them in units=",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "gathers are made of the fastest sends of the backend",
    "zero_optimization.stage3_allgather_sequential": "gathers follow step.schedule",
    "zero_optimization.memory_efficient_linear": "what a linear layer saves of a gathered unit is a recipe in any case",
    "zero_optimization.override_module_apply": "fzero leaves modules as they are",
    "zero_optimization.pipeline_loading_checkpoint": "init takes one unit at a time in any case",
    "zero_optimization.log_trace_cache_warnings": "another order of units is an error that names the unit",
    "zero_optimization.enable_sanity_checks": "the checks are always on",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon's momentum is part of the state, where that is placed",
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeed ignores it too",
    "optimizer.legacy_fusion": "there is one kind of optimizer",
    "optimizer.params.torch_adam": "every Adam here has torch's numbers",
    "optimizer.params.fused": "the update is always PyTorch's fused kernel where it has one",
    "optimizer.params.foreach": "the update is one kernel on a flat buffer",
    "optimizer.params.set_grad_none": "gradients are collected anew in each step",
}
"""Keys with nothing to do here, each with the reason."""

OFF: dict[str, Any] = {
    "managed_gradient_accumulation": True,
    "amsgrad": False,
    "bias_correction": True,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
    "ignore_unused_parameters": True,
    "sequence_parallel_size": 1,
}
"""Values that switch off a key that is not honoured yet; else None, False, and a block whose `enabled` or `device` says so."""

NOT_YET = frozenset(
    """
    managed_gradient_accumulation sparse_gradients communication_data_type
    seq_parallel_communication_data_type disable_allgather data_types fp16 bf16 bfloat16 amp torch_autocast
    checkpoint activation_checkpointing flops_profiler aio pipeline
    hybrid_engine tensorboard csv_monitor wandb comet comms_logger autotuning elasticity progressive_layer_drop
    eigenvalue curriculum_learning data_efficiency compression_training sparse_attention compile tensor_parallel
    expert_parallel use_data_before_expert_parallelism sequence_parallel_size data_parallel_size nebula
    datastates graph_harvesting vocabulary_size weight_quantization timers log_level
    offload_param offload_optimizer zenflow cpu_offload cpu_offload_param cpu_offload_params
    stage3_model_persistence_threshold ignore_unused_parameters legacy_stage1
    zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
    zeropp_loco_param mics_shard_size mics_hierarchical_params_gather leaf_module amsgrad maximize capturable
    differentiable decoupled_weight_decay bias_correction freeze_step
    """.split()  # noqa: SIM905 - a list of names reads better so
)
"""DeepSpeed keys that fzero knows and does not honour yet."""


class Note(NamedTuple):
    """A key that was read and changes nothing."""

    key: str
    value: Any
    kind: Literal["accepted", "off", "auto"]
    reason: str


def set_aside(
    source: Mapping[str, Any], prefix: str = "", *, honoured: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """Parts the keys that change nothing, each with a `Note`, from those that have to be honoured.

    `honoured` are dotted names that this configuration honours though others do not.

    >>> kept, notes = set_aside({"steps_per_print": 10, "fp16": {"enabled": False}, "gradient_clipping": 0.5})
    >>> kept, [note.key for note in notes]
    ({'gradient_clipping': 0.5}, ['steps_per_print', 'fp16'])
    """
    kept: dict[str, Any] = {}
    notes: list[Note] = []
    for key, value in source.items():
        name = f"{prefix}{key}"
        if name in ACCEPTED:
            notes.append(Note(name, value, "accepted", ACCEPTED[name]))
        elif value == "auto":
            notes.append(Note(name, value, "auto", "left to fzero: the default, or what follows from the other keys"))
            if key not in NOT_YET or name in honoured:
                kept[key] = value  # a block drops it where it has such a key
        elif name in honoured:
            kept[key] = value
        elif key in NOT_YET and _is_off(key, value):
            notes.append(Note(name, value, "off", "it switches off what fzero does not have yet"))
        elif name == "zero_optimization" and isinstance(value, bool):
            kept[name] = {"stage": int(value)}  # before DeepSpeed 0.3: true is stage 1
        elif isinstance(value, Mapping) and key not in NOT_YET:
            kept[key], inner = set_aside(value, f"{name}.", honoured=honoured)
            notes += inner
        else:
            kept[key] = value
    return kept, tuple(notes)


def _is_off(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False or value.get("device") == "none"
    return value is None or (value is False and OFF.get(key) is not True) or (key in OFF and value == OFF[key])
