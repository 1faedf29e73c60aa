"""The modules of DeepSpeed's tree that only name what fzero defines elsewhere: one row
for each, in place of a file.

`fzero.deepspeed.exports` makes the modules when they are imported, and
`fzero.deepspeed.stubs` writes stubs of them for type checkers and editors. Without
imports, so that the build can read it.
"""

from collections.abc import Mapping

EXPORTS: Mapping[str, Mapping[str, str]] = {
    "accelerator.abstract_accelerator": {"accelerator.real_accelerator": "DeepSpeedAccelerator"},
    "comm.reduce_op": {"comm.comm": "ReduceOp"},
    "ops.adagrad": {"engine.deepspeed_optimizers": "DeepSpeedCPUAdagrad", "": "cpu_adagrad"},
    "ops.adagrad.cpu_adagrad": {"engine.deepspeed_optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {
        "engine.deepspeed_optimizers": "DeepSpeedCPUAdam FusedAdam",
        "": "cpu_adam fused_adam",
    },
    "ops.adam.cpu_adam": {"engine.deepspeed_optimizers": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {"engine.deepspeed_optimizers": "FusedAdam"},
    "ops.lion": {
        "engine.deepspeed_optimizers": "DeepSpeedCPULion FusedLion",
        "": "cpu_lion fused_lion",
    },
    "ops.lion.cpu_lion": {"engine.deepspeed_optimizers": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {"engine.deepspeed_optimizers": "FusedLion"},
    "ops.sparse_attention.bert_sparse_self_attention": {
        "ops.sparse_attention.sparse_attention_utils": "BertSparseSelfAttention",
    },
    "pipe": {
        "runtime.pipe.module": "PipelineModule",
        ".pipeline.layers": "LayerSpec TiedLayerSpec",
    },
    "runtime.base_optimizer": {
        "engine.optimizer": "WrappingOptimizer:DeepSpeedOptimizer ZeroOptimizer:ZeROOptimizer"
    },
    "runtime.checkpoint_engine": {"engine.own_files": "CheckpointCommitInfo TorchCheckpointEngine"},
    "runtime.data_pipeline.curriculum_scheduler": {"engine.data_schedulers": "CurriculumScheduler"},
    "runtime.data_pipeline.data_routing.scheduler": {
        "engine.data_schedulers": "RandomLTDScheduler"
    },
    "runtime.dataloader": {
        "engine.dataloader": "RepeatingLoader ResumableLoader:DeepSpeedDataLoader"
    },
    "runtime.hybrid_engine": {"engine.engine": "Engine:DeepSpeedHybridEngine"},
    "runtime.keep_in_fp32": {
        "engine.fp32_buffers": (
            "KEEP_IN_FP32_AUTO buffers_to_keep_in_fp32 keep_buffers_in_fp32 keep_in_fp32_pattern"
        ),
    },
    "runtime.pipe.engine": {
        "engine.pipeline_engine": "PipelineEngine",
        ".pipeline.module": "PipelineError",
    },
    "runtime.pipe.topology": {
        "topology": (
            "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid "
            "ProcessTopology"
        ),
    },
    "runtime.progressive_layer_drop": {"engine.data_schedulers": "ProgressiveLayerDrop"},
    "runtime.zero.parameter_offload": {"engine.optimizer": "ParameterOffload:DeepSpeedZeRoOffload"},
    "runtime.zero.stage_1_and_2": {
        "engine.optimizer": "ZeroOptimizer12:DeepSpeedZeroOptimizer",
        "estimators": "estimate_zero2_model_states_mem_needs "
        "estimate_zero2_model_states_mem_needs_all_cold "
        "estimate_zero2_model_states_mem_needs_all_live model_to_params",
    },
}
"""By module of DeepSpeed: its names, by the module that defines them; `there:here`
where they have another name there.

Modules are relative to fzero.deepspeed; one with a dot before it is of fzero. Under the
key "" stand names of submodules."""

MODULES = (
    "accelerator",
    "checkpoint",
    "checkpointing",
    "comm",
    "dist",
    "elasticity",
    "git_version_info",
    "launcher",
    "moe",
    "ops",
    "pipe",
    "profiling",
    "runtime",
    "utils",
    "zero",
)
"""The modules that `import deepspeed` gives at once."""

PACKAGE: Mapping[str, str] = {
    "accelerator": "get_accelerator",
    "alias": "install",
    "comm": "init_distributed",
    "engine.dataloader": "ResumableLoader:DeepSpeedDataLoader",
    "engine.engine": "Engine:DeepSpeedEngine",
    "engine.initialize": "initialize",
    "engine.optimizer": "ConfiguredScheduler WrappingOptimizer:DeepSpeedOptimizer",
    "formats.export": "export_deepspeed",
    "formats.load": "convert_deepspeed import_deepspeed",
    "runtime.config": "ADAM_OPTIMIZER DeepSpeedConfig DeepSpeedConfigError LAMB_OPTIMIZER",
    "runtime.engine": "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
    "runtime.lr_schedules": "add_tuning_arguments",
    "runtime.pipe.module": "PipelineModule",
    "utils": "OnDevice log_dist logger",
    "": "accelerator checkpoint runtime.activation_checkpointing.checkpointing:checkpointing "
    "comm comm:dist elasticity "
    "git_version_info launcher moe ops pipe profiling runtime utils runtime.zero:zero",
}
"""The names of the package itself."""


def is_package(name: str) -> bool:
    """Whether a module of the table has others below it."""
    return any(other.startswith(f"{name}.") for other in EXPORTS)
