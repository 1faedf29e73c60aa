"""The modules of DeepSpeed's tree that only name what fzero defines elsewhere: one row
for each, in place of a file; packages whose modules have files are among them.

`fzero.deepspeed.exports` makes the modules when they are imported, and
`fzero.deepspeed.stubs` writes stubs of them for type checkers and editors. Without
imports of fzero, so that the build can read it.
"""

from collections.abc import Mapping
from pathlib import Path

EXPORTS: Mapping[str, Mapping[str, str]] = {
    "accelerator": {
        "accelerator.real_accelerator": (
            "Accelerator DeepSpeedAccelerator get_accelerator "
            "is_current_accelerator_supported set_accelerator"
        ),
    },
    "accelerator.abstract_accelerator": {"accelerator.real_accelerator": "DeepSpeedAccelerator"},
    "checkpoint": {
        "checkpoint.utils": (
            "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank"
        ),
        "": "ds_to_universal utils",
    },
    "comm.reduce_op": {"comm.comm": "ReduceOp"},
    "compression": {
        "compression.compress": "init_compression redundancy_clean",
        "compression.helper": "convert_conv1d_to_linear",
        "compression.scheduler": "compression_scheduler",
        "": "basic_layer compress helper scheduler",
    },
    "launcher": {"": "runner"},
    "moe": {"": "utils"},
    "ops": {
        "git_version_info": "compatible_ops:__compatible_ops__",
        "": "adagrad adam lion sparse_attention",
    },
    "ops.adagrad": {
        "engine.deepspeed_optimizers": "DeepSpeedCPUAdagrad",
        "": "cpu_adagrad",
    },
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
    "ops.sparse_attention": {
        "ops.sparse_attention.sparse_attention_utils": "BertSparseSelfAttention SparseAttentionUtils",
        "ops.sparse_attention.sparse_self_attention": "SparseSelfAttention",
        "ops.sparse_attention.sparsity_config": (
            "BigBirdSparsityConfig BSLongformerSparsityConfig DenseSparsityConfig "
            "FixedSparsityConfig LocalSlidingWindowSparsityConfig SparsityConfig "
            "VariableSparsityConfig"
        ),
    },
    "ops.sparse_attention.bert_sparse_self_attention": {
        "ops.sparse_attention.sparse_attention_utils": "BertSparseSelfAttention"
    },
    "pipe": {
        "runtime.pipe.module": "PipelineModule",
        ".pipeline.layers": "LayerSpec TiedLayerSpec",
    },
    "profiling": {"": "flops_profiler"},
    "profiling.flops_profiler": {
        "profiling.flops_profiler.profiler": (
            "FlopsProfiler bytes_to_string duration_to_string flops_to_string "
            "get_model_profile macs_to_string number_to_string params_to_string"
        ),
    },
    "runtime": {
        "": (
            "activation_checkpointing base_optimizer config config_utils data_pipeline "
            "dataloader engine lr_schedules pipe progressive_layer_drop utils zero"
        ),
    },
    "runtime.activation_checkpointing": {"": "checkpointing"},
    "runtime.base_optimizer": {
        "engine.optimizer": "WrappingOptimizer:DeepSpeedOptimizer ZeroOptimizer:ZeROOptimizer"
    },
    "runtime.checkpoint_engine": {"engine.own_files": "CheckpointCommitInfo TorchCheckpointEngine"},
    "runtime.data_pipeline": {},
    "runtime.data_pipeline.curriculum_scheduler": {"engine.data_schedulers": "CurriculumScheduler"},
    "runtime.data_pipeline.data_routing": {},
    "runtime.data_pipeline.data_routing.scheduler": {
        "engine.data_schedulers": "RandomLTDScheduler"
    },
    "runtime.data_pipeline.data_sampling": {},
    "runtime.dataloader": {
        "engine.dataloader": "RepeatingLoader ResumableLoader:DeepSpeedDataLoader"
    },
    "runtime.hybrid_engine": {"engine.engine": "Engine:DeepSpeedHybridEngine"},
    "runtime.pipe": {
        "runtime.pipe.module": "PipelineModule",
        "topology": "ProcessTopology",
        ".pipeline.layers": "LayerSpec TiedLayerSpec",
        "": "module schedule topology",
    },
    "runtime.pipe.engine": {
        "engine.pipeline_engine": "PipelineEngine",
        ".pipeline.module": "PipelineError",
    },
    "runtime.pipe.topology": {
        "topology": (
            "PipeDataParallelTopology PipeModelDataParallelTopology "
            "PipelineParallelGrid ProcessTopology"
        ),
    },
    "runtime.progressive_layer_drop": {"engine.data_schedulers": "ProgressiveLayerDrop"},
    "runtime.zero": {
        "engine.optimizer": "ParameterOffload:DeepSpeedZeRoOffload",
        "runtime.zero.mics": "MiCS_Init",
        "runtime.zero.partition_parameters": (
            "GatheredParameters Init ZeroParamStatus ZeroParamType "
            "register_external_parameter unregister_external_parameter"
        ),
        "runtime.zero.stage3": "unwrap_model_for_generation",
        "runtime.zero.tiling": "TiledLinear TiledLinearReturnBias",
        "": (
            "config mics offload_config parameter_offload partition_parameters stage3 "
            "stage_1_and_2 tiling utils"
        ),
    },
    "runtime.zero.parameter_offload": {"engine.optimizer": "ParameterOffload:DeepSpeedZeRoOffload"},
    "runtime.zero.stage_1_and_2": {
        "engine.optimizer": "ZeroOptimizer12:DeepSpeedZeroOptimizer",
        "estimators": (
            "estimate_zero2_model_states_mem_needs "
            "estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live model_to_params"
        ),
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


def folder_of(name: str) -> Path | None:
    """The folder with the files of a module's submodules; None if it has none."""
    folder = Path(__file__).parent.joinpath(*name.split("."))
    return folder if any(folder.glob("*.py")) else None


def is_package(name: str) -> bool:
    """Whether a module of the table has others below it."""
    below = any(other.startswith(f"{name}.") for other in EXPORTS)
    return below or folder_of(name) is not None
