"""DeepSpeed's configuration keys that have no effect here or are not honoured yet, as
tables.

The names are those of DeepSpeed 0.19, dotted from the top level. `fzero.config.config`
has the keys that fzero honours.

- ACCEPTED keys have nothing to do here; the table has the reasons, and TYPES the types
  of their values.
- HARMLESS keys are not honoured yet, and training is correct without them: a warning.
- REFUSED keys are not honoured yet, and training would lack something: an error, with
  the fix.

INNER has the keys of those that are blocks, so that a misspelt key is found there, too.
"""

from __future__ import annotations

from typing import Any

ACCEPTED = {
    "steps_per_print": (
        "for the engine (fzero.initialize); a step prints nothing, and returns its metrics"
    ),
    "wall_clock_breakdown": (
        "for the engine (fzero.initialize); a step prints nothing; use fzero.profiling.save_trace"
    ),
    "memory_breakdown": (
        "for the engine (fzero.initialize); print(step.plan) shows the bytes of model state"
    ),
    "dump_state": "for the engine (fzero.initialize); print the configuration and step.plan",
    "autotuning": (
        "for `fzero tune` and `fzero run --autotuning`; a run uses the values that the other "
        "keys have"
    ),
    "timers": "fzero prints nothing by itself; use torch.profiler",
    "log_level": "fzero prints nothing by itself",
    "dataloader_drop_last": "for the engine (fzero.initialize); a step has no data loader",
    "managed_gradient_accumulation": (
        "for the engine (fzero.initialize); a step updates once for each batch"
    ),
    "vocabulary_size": "DeepSpeed only warns when it is not a multiple of 8",
    "disable_allgather": "DeepSpeed reads it and does nothing with it",
    "seq_parallel_communication_data_type": (
        "there is no sequence parallelism, and asking for it is an error"
    ),
    "use_data_before_expert_parallelism": (
        "there is no expert parallelism, and asking for it is an error"
    ),
    "data_efficiency.data_sampling.curriculum_learning.data_cluster_path": (
        "the sampler is a function, and writes no files"
    ),
    "data_efficiency.data_routing.random_ltd.model_type": (
        "rows and columns of kept tokens are taken from every mask"
    ),
    "aio.thread_count": "DeepSpeed reads intra_op_parallelism instead",
    "aio.single_submit": "a call to the system moves one block",
    "aio.overlap_events": "blocks always move beside each other",
    "zero_allow_untested_optimizer": (
        "it allows nothing more: every optimizer that is taken works in every stage"
    ),
    "zero_force_ds_cpu_optimizer": "there is one kind of optimizer",
    "zero_optimization.contiguous_gradients": "gradients are always written into flat buffers",
    "zero_optimization.reduce_scatter": "stages 1 to 3 always reduce-scatter",
    "zero_optimization.use_multi_rank_bucket_allreduce": "stages 1 to 3 always reduce-scatter",
    "zero_optimization.compute_grad_norm": (
        "the norm of the gradients is part of every step's metrics"
    ),
    "zero_optimization.parameter_alignment": (
        "PyTorch's operators take parameters at any address, with the same numbers"
    ),
    "zero_optimization.allgather_partitions": "updated shards are always all-gathered",
    "zero_optimization.allgather_size": "DeepSpeed reads allgather_bucket_size instead",
    "zero_optimization.overlap_comm": "collectives always run beside the compute",
    "zero_optimization.load_from_fp32_weights": (
        "a state keeps its master; a new one is made from the weights given"
    ),
    "zero_optimization.elastic_checkpoint": "the layout does not depend on it",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "step.gather gives the weights whenever you ask"
    ),
    "zero_optimization.stage3_module_granularity_threshold": (
        "units are found by their repetition; name them in units="
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (
        "gathers are made of the fastest sends of the backend"
    ),
    "zero_optimization.stage3_allgather_sequential": "gathers follow step.schedule",
    "zero_optimization.leaf_module": "units are found by their repetition; name them in units=",
    "zero_optimization.mics_hierarchical_params_gather": (
        "a rank sends its shard to each rank that needs it, in one go"
    ),
    "zero_optimization.memory_efficient_linear": (
        "a linear layer saves a reference to its gathered unit, not the weights"
    ),
    "zero_optimization.override_module_apply": "fzero leaves modules as they are",
    "zero_optimization.pipeline_loading_checkpoint": "init takes one unit at a time in any case",
    "zero_optimization.log_trace_cache_warnings": (
        "another order of units is an error that names the unit"
    ),
    "zero_optimization.enable_sanity_checks": "the checks are always on",
    "zero_optimization.save_muon_momentum_buffer_in_memory": (
        "Muon's momentum is part of the state, where that is placed"
    ),
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeed ignores it too",
    "zero_optimization.offload_optimizer.fast_init": (
        "init writes the state sub-group by sub-group in any case"
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": (
        "it is for super_offload, whose place the ordinary offload takes"
    ),
    "bf16.immediate_grad_update": "gradients are reduced as soon as a unit has them",
    "bfloat16.immediate_grad_update": "gradients are reduced as soon as a unit has them",
    "activation_checkpointing.synchronize_checkpoint_boundary": (
        "nothing has to wait for the device there"
    ),
    "activation_checkpointing.profile": "fzero prints nothing by itself; use torch.profiler",
    "activation_checkpointing.number_checkpoints": (
        "it sizes contiguous buffers, which do not exist here"
    ),
    "compression_training.weight_quantization.shared_parameters.quantizer_kernel": (
        "PyTorch's operators have the same numbers"
    ),
    (
        "compression_training.weight_quantization.shared_parameters.quantize_verbose"
    ): "fzero prints nothing; print the plan",
    "elasticity.min_time": (
        "it is for a scheduler of jobs; DeepSpeed reads it and does nothing with it"
    ),
    "optimizer.legacy_fusion": "there is one kind of optimizer",
    "optimizer.params.torch_adam": "every Adam here has torch's numbers",
    "optimizer.params.fused": "the update is always PyTorch's fused kernel where it has one",
    "optimizer.params.foreach": "the update is one kernel on a flat buffer",
    "optimizer.params.set_grad_none": "gradients are collected anew in each step",
}
"""Keys with nothing to do here, each with the reason."""

TYPES = {
    "true, false or null": """wall_clock_breakdown memory_breakdown dump_state dataloader_drop_last managed_gradient_accumulation
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather use_data_before_expert_parallelism
        zero_optimization.overlap_comm zero_optimization.cpu_offload_use_pin_memory optimizer.legacy_fusion""",
    "true or false": """activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile
        bf16.immediate_grad_update bfloat16.immediate_grad_update
        compression_training.weight_quantization.shared_parameters.quantizer_kernel
        compression_training.weight_quantization.shared_parameters.quantize_verbose
        zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
        zero_optimization.compute_grad_norm zero_optimization.parameter_alignment
        zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.allgather_partitions
        zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint
        zero_optimization.stage3_gather_16bit_weights_on_model_save
        zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.stage3_allgather_sequential
        zero_optimization.mics_hierarchical_params_gather
        zero_optimization.memory_efficient_linear zero_optimization.override_module_apply
        zero_optimization.pipeline_loading_checkpoint zero_optimization.log_trace_cache_warnings
        zero_optimization.enable_sanity_checks zero_optimization.save_muon_momentum_buffer_in_memory
        zero_optimization.offload_optimizer.fast_init aio.single_submit aio.overlap_events
        optimizer.params.torch_adam optimizer.params.set_grad_none""",
    "a whole number": """zero_optimization.allgather_size aio.thread_count
        zero_optimization.stage3_module_granularity_threshold""",
    "a whole number or null": "vocabulary_size activation_checkpointing.number_checkpoints",
    "a number or null": "steps_per_print",
    "a text or null": "log_level seq_parallel_communication_data_type",
    "an object": "timers zero_optimization.leaf_module",
}
"""Accepted keys by the required type of their value; the values of all others are not
checked.
"""

_ENGINE_WRITES = (
    "for the engine (fzero.initialize); a step returns its metrics, which fzero.log writes"
)

HARMLESS = {
    "sparse_gradients": "gradients of embeddings are sent in full",
    "checkpoint": (
        "for the engine (fzero.initialize), which validates tags; a step saves nothing by itself"
    ),
    **dict.fromkeys(
        ("nebula", "datastates", "datastates_ckpt"),
        "fzero saves nothing by itself; a state is a pytree of tensors",
    ),
    "flops_profiler": (
        "for the engine (fzero.initialize); for a step call fzero.profiling.profile(model, batch)"
    ),
    "comms_logger": "for the engine (fzero.initialize); for a step comms_table(trace_comm(step, state, "
    "batch).rows) "
    "of fzero.profiling",
    **dict.fromkeys(("tensorboard", "csv_monitor", "wandb", "comet"), _ENGINE_WRITES),
    "pipeline": "for a PipelineModule, whose engine reads activation_checkpoint_interval",
    "hybrid_engine": (
        "for the engine (fzero.initialize); with a step use fzero.generating(step, state)"
    ),
    "eigenvalue": "DeepSpeed does not read the block either: its eigenvalues belong to "
    "quantize_training, where it has "
    "switched them off; the quantization_period of compression_training counts as given",
    "compile": (
        "the step runs in eager mode, with the same numbers; make_train_step(compile=...) compiles"
    ),
    "graph_harvesting": "the step runs in eager mode",
    "comms_config": "DeepSpeed ignores it, too; its block is comms_logger",
    "monitor_config": (
        "DeepSpeed ignores it, too; its blocks are tensorboard, csv_monitor, wandb and comet"
    ),
    "disable_python_gc": (
        "Python's collector of cycles stays as it is; call gc.disable() in the script, and "
        "gc.collect() where a pause does no harm"
    ),
    "zero_optimization.stage3_model_persistence_threshold": (
        "only stage3_param_persistence_threshold decides"
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        "the offload is the ordinary one, with the same numbers"
    ),
    (
        "activation_checkpointing.partition_activations"
    ): "no rank is model-parallel, so that nothing is divided; "
    "cpu_checkpointing keeps the inputs in host memory",
    "activation_checkpointing.contiguous_memory_optimization": (
        "it is for partition_activations, which divides nothing here"
    ),
}
"""Keys that fzero does not honour yet and whose absence changes no number, each with
the replacement.
"""

_REMOVE = "remove it to run without"

REFUSED = {
    "amp": "use bf16, fp16 or torch_autocast",
    **dict.fromkeys(("weight_quantization", "quantize_training"), _REMOVE),
    **dict.fromkeys(("tensor_parallel", "expert_parallel"), _REMOVE),
    **dict.fromkeys(
        ("sequence_parallel_size", "data_parallel_size"),
        "deepspeed.initialize takes it; for a step pass mesh=Mesh.of(data=…, seq=…) and "
        "transforms=[fzero.sequence.ulysses('seq')]",
    ),
    "zero_optimization.cpu_offload": (
        "it must be true, which is offload_optimizer with device 'cpu', or false"
    ),
    "aio.use_gds": "files are read and written through host memory; remove it",
    "zero_optimization.cpu_offload_param": (
        "it must be true, which is offload_param with device 'cpu', or false"
    ),
    "zero_optimization.cpu_offload_params": (
        "it must be true, which is offload_param with device 'cpu', or false"
    ),
    "zero_optimization.zenflow": "it updates most gradients late, which changes the results; remove it for the "
    "ordinary "
    "offload, offload_optimizer with device 'cpu'",
    "zero_optimization.legacy_stage1": "DeepSpeed refuses it too; remove it",
    "optimizer.params.max_grad_norm": "DeepSpeed refuses it too; use gradient_clipping",
    **dict.fromkeys(
        ("optimizer.params.amsgrad", "optimizer.params.maximize", "optimizer.params.capturable"),
        _REMOVE,
    ),
    **dict.fromkeys(
        ("optimizer.params.differentiable", "optimizer.params.decoupled_weight_decay"), _REMOVE
    ),
    "optimizer.params.freeze_step": _REMOVE,
}
"""Keys that fzero does not honour yet and that would change training, each with the
fix.
"""

NOT_YET = HARMLESS | REFUSED

OFF: dict[str, Any] = {
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": (0, 1),
    "zero_optimization.stage3_model_persistence_threshold": 2**63 - 1,
    "checkpoint.tag_validation": "WARN",
    "checkpoint.checkpoint_serialization": True,
    "pipeline.partition": "best",
    "pipeline.pipe_partitioned": True,
    "pipeline.grad_partitioned": True,
}
"""Values (of a tuple: each) that switch off a key that is not honoured yet, besides
null, false and "auto".
"""

SWITCHES: dict[str, tuple[str, Any]] = {
    "zero_optimization.zenflow": ("topk_ratio", 0.1),
    "compile": ("deepcompile", False),
    "tensor_parallel": ("autotp_size", 0),
    "weight_quantization": ("enabled", True),
}
"""The key that switches a block off, and its default. For other blocks it is `enabled`
with the default false; a block without that key is off when all its keys are."""

INNER = {
    "amp": "enabled *",
    "autotuning": """enabled fast metric metric_path start_profile_step end_profile_step tuner_type
        tuner_early_stopping tuner_num_trials mp_size num_tuning_micro_batch_sizes max_train_batch_size
        min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu results_dir exps_dir
        overwrite arg_mappings.* model_info.* model_info_path""",
    "checkpoint": """tag_validation load_universal use_node_local_storage parallel_write.pipeline_stage
        checkpoint_serialization writer.type writer.io_buffer_size writer.io_buffer_double writer.show_statistics
        writer.data_parallel writer.decoupled writer.io_multiplier""",
    "comet": """enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode""",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "compile": """deepcompile free_activation free_activation_threshold offload_activation
        offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters
        sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors
        keep_all_input_tensors passes autoep_non_moe enabled
        disable backend kwargs""",
    "csv_monitor": "enabled output_path job_name",
    "datastates": "*",
    "datastates_ckpt": "*",
    "eigenvalue": """enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num""",
    "expert_parallel": """enabled autoep_size expert_tensor_parallel_size validate_folding_routing preset_model
        moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm route_scale
        score_apply combine_impl num_expert_groups num_limited_groups score_func top_k load_balance_coeff
        routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts
        shared_experts_pattern shared_experts_gate_pattern
        async_split_plan row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin
        comm_max_tokens_per_rank expert_activation""",
    "flops_profiler": """enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file""",
    "hybrid_engine": """enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters
        tp_gather_partition_size enable_cuda_graph""",
    "nebula": """enabled enable_nebula_load nebula_load_path persistent_storage_path persistent_time_interval
        num_of_version_in_retention""",
    "pipeline": """stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned
        use_reentrant""",
    "quantize_training": "enabled *",
    "tensor_parallel": """autotp_size preset_model partition_config.* tp_overlap_comm tp.* tensor_parallel.* dtype
        injection_policy_tuple keep_module_on_host replace_with_kernel_inject kernel_inject vocab_parallel_lm_head
        vocab_parallel_ce_backend""",
    "tensorboard": "enabled output_path job_name",
    "timers": "throughput.enabled throughput.synchronized",
    "wandb": "enabled group team project",
    "weight_quantization": (
        "enabled num_bits q_type q_groups quantized_initialization.* post_init_quant.*"
    ),
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.zenflow": """topk_ratio select_strategy select_interval update_interval overlap_step offload
        auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch""",
}
"""The keys of blocks; `*` is any key, and any key inside it."""

_STAGE_3 = "zero_optimization.stage3_"

SPELLINGS = {
    **{
        name.replace("stage3_", ""): name
        for name in (*ACCEPTED, *NOT_YET)
        if name.startswith(_STAGE_3)
    },
    f"{_STAGE_3}gather_fp16_weights_on_model_save": f"{_STAGE_3}gather_16bit_weights_on_model_save",
}
"""Other names of keys; the value of both is the same."""

INSTEAD = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param",
}
"""Older keys, and the block that replaces each."""

KNOWN = frozenset(
    {*ACCEPTED, *NOT_YET, *SPELLINGS}
    | {f"{block}.{key}" for block, keys in INNER.items() for key in keys.split()}
)
"""Every key of DeepSpeed that fzero does not honour."""
