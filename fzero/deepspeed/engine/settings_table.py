"""The tables of DeepSpeed's engine methods that read its configuration, and of those
that fzero answers with a constant.

`Settings` has a method for every row. `GIVEN` reads the configuration as the script
wrote it; a key that is left out or "auto" has DeepSpeed's default. `READ` and `PLACES`
are for values that the engine has. `CONSTANT` is for features that fzero does not have: they are off,
or for what is always so. `REFUSED` is for methods that change how DeepSpeed trains,
which have no counterpart here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_ZERO, _OFFLOAD, _FP16, _BF16 = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "fp16",
    "bf16",
)

GIVEN: dict[str, tuple[str, Any]] = {
    "aio_config": ("aio", None),
    "autotuning_enabled": ("autotuning.enabled", False),
    "autotuning_end_profile_step": ("autotuning.end_profile_step", 5),
    "autotuning_metric": ("autotuning.metric", "throughput"),
    "autotuning_start_profile_step": ("autotuning.start_profile_step", 3),
    "bf16_master_weights_and_gradients": (f"{_BF16}.bf16_master_weights_and_grads", False),
    "bf16_optimizer_states": (f"{_BF16}.bf16_optimizer_states", False),
    "elasticity_enabled": ("elasticity.enabled", False),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "fp16_auto_cast": (f"{_FP16}.auto_cast", False),
    "fp16_master_weights_and_gradients": (f"{_FP16}.fp16_master_weights_and_grads", False),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "is_sanity_checks_enabled": (f"{_ZERO}.enable_sanity_checks", False),
    "log_level": ("log_level", None),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "optimizer_params": ("optimizer.params", None),
    "scheduler_params": ("scheduler.params", None),
    "sparse_gradients_enabled": ("sparse_gradients", False),
    "super_offload": (f"{_OFFLOAD}.super_offload", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "zero_allgather_partitions": (f"{_ZERO}.allgather_partitions", True),
    "zero_allgather_sequential": (f"{_ZERO}.allgather_sequential", False),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_contiguous_gradients": (f"{_ZERO}.contiguous_gradients", True),
    "zero_elastic_checkpoint": (f"{_ZERO}.elastic_checkpoint", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "zero_hpz_partition_size": (f"{_ZERO}.zero_hpz_partition_size", 1),
    "zero_ignore_unused_parameters": (f"{_ZERO}.ignore_unused_parameters", True),
    "zero_legacy_stage1": (f"{_ZERO}.legacy_stage1", False),
    "zero_load_from_fp32_weights": (f"{_ZERO}.load_from_fp32_weights", True),
    "zero_log_trace_cache_warnings": (f"{_ZERO}.log_trace_cache_warnings", False),
    "zero_max_live_parameters": (f"{_ZERO}.stage3_max_live_parameters", 1_000_000_000),
    "zero_max_reuse_distance": (f"{_ZERO}.stage3_max_reuse_distance", 1_000_000_000),
    "zero_model_persistence_threshold": (f"{_ZERO}.stage3_model_persistence_threshold", 2**63 - 1),
    "zero_module_granularity_threshold": (f"{_ZERO}.stage3_module_granularity_threshold", 0),
    "zero_multi_rank_bucket_allreduce": (f"{_ZERO}.use_multi_rank_bucket_allreduce", True),
    "zero_param_persistence_threshold": (f"{_ZERO}.stage3_param_persistence_threshold", 100_000),
    "zero_partial_offload": (f"{_OFFLOAD}.ratio", 1.0),
    "zero_prefetch_bucket_size": (f"{_ZERO}.stage3_prefetch_bucket_size", 50_000_000),
    "zero_quantized_gradients": (f"{_ZERO}.zero_quantized_gradients", False),
    "zero_quantized_nontrainable_weights": (f"{_ZERO}.zero_quantized_nontrainable_weights", False),
    "zero_quantized_weights": (f"{_ZERO}.zero_quantized_weights", False),
    "zero_reduce_scatter": (f"{_ZERO}.reduce_scatter", True),
    "zero_round_robin_gradients": (f"{_ZERO}.round_robin_gradients", False),
    "zero_save_muon_momentum_buffer_in_memory": (
        f"{_ZERO}.save_muon_momentum_buffer_in_memory",
        False,
    ),
    "zero_sub_group_size": (f"{_ZERO}.sub_group_size", 1_000_000_000),
    "zeropp_loco_param": (f"{_ZERO}.zeropp_loco_param", None),
    "mics_shard_size": (f"{_ZERO}.mics_shard_size", -1),
}
"""Method: the key of the configuration, and DeepSpeed's default."""


def _device_of(block: Any) -> str | None:
    return getattr(block, "device", None)


def _path_of(name: str, config: Any) -> str:
    default = Path.cwd() / f"autotuning_{name}.json"
    return str(look_up(config, f"autotuning.{name}_path", default))


def _dump(block: Any) -> dict[str, Any]:
    return dict(block.model_dump())


READ: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    **{
        f"autotuning_{name}_path": ("config", partial(_path_of, name))
        for name in ("metric", "model_info")
    },
    "bfloat16_enabled": ("cfg.bf16.enabled", bool),
    "cpuadam_cores_perc": (
        "_config.zero_config.offload_optimizer",
        lambda block: getattr(block, "cpuadam_cores_perc", 0.9),
    ),
    "dataloader_drop_last": ("keys.dataloader_drop_last", bool),
    "dump_state": ("keys.dump_state", bool),
    "dynamic_loss_scale": ("train_step.runtime.rules.scaling.dynamic", bool),
    "flops_profiler_detailed": ("keys.flops_profiler.detailed", bool),
    "flops_profiler_enabled": ("keys.flops_profiler.enabled", bool),
    "flops_profiler_module_depth": ("keys.flops_profiler.module_depth", int),
    "flops_profiler_output_file": ("keys.flops_profiler.output_file", None),
    "flops_profiler_profile_step": ("keys.flops_profiler.profile_step", int),
    "flops_profiler_top_modules": ("keys.flops_profiler.top_modules", int),
    "fp16_enabled": ("cfg.fp16.enabled", bool),
    "get_data_parallel_rank": ("train_step.data_rank", int),
    "gradient_clipping": ("cfg.gradient_clipping", float),
    "managed_gradient_accumulation": ("keys.managed_gradient_accumulation", bool),
    "memory_breakdown": ("keys.memory_breakdown", bool),
    "steps_per_print": ("keys.steps_per_print", None),
    "torch_autocast_dtype": ("train_step.runtime.autocast", None),
    "wall_clock_breakdown": ("keys.wall_clock_breakdown", bool),
    "zero_allgather_bucket_size": ("cfg.zero_optimization.allgather_bucket_size", None),
    "zero_offload_optimizer": ("cfg.zero_optimization.offload_optimizer", None),
    "zero_offload_param": ("cfg.zero_optimization.offload_param", None),
    "zero_optimization": ("train_step.plan.row.number", bool),
    "zero_optimization_stage": ("train_step.plan.row.number", int),
    "zero_reduce_bucket_size": ("cfg.zero_optimization.reduce_bucket_size", None),
    "checkpoint_tag_validation_enabled": (
        "keys.checkpoint.tag_validation",
        lambda reaction: reaction != "IGNORE",
    ),
    "checkpoint_tag_validation_fail": (
        "keys.checkpoint.tag_validation",
        lambda reaction: reaction == "FAIL",
    ),
    "curriculum_enabled_legacy": (
        "data_schedules.curriculum_scheduler_legacy",
        lambda scheduler: scheduler is not None,
    ),
    "curriculum_learning_enabled": ("data_schedules.efficiency.samples_by_difficulty", bool),
    "data_efficiency_config": ("data_schedules.efficiency", _dump),
    "data_efficiency_enabled": ("data_schedules.efficiency.enabled", bool),
    "data_sampling_config": ("data_schedules.efficiency.data_sampling", _dump),
    "data_sampling_enabled": ("cfg.samples", bool),
    "pld_enabled": ("cfg.drops_layers", bool),
    "pld_gamma": ("data_schedules.layer_drop.gamma", None),
    "pld_theta": ("data_schedules.layer_drop.theta", None),
    "postscale_gradients": ("cfg.prescale_gradients", lambda before: not before),
    "random_ltd_enabled": ("cfg.drops_tokens", bool),
    "scheduler_name": ("cfg.scheduler", lambda block: getattr(block, "type", None)),
    "zero_nvme_offload_optimizer": (
        "cfg.zero_optimization.offload_optimizer",
        lambda block: _device_of(block) == "nvme",
    ),
    "zero_optimization_partition_gradients": (
        "train_step.plan.row",
        lambda row: row.shards("grads"),
    ),
    "zero_optimization_partition_weights": (
        "train_step.plan.row",
        lambda row: row.shards("params"),
    ),
    **dict.fromkeys(
        ("zero_cpu_offload", "zero_use_cpu_optimizer"),
        (
            "cfg.zero_optimization.offload_optimizer",
            lambda block: _device_of(block) in ("cpu", "nvme"),
        ),
    ),
}
"""Method: the attribute of the engine that it returns, such as a key of its
configuration, and the function that makes the method's result of it.
"""

PLACES: dict[str, str] = {
    "cfg": "train_step.spec.cfg",
    "device": "train_step.device",
    "dp_world_size": "train_step.runtime.batches.world_size",
    "global_rank": "train_step.rank",
    "sequence_parallel_size": "train_step.plan.seq_size",
    "world_size": "train_step.world_size",
}
"""Attribute: the place in the engine of its value."""

CONSTANT: dict[str, Any] = {
    "amp_enabled": False,
    "amp_params": False,
    "autotp_size": 0,
    "autotuning_profile_model_info": False,
    "checkpoint_serialization_enabled": True,
    "checkpoint_writer_enabled": False,
    "compile_autosp": False,
    "compile_autotp": False,
    "compile_zero_optimization_stage": False,
    "eigenvalue_enabled": False,
    "eigenvalue_gas_boundary_resolution": 1,
    "eigenvalue_layer_name": "bert.encoder.layer",
    "eigenvalue_layer_num": 0,
    "eigenvalue_max_iter": 100,
    "eigenvalue_stability": 1e-6,
    "eigenvalue_tol": 1e-2,
    "eigenvalue_verbose": False,
    "get_model_parallel_rank": 0,
    "get_sequence_parallel_group": None,
    "get_tensor_parallel_rank": 0,
    "graph_harvesting": False,
    "is_deepcompile_active": False,
    "is_deepcompile_enabled": False,
    "is_elastic_model_parallel_supported": None,
    "load_universal_checkpoint": False,
    "quantize_training": (False, False, 1, False, 0.001, "symmetric", "nearest", False, False),
    "tensor_parallel_config": None,
    "use_node_local_storage": False,
    "uses_parallelization_pass_only": False,
    "zenflow_config": None,
    "zero_gather_16bit_weights_on_model_save": True,
}
"""Method: what it returns."""

ATTRIBUTES: dict[str, Any] = {
    "block_eigenvalue": None,
    "compression_scheduler": None,
    "eigenvalue": None,
    "enable_backward_allreduce": True,
    "has_moe_layers": False,
    "has_sequence_parallel_params": False,
    "mesh_device": None,
    "mp_world_size": 1,
    "num_experts": (),
    "pipeline_parallelism": False,
    "quantizer": None,
    "seq_parallel_group": None,
    "use_ds_comm": False,
}
"""Attribute: its value."""

_BY_BACKWARD = "engine.backward(loss) reduces gradients, on all ranks together"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "all_gather_scalar",
            "allreduce_and_copy",
            "allreduce_bucket",
            "allreduce_no_retain",
            "buffered_allreduce_fallback",
            "coalesce_grad_reduction",
            "sparse_all_gather",
            "sparse_allreduce",
            "sparse_allreduce_bucket",
            "sparse_allreduce_no_retain",
        ),
        _BY_BACKWARD,
    ),
    "clip_fp32_gradients": "engine.step() clips them; set the key gradient_clipping",
    **dict.fromkeys(
        (
            "get_autosp_backend",
            "get_autotp_backend",
            "get_deepcompile_backend",
            "get_deepspeed_compile_backend",
            "register_compile_pass",
        ),
        "engine.compile() compiles the repeated blocks",
    ),
    "get_optimizer_configuration": (
        "engine.optimizer_name() and engine.optimizer_params() return it"
    ),
    "load_moe_state_dict": "it has no mixtures of experts",
    "print_forward_breakdown": "the key wall_clock_breakdown prints a table after each update",
}
"""Method: the end of the sentence `engine.<method>: fzero has none: …`."""


def look_up(config: Any, key: str, default: Any) -> Any:
    """The value of a dotted key; the default where it is missing or "auto".

    >>> look_up(
    ...     {"zero_optimization": {"stage": 3, "overlap_comm": "auto"}},
    ...     "zero_optimization.stage",
    ...     0,
    ... )
    3
    >>> look_up(
    ...     {"zero_optimization": {"overlap_comm": "auto"}}, "zero_optimization.overlap_comm", False
    ... )
    False
    """
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return default if config is None or config == "auto" else config
