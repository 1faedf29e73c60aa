"""The laws of configuration: what is accepted, what it means, and that every refusal
names its key.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hjson
import pytest
from hypothesis import given, strategies as st

from fzero import Config, ConfigError
from fzero.__main__ import main
from fzero.config.config import ConfigWarning
from fzero.config.deepspeed_keys import (
    ACCEPTED,
    HARMLESS,
    KNOWN,
    NOT_YET,
    REFUSED,
    SPELLINGS,
    TYPES,
)
from fzero.config.fields import block_of, names_in
from fzero.config.optimizer_block import AdamW, with_overrides
from fzero.config.optimizers import OPTIMIZERS, Adam
from fzero.config.reference import reference
from fzero.config.unused_keys import MOST_PLACES, children
from fzero.deepspeed.engine.config_keys import read as read_keys
from sharding.testing import world_sizes


def refusal(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


def zero(**values: Any) -> dict[str, Any]:
    return {"zero_optimization": values}


def optimizer(name: Any, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


# --- what is accepted -----------------------------------------------------------------------------


def test_an_empty_configuration_means_the_defaults() -> None:
    cfg = Config.load({})
    assert cfg == Config()
    assert (cfg.train_batch_size, cfg.train_micro_batch_size_per_gpu, cfg.gradient_clipping) == (
        None,
        None,
        1.0,
    )
    assert isinstance(cfg.optimizer, AdamW)
    assert cfg.optimizer.params.model_dump() == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "bias_correction": True,
        "adam_w_mode": True,
    }
    assert cfg.zero_optimization.model_dump() == {
        "stage": 0,
        "reduce_bucket_size": None,
        "allgather_bucket_size": None,
        "round_robin_gradients": False,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_prefetch_bucket_size": None,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": None,
        "mics_shard_size": None,
        "zero_hpz_partition_size": None,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "zeropp_loco_param": None,
        "offload_optimizer": None,
        "offload_param": None,
        "ignore_unused_parameters": True,
        "sub_group_size": None,
    }


FULL: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "round_robin_gradients": True},
}


def test_a_mapping_a_file_and_a_config_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FULL))
    cfg = Config.load(FULL)
    assert Config.load(path) == Config.load(str(path)) == Config.load(cfg) == cfg
    assert cfg.optimizer.params.betas == (0.8, 0.9) and cfg.zero_optimization.stage == 3


def test_a_mapping_is_not_changed_by_loading() -> None:
    source = {**FULL, "gradient_accumulation_steps": 1}
    kept = json.dumps(source)
    Config.load(source)
    assert json.dumps(source) == kept


def test_what_a_config_writes_loads_as_the_same_config() -> None:
    for source in (
        {},
        FULL,
        optimizer("adam", adam_w_mode=False),
        optimizer("SGD", momentum=0.9, nesterov=True),
    ):
        cfg = Config.load(source)
        assert Config.load(json.loads(cfg.model_dump_json())) == cfg


@pytest.mark.parametrize(("given_value", "value"), [(2, 2), (2.0, 2), ("2", 2), (3, 3), ("0", 0)])
def test_a_stage_may_be_a_string_or_an_integral_float(given_value: Any, value: int) -> None:
    assert Config.load(zero(stage=given_value)).zero_optimization.stage == value


def test_counts_may_be_strings_or_integral_floats() -> None:
    cfg = Config.load(
        {
            "train_batch_size": "8",
            **zero(reduce_bucket_size=5e8, stage3_prefetch_bucket_size="1000"),
        }
    )
    sizes = cfg.zero_optimization
    assert (cfg.train_batch_size, sizes.reduce_bucket_size, sizes.stage3_prefetch_bucket_size) == (
        8,
        500_000_000,
        1000,
    )
    assert all(isinstance(size, int) for size in (cfg.train_batch_size, sizes.reduce_bucket_size))


def test_rates_may_be_strings_or_integers() -> None:
    cfg = Config.load({**optimizer("adamw", lr="1e-2", weight_decay=0), "gradient_clipping": "2"})
    assert (cfg.optimizer.params.lr, cfg.optimizer.params.weight_decay, cfg.gradient_clipping) == (
        0.01,
        0.0,
        2.0,
    )


@pytest.mark.parametrize(
    "name",
    [
        "param_persistence_threshold",
        "prefetch_bucket_size",
        "max_live_parameters",
        "max_reuse_distance",
    ],
)
def test_stage_3_keys_may_stand_without_their_prefix(name: str) -> None:
    assert getattr(Config.load(zero(**{name: 7})).zero_optimization, f"stage3_{name}") == 7
    assert (
        getattr(Config.load(zero(**{f"stage3_{name}": 7})).zero_optimization, f"stage3_{name}") == 7
    )
    message = refusal(zero(**{name: 7, f"stage3_{name}": 8}))
    assert message == (
        f"zero_optimization.stage3_{name}: stands beside {name!r}, which is the same; remove one "
        f"of them"
    )


@pytest.mark.parametrize("name", ["Adam", "adam", "ADAM", "AdamW", "adamw", "aDaMw", "SGD", "sgd"])
def test_case_does_not_matter_in_the_name_of_an_optimizer(name: str) -> None:
    assert Config.load(optimizer(name)).optimizer.type.lower() == name.lower()


def test_an_optimizer_without_a_type_is_adamw() -> None:
    assert Config.load({"optimizer": {"params": {"lr": 0.5}}}) == Config.load(
        optimizer("AdamW", lr=0.5)
    )


# --- what it means --------------------------------------------------------------------------------


def _moved_by_decay_alone(name: str, **params: Any) -> float:
    """What an update with a zero gradient does to a parameter of 1: only decoupled
    weight decay moves it by lr·wd.
    """
    import torch

    transform = Config.load(
        optimizer(name, lr=0.5, weight_decay=0.5, **params)
    ).optimizer.transform()
    _, param, _ = transform.update(torch.zeros(1), torch.ones(1), transform.init(torch.ones(1)))
    return param.item()


def test_adam_decouples_the_weight_decay_unless_reported_otherwise_as_in_deepspeed() -> None:
    assert _moved_by_decay_alone("AdamW") == 0.75
    assert _moved_by_decay_alone("Adam") == 0.75
    assert _moved_by_decay_alone("Adam", adam_w_mode=True) == 0.75
    # the decay is the whole gradient: a step of lr
    coupled = _moved_by_decay_alone("Adam", adam_w_mode=False)
    assert coupled == pytest.approx(0.5, abs=1e-6)  # but for eps = 1e-8 beside a gradient of 0.5
    assert _moved_by_decay_alone("SGD") == 0.75


def test_only_adam_honours_its_mode_and_has_no_weight_decay_by_default() -> None:
    assert isinstance(Config.load(optimizer("Adam")).optimizer, Adam)
    assert Config.load(optimizer("Adam")).optimizer.params.weight_decay == 0.0
    assert _moved_by_decay_alone("AdamW", adam_w_mode=False) == 0.75  # as in DeepSpeed
    (note,) = Config.load(optimizer("AdamW", adam_w_mode=False)).conflicts
    assert note.reason == "AdamW always decouples the weight decay; Adam has the mode"
    assert not Config.load(optimizer("AdamW", adam_w_mode=True)).conflicts


def test_every_hyper_parameter_of_an_optimizer_reaches_its_update() -> None:
    import torch

    values: dict[str, dict[str, Any]] = {
        "SGD": {"lr": 0.5, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.5},
        "AdamW": {"lr": 0.5, "betas": [0.5, 0.5], "eps": 0.5, "weight_decay": 0.5},
        "Adam": {
            "lr": 0.5,
            "betas": [0.5, 0.5],
            "eps": 0.5,
            "weight_decay": 0.5,
            "adam_w_mode": False,
        },
    }

    def after_two_updates(name: str, params: Mapping[str, Any]) -> float:
        transform = Config.load(optimizer(name, **params)).optimizer.transform()
        param = torch.ones(1)
        state = transform.init(param)
        for grad in (1.0, -3.0):
            _, param, state = transform.update(torch.tensor([grad]), param, state)
        return param.item()

    for name, params in values.items():
        reference = after_two_updates(name, params)
        for field in params:
            fewer = {key: value for key, value in params.items() if key != field}
            assert after_two_updates(name, fewer) != reference, f"{name}: {field} changes nothing"
    nesterov = {"lr": 0.5, "momentum": 0.5}
    assert after_two_updates("SGD", nesterov) != after_two_updates(
        "SGD", {**nesterov, "nesterov": True}
    )


# --- batch sizes ----------------------------------------------------------------------------------

counts = st.integers(1, 30)


@given(counts, counts, world_sizes())
def test_what_is_missing_of_the_batch_triple_is_inferred(
    micro: int, steps: int, world_size: int
) -> None:
    train = micro * steps * world_size
    keys = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    assert Config().batch_sizes(world_size) == (None, None, 1)
    assert Config(**keys).batch_sizes(world_size) == (train, micro, steps)
    for left_out in keys:
        given = {key: value for key, value in keys.items() if key != left_out}
        assert Config(**given).batch_sizes(world_size) == (train, micro, steps)
    assert Config(train_batch_size=micro * world_size).batch_sizes(world_size) == (
        micro * world_size,
        micro,
        1,
    )
    assert Config(train_micro_batch_size_per_gpu=micro).batch_sizes(world_size) == (
        micro * world_size,
        micro,
        1,
    )


@given(counts, st.none() | counts, st.none() | counts, world_sizes())
def test_batch_sizes_fit_each_other_and_the_world_size_or_are_refused(
    train: int, micro: int | None, steps: int | None, world_size: int
) -> None:
    cfg = Config(
        train_batch_size=train,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
    )
    known = (micro or 1) * (steps or 1) * world_size
    is_all = micro is not None and steps is not None
    if (train == known) if is_all else train % known == 0:
        found = cfg.batch_sizes(world_size)
        assert found.train == train == found.micro * found.num_micro_steps * world_size
        assert micro in (None, found.micro) and steps in (None, found.num_micro_steps)
        return
    with pytest.raises(
        ConfigError, match=rf"train_batch_size: must equal .*, got {train} for .* × {world_size};"
    ):
        cfg.batch_sizes(world_size)


def test_accumulation_needs_no_batch_size_beside_it() -> None:
    assert Config.load({"gradient_accumulation_steps": 4}).batch_sizes(world_size=2) == (
        None,
        None,
        4,
    )


# --- what is refused ------------------------------------------------------------------------------


def at(name: str, value: Any) -> dict[str, Any]:
    """The configuration with one value at a dotted name."""
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


ON: dict[str, Any] = {
    "checkpoint": {"tag_validation": "Fail"},
    "datastates": {"any": 1},
    "datastates_ckpt": {"any": 1},
    "pipeline": {"stages": 2},
    "compile": {"deepcompile": True},
    "tensor_parallel": {"autotp_size": 2},
    "weight_quantization": {},
    "zero_optimization.zenflow": {},
}
"""Values that ask for something."""


def on(key: str) -> Any:
    return ON.get(key, {"enabled": True} if "enabled" in children(key) else 2)


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_that_asks_for_what_is_not_there_is_refused_by_its_name_with_what_to_do(
    key: str,
) -> None:
    says = "fzero knows this DeepSpeed key and does not honour it yet"
    assert refusal(at(key, on(key))) == f"{key}: {says}; {REFUSED[key]}"


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_a_key_without_which_training_is_right_is_warned_of_and_noted(key: str) -> None:
    says = "fzero knows this DeepSpeed key and does not honour it yet"
    with pytest.warns(ConfigWarning) as reported:
        cfg = Config.load(at(key, on(key)))
    assert [str(warning.message) for warning in reported] == [f"{key}: {says}; {HARMLESS[key]}"]
    assert reported[0].filename == __file__
    assert (
        cfg.notes == ((key, on(key), "not yet", HARMLESS[key]),)
        and cfg.model_dump() == Config().model_dump()
    )


@pytest.mark.parametrize("key", sorted(NOT_YET))
def test_a_value_that_asks_for_nothing_is_no_error_and_no_warning(key: str) -> None:
    values: list[Any] = [None, "auto"]
    if "enabled" in children(key):
        values += [{"enabled": False}] if key == "weight_quantization" else [{"enabled": False}, {}]
    for value in values:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConfigWarning)
            assert [note.key for note in Config.load(at(key, value)).notes] == [key]


@pytest.mark.parametrize(
    "source",
    [
        at("compile", {"offload_activation": True}),
        at("checkpoint", {"tag_validation": "WARN", "parallel_write": {"pipeline_stage": False}}),
        at("pipeline", {"stages": "auto", "partition": "best"}),
        zero(
            offload_param={"pin_memory": True}, cpu_offload_use_pin_memory=True, mics_shard_size=-1
        ),
        zero(
            cpu_offload=False,
            cpu_offload_param=False,
            cpu_offload_params=False,
            legacy_stage1=False,
        ),
        zero(stage3_model_persistence_threshold=9223372036854775807),
        {"zero_optimization": {"stage": 1, "allgather_size": 5e8}},
    ],
)
def test_blocks_that_are_off_and_older_keys_that_are_off_change_nothing(source: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        cfg = Config.load(source)
    stage = source.get("zero_optimization", {}).get("stage", 0)
    assert cfg.model_dump() == Config.load(zero(stage=stage)).model_dump() and cfg.notes


def test_an_older_key_and_its_block_exclude_each_other() -> None:
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        says = (
            f"zero_optimization.{old}: stands beside {new!r}, which is the same; remove one of them"
        )
        assert refusal(zero(**{old: False, new: {"device": "none"}})) == says
    for old in ("cpu_offload_param", "cpu_offload_params"):
        assert Config.load(zero(stage=3, **{old: True})) == Config.load(
            zero(stage=3, offload_param={"device": "cpu"})
        )
    assert Config.load(zero(cpu_offload=True)) == Config.load(
        zero(offload_optimizer={"device": "cpu"})
    )


SWITCHED_OFF = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": False, "loss_scale": 0},
    "bf16": {"enabled": False},
    "communication_data_type": None,
    "gradient_allreduce_op": "mean",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "torch_adam": True, "weight_decay": 0.5},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "zero_quantized_weights": False,
        "zero_hpz_partition_size": 1,
        "reduce_bucket_size": "auto",
    },
    "steps_per_print": float("inf"),
}


def test_keys_that_change_nothing_are_accepted_and_reported_with_the_reason() -> None:
    cfg = Config.load(SWITCHED_OFF)
    assert (
        cfg.model_dump()
        == Config.load(optimizer("AdamW", weight_decay=0.5) | zero(stage=3)).model_dump()
    )
    kinds = {note.key: note.kind for note in cfg.notes}
    assert kinds == {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer.params.lr": "auto",
        "optimizer.params.torch_adam": "accepted",
        "zero_optimization.overlap_comm": "accepted",
        "zero_optimization.contiguous_gradients": "accepted",
        "zero_optimization.reduce_bucket_size": "auto",
        "steps_per_print": "accepted",
    }
    assert all(note.reason for note in cfg.notes)


def test_ranks_that_share_the_state_are_a_number_or_all() -> None:
    for key, off in (
        ("mics_shard_size", -1),
        ("mics_shard_size", 0),
        ("zero_hpz_partition_size", 1),
    ):
        assert getattr(Config.load(zero(stage=3, **{key: 4})).zero_optimization, key) == 4
        for value in (off, float(off), "auto", None):
            cfg = Config.load(zero(stage=3, **{key: value}))
            assert getattr(cfg.zero_optimization, key) is None and not cfg.conflicts
        assert getattr(Config.load(zero(stage=3, **{key: 0})).zero_optimization, key) is None
        assert "must be a number" in refusal(zero(stage=3, **{key: True}))
    (note,) = Config.load(zero(stage=2, zero_hpz_partition_size=4)).conflicts
    assert note.reason == "it is for stage 3, and the stage is 2"
    (note,) = Config.load(zero(mics_shard_size=4)).conflicts
    assert note.reason == "nothing is divided in stage 0"
    cfg = Config.load(zero(stage=1, mics_shard_size=4, mics_hierarchical_params_gather=True))
    assert not cfg.conflicts and [note.kind for note in cfg.notes] == ["accepted"]


def test_quantized_collectives_are_read_and_reported_where_they_are_of_no_use() -> None:
    asked = zero(
        stage=3,
        zero_quantized_weights=True,
        zero_quantized_gradients=True,
        zeropp_loco_param={"err_beta": 0.5},
    )
    cfg = Config.load(asked)
    assert cfg.zero_optimization.zeropp_loco_param.model_dump() == {
        "err_beta": 0.5,
        "reset_T": 1024,
    }
    assert not cfg.conflicts and Config.load(cfg.model_dump()) == cfg
    reported = {
        note.key: note.reason
        for source in (
            zero(stage=2, zero_quantized_weights=True, zero_quantized_nontrainable_weights=False),
            zero(stage=3, zeropp_loco_param={"err_beta": 0.5}),
        )
        for note in Config.load(source).conflicts
    }
    assert reported == {
        "zero_optimization.zero_quantized_weights": "it is for stage 3, and the stage is 2",
        "zero_optimization.zeropp_loco_param.err_beta": "no gradient is quantized",
    }


def test_offload_is_read_and_its_keys_are_reported_where_they_are_of_no_use() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4, "fast_init": True}
    cfg = Config.load(
        zero(stage=2, offload_optimizer=nvme, sub_group_size=1e9) | {"aio": {"queue_depth": 16}}
    )
    assert cfg.zero_optimization.offload_optimizer.nvme_path == "/nvme" and not cfg.conflicts
    assert (cfg.zero_optimization.sub_group_size, cfg.aio.queue_depth) == (10**9, 16)
    assert Config.load(cfg.model_dump()) == cfg
    reported = Config.load(
        zero(offload_optimizer={"device": "cpu", "buffer_count": 4}) | {"aio": {"block_size": 4096}}
    )
    assert {note.key for note in reported.conflicts} == {
        "zero_optimization.offload_optimizer.buffer_count", "aio.block_size"
    }  # fmt: skip
    (note,) = Config.load(zero(stage=2, sub_group_size=1e9)).conflicts
    assert note.reason.startswith("no state lives off the device")


def test_parameters_are_offloaded_in_stage_3_where_no_shards_are_joined() -> None:
    nvme = {
        "device": "nvme",
        "nvme_path": "/nvme",
        "buffer_count": 5,
        "buffer_size": 1e8,
        "max_in_cpu": 0,
    }
    cfg = Config.load(zero(stage=3, offload_param=nvme) | {"aio": {"queue_depth": 16}})
    assert not cfg.conflicts and Config.load(cfg.model_dump()) == cfg
    assert cfg.zero_optimization.offload_param.max_in_cpu == 0
    reported = Config.load(
        zero(stage=3, offload_param={"device": "cpu", "max_in_cpu": 1e9, "buffer_size": 1})
    )
    assert {note.key.rpartition(".")[2] for note in reported.conflicts} == {
        "max_in_cpu",
        "buffer_size",
    }


def test_a_key_is_known_in_one_way_only() -> None:
    assert len({*ACCEPTED, *HARMLESS, *REFUSED, *SPELLINGS}) == sum(
        map(len, (ACCEPTED, HARMLESS, REFUSED, SPELLINGS))
    )
    # there, the optimizer decides
    everywhere = {name for name in HONOURED if not name.startswith("optimizer.params.")}
    assert not everywhere & {*ACCEPTED, *NOT_YET, *SPELLINGS}
    typed = " ".join(TYPES.values()).split()
    assert len(typed) == len({*typed}) and {*typed} <= {*ACCEPTED}


def test_older_spellings_of_a_configuration_are_read() -> None:
    assert Config.load({"zero_optimization": True}).zero_optimization.stage == 1
    assert Config.load({"zero_optimization": False}).zero_optimization.stage == 0
    text = base64.urlsafe_b64encode(b'{"gradient_clipping": 0.25}').decode()
    assert Config.load(text).gradient_clipping == 0.25


def honoured(block: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of a block's keys, with their aliases, and of the blocks in it."""
    for name, field in block.model_fields.items():
        for spelling in {name, field.alias or name}:
            yield f"{prefix}{spelling}"
            inner = block_of(field.annotation)
            if inner is not None and name not in ("optimizer", "scheduler"):
                yield from honoured(inner, f"{prefix}{spelling}.")


HONOURED = {
    *honoured(Config),
    *("optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"),
    *(
        f"optimizer.params.{key}"
        for o in OPTIMIZERS.values()
        for key in o.model_fields["params"].annotation.model_fields
    ),
}

DEEPSPEED = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    steps_per_print optimizer{type params legacy_fusion} scheduler{type params} gradient_clipping prescale_gradients
    gradient_predivide_factor gradient_allreduce_op sparse_gradients communication_data_type
    seq_parallel_communication_data_type disable_allgather data_types{grad_accum_dtype param_dtype buffer_dtype}
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    fp16{enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads}
    bf16{enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states}
    bfloat16{enabled immediate_grad_update}
    amp{enabled opt_level} torch_autocast{enabled dtype lower_precision_safe_modules}
    wall_clock_breakdown memory_breakdown dump_state dataloader_drop_last
    checkpoint{tag_validation load_universal use_node_local_storage parallel_write{pipeline_stage}
        checkpoint_serialization writer{type decoupled io_buffer_size}}
    activation_checkpointing{partition_activations contiguous_memory_optimization cpu_checkpointing
        synchronize_checkpoint_boundary profile number_checkpoints}
    flops_profiler{enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file}
    aio{block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds}
    pipeline{stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned}
    hybrid_engine{enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters
        tp_gather_partition_size enable_cuda_graph}
    tensorboard{enabled output_path job_name} csv_monitor{enabled output_path job_name}
    wandb{enabled group team project} comet{enabled samples_log_interval project workspace api_key}
    comms_logger{enabled verbose prof_all debug prof_ops}
    autotuning{enabled fast metric start_profile_step end_profile_step tuner_type tuner_early_stopping tuner_num_trials
        mp_size num_tuning_micro_batch_sizes max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu
        results_dir exps_dir overwrite}
    elasticity{enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus num_gpus_per_node model_parallel_size
        min_time prefer_larger_batch ignore_non_elastic_batch_info version}
    progressive_layer_drop{enabled theta gamma} eigenvalue{enabled verbose max_iter tol}
    curriculum_learning{enabled curriculum_type min_difficulty max_difficulty schedule_type
        schedule_config{total_curriculum_step difficulty_step root_degree difficulty max_step}}
    data_efficiency{enabled seed data_sampling{num_epochs num_workers curriculum_learning{enabled curriculum_metrics}
        dynamic_batching{min_batch_size lr_scaling_method sequence_picking_order}} data_routing{random_ltd{enabled}}}
    compression_training{weight_quantization{shared_parameters{enabled} different_groups}
        activation_quantization{shared_parameters} sparse_pruning{shared_parameters} row_pruning{shared_parameters}
        head_pruning{shared_parameters} channel_pruning{shared_parameters} layer_reduction{enabled}}
    sparse_attention{mode block different_layout_per_head num_local_blocks num_global_blocks attention
        horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks
        global_block_indices global_block_end_indices num_sliding_window_blocks}
    compile{deepcompile free_activation free_activation_threshold offload_activation offload_opt_states double_buffer
        symmetric_memory offload_parameters passes}
    tensor_parallel{autotp_size preset_model partition_config tp_overlap_comm tp{tp_size tp_grain_size}}
    expert_parallel{enabled autoep_size} use_data_before_expert_parallelism sequence_parallel_size data_parallel_size
    nebula{enabled persistent_storage_path} datastates{any} graph_harvesting vocabulary_size
    weight_quantization{enabled num_bits} timers{throughput{enabled synchronized}} log_level
    zero_optimization{stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size allgather_size overlap_comm round_robin_gradients
        load_from_fp32_weights elastic_checkpoint sub_group_size ignore_unused_parameters legacy_stage1
        offload_param{device nvme_path buffer_count buffer_size max_in_cpu pin_memory}
        offload_optimizer{device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio
            super_offload cpuadam_cores_perc}
        zenflow{topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio
            full_warm_up_rounds pt_reserved_cores_perc}
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
        stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
        max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold
        use_all_reduce_for_fetch_params allgather_sequential
        zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
        zeropp_loco_param{err_beta reset_T} mics_shard_size mics_hierarchical_params_gather memory_efficient_linear
        override_module_apply pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks
        save_muon_momentum_buffer_in_memory leaf_module{classes names name_suffixes}
        cpu_offload cpu_offload_param cpu_offload_params cpu_offload_use_pin_memory
        stage3_gather_fp16_weights_on_model_save}
"""
"""Every key of DeepSpeed 0.19, and the older ones that its files still have."""


def dotted(text: str) -> list[str]:
    """The names of a text such as `a{b c}`: a, a.b, a.c."""
    names, blocks = [], [""]
    for word in re.findall(r"\w+|[{}]", text):
        if word == "{":
            blocks.append(f"{names[-1]}.")
        elif word == "}":
            blocks.pop()
        else:
            names.append(blocks[-1] + word)
    return names


def with_type(source: dict[str, Any]) -> dict[str, Any]:
    """The configuration; its scheduler, if it is a block, is one that exists."""
    block = source.get("scheduler")
    return (
        source | {"scheduler": {"type": "WarmupLR", **block}} if isinstance(block, dict) else source
    )


@pytest.mark.parametrize("name", dotted(DEEPSPEED))
def test_every_deepspeed_key_is_honoured_accepted_or_not_honoured_yet(name: str) -> None:
    blocks = [name[: match.start()] for match in re.finditer(r"\.|$", name)]
    ways = [
        any(block in keys for block in blocks) for keys in (ACCEPTED, HARMLESS, REFUSED, SPELLINGS)
    ]
    assert sum([name in HONOURED, *ways]) == 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)
            Config.load(with_type(at(name, "auto")))
    except ConfigError as error:
        assert "unknown" not in str(error)


@pytest.mark.parametrize(
    "name", sorted({name for name in dotted(DEEPSPEED) if "any" not in name.split(".")})
)
def test_a_misspelt_key_is_refused_everywhere_with_the_nearest_name(name: str) -> None:
    block = name.rpartition(".")[0]
    if "*" in children(block):
        return
    for value in (1, "auto", {"enabled": False}):
        message = refusal(with_type(at(f"{name}x", value)))
        nearest = re.match(rf"{re.escape(name)}x: unknown key; did you mean '(\w+)'\?", message)
        assert nearest and nearest[1] in {
            *children(block),
            *(n.rpartition(".")[2] for n in HONOURED),
        }, message


def test_a_key_at_the_top_level_that_belongs_to_a_block_is_told_its_place() -> None:
    top = {*Config.model_fields, *children("")}
    names = sorted(
        {name for name in (*names_in(Config), *KNOWN) if "." in name and "*" not in name}
    )
    places: dict[str, list[str]] = {}
    for name in names:
        places.setdefault(name.rpartition(".")[2], []).append(name)
    tried = 0
    for key, found in places.items():
        if len(found) <= MOST_PLACES and key not in top and not get_close_matches(key, top, 1, 0.8):
            message = refusal({key: {}})
            assert message.startswith(f"{key}: unknown key; did you mean ") and all(
                repr(name) in message for name in found
            )
            tried += 1
    assert tried > 60
    for key in ("offload_optimizer", "offload_optimiser"):
        assert refusal({key: {}}).endswith("did you mean 'zero_optimization.offload_optimizer'?")


WRONG: dict[str, Any] = {
    "true, false or null": "perhaps",
    "true or false": None,
    "a whole number": 0.5,
    "a whole number or null": True,
    "a number or null": "often",
    "a text or null": 3,
    "an object": 3,
}
"""A value that is not of a kind."""

REFUSALS: dict[str, list[Any]] = {
    # a value, by the name of its field
    "train_batch_size: ": [{"train_batch_size": value} for value in (2.5, 0, True, "some")],
    "train_micro_batch_size_per_gpu: ": [{"train_micro_batch_size_per_gpu": "2.5"}],
    "gradient_clipping: ": [{"gradient_clipping": value} for value in (-1.0, True, float("nan"))],
    "gradient_allreduce_op: ": [{"gradient_allreduce_op": "max"}],
    "gradient_allreduce_op: must be 'mean' in stage 3, got 'sum'": [
        {"gradient_allreduce_op": "sum"} | zero(stage=3)
    ],
    "fp16.min_loss_scale: ": [
        {"fp16": {"enabled": True, "min_loss_scale": 0}},
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"min_loss_scale": 0}},
    ],
    "fp16.enabled: excludes bf16.enabled": [{"fp16": {"enabled": True}, "bf16": {"enabled": True}}],
    "zero_optimization: ": [{"zero_optimization": 3}],
    "optimizer: ": [{"optimizer": "AdamW"}, {"optimizer": {"type": 3}}],
    "3: ": [{3: {}}],
    **{
        f"zero_optimization.stage: must be .*got {re.escape(repr(value))}$": [zero(stage=value)]
        for value in (4, -1, 1.5, "4", "-1", "two", "", None, True, [1], float("nan"))
    },
    "zero_optimization.stage: must be ": [zero(stage={})],
    "zero_optimization.reduce_bucket_size: ": [zero(reduce_bucket_size=x) for x in (0, 1e-3)],
    "zero_optimization.allgather_bucket_size: ": [zero(allgather_bucket_size=-1)],
    "zero_optimization.max_reuse_distance: ": [zero(max_reuse_distance=-1)],
    "zero_optimization.round_robin_gradients: ": [zero(round_robin_gradients="perhaps")],
    "zero_optimization.prefetch_bucket_size: ": [zero(prefetch_bucket_size=-1)],
    "zero_optimization.stage3_prefetch_bucket_size: ": [zero(stage3_prefetch_bucket_size=0.5)],
    "zero_optimization.stage3_max_live_parameters: ": [zero(stage3_max_live_parameters=-1)],
    "zero_optimization.stage3_param_persistence_threshold: ": [
        zero(stage3_param_persistence_threshold=-1)
    ],
    "zero_optimization.zeropp_loco_param.err_beta: must be": [
        zero(zeropp_loco_param={"err_beta": 1})
    ],
    "zero_optimization.cpu_offload_param: ": [zero(cpu_offload_param=2)],
    "zero_optimization.cpu_offload: ": [zero(cpu_offload=2)],
    "zero_optimization.offload_optimizer.*nvme_path is required": [
        zero(offload_optimizer={"device": "nvme"})
    ],
    "zero_optimization.offload_param.*nvme_path is required": [
        zero(stage=3, offload_param={"device": "nvme"})
    ],
    "zero_optimization.offload_param: needs zero_optimization.stage 3, .*got stage 2": [
        zero(stage=2, offload_param={"device": "cpu"})
    ],
    ".*ratio: must be less than or equal to 1": [
        zero(offload_optimizer={"device": "cpu", "ratio": 1.5})
    ],
    ".*offload_optimizer.device: must be 'none', 'cpu' or 'nvme'": [
        zero(offload_optimizer={"device": "disk"})
    ],
    "optimizer.params.lr: ": [optimizer("AdamW", lr=value) for value in (-1, float("inf"))],
    "optimizer.params.lr: must be greater than or equal to 0": [optimizer("nadam", lr=-1)],
    "optimizer.params.betas.1: ": [optimizer("AdamW", betas=x) for x in ([0.9, 1.0], [0.9])],
    "optimizer.params.betas: ": [optimizer("AdamW", betas=0.9)],
    "optimizer.params.dampening: ": [optimizer("SGD", dampening=float("nan"))],
    "optimizer.params: ": [optimizer("SGD", nesterov=True)],
    ".*nesterov needs momentum > 0 and dampening = 0, got 0.9 and 0.5; change these": [
        optimizer("SGD", momentum=0.9, dampening=0.5, nesterov=True)
    ],
    ".*min_coeff must be at most max_coeff, got 2.0 > 1.0": [
        optimizer("Lamb", min_coeff=2.0, max_coeff=1.0)
    ],
    ".*ns_method": [optimizer("Muon", ns_method="svd")],
    ".*NAdam: does not take a flat tensor": [optimizer("nadam", momentum_decay=-1)],
    "optimizer: .*LBFGS: needs a closure": [optimizer("lbfgs")],
    "optimizer: .*does not support dense gradients": [optimizer("SparseAdam")],
    ".*does not honour it yet": [{"aio": {"use_gds": True}}, optimizer("Adam", amsgrad=True)],
    # an accepted key with a value of another type
    **{
        f"{name}: must be {kind}, got {re.escape(repr(value))}$": [at(name, value)]
        for kind, value in WRONG.items()
        for name in TYPES[kind].split()
    },
    # an unknown key or optimizer, with the nearest name or all names
    **{
        rf"{key}: unknown key; did you mean {near!r}\?": [source]
        for key, near, source in (
            ("zero_optimisation", "zero_optimization", {"zero_optimisation": {}}),
            ("optimiser", "optimizer", {"optimiser": {}}),
            ("train_batch_sise", "train_batch_size", {"train_batch_sise": "auto"}),
            ("zero_optimization.stages", "stage", zero(stages="auto")),
            ("zero_optimization.Stage", "stage", zero(Stage=1)),
            ("zero_optimization.wandb", "wandb", zero(wandb={})),
            ("overlap_comm", "zero_optimization.overlap_comm", {"overlap_comm": True}),
            ("optimizer.params.momentun", "momentum", optimizer("SGD", momentun=0.9)),
            ("optimizer.params.beta", "betas", optimizer("Adam", beta=0.9)),
            (
                "optimizer.params.momentun_decay",
                "momentum_decay",
                optimizer("nadam", momentun_decay=0.1),
            ),
        )
    },
    "qqqq: unknown key; known here: train_batch_size, train_micro_batch_size_per_gpu, ": [
        {"qqqq": 1}
    ],
    "Adam: unknown key; known here: train_batch_size": [{"Adam": {}}],
    "optimizer.AdamW: unknown key; known here: type, params": [{"optimizer": {"AdamW": {}}}],
    "optimizer.params.SGD: unknown key; known here: lr": [optimizer("SGD", SGD=1)],
    "optimizer.params.adam_w_mode: unknown key": [optimizer("SGD", adam_w_mode=True)],
    **{
        rf"optimizer: no optimizer is named {name!r}; did you mean {nearest!r}\? \(known: Adam, AdamW, "
        r"SGD, Adagrad, Lion, Lamb, Adafactor, Muon and elementwise classes of torch.optim\)": [
            optimizer(name)
        ]
        for name, nearest in (
            *(("Adamm", "Adam"), ("AdanW", "AdamW"), ("sg", "SGD")),
            *(("FusedAdam", "Adam"), ("radm", "RAdam")),
        )
    },
    # no configuration at all
    **{
        f"Config.load: needs a mapping or the path of a JSON file, got {type(source).__name__}": [
            source
        ]
        for source in (3, None, ["stage"], {1, 2})
    },
}
"""What a refusal begins with, as a pattern, and the configurations that get it."""


@pytest.mark.parametrize("words", REFUSALS)
def test_what_is_wrong_is_refused_by_the_name_of_its_field_with_what_to_do(words: str) -> None:
    for source in REFUSALS[words]:
        assert re.match(words, message := refusal(source)), message


@pytest.mark.parametrize(
    "source",
    [
        {"steps_per_print": float("inf"), "wall_clock_breakdown": None, "vocabulary_size": 1024},
        zero(
            overlap_comm=None,
            sub_group_size=1e12,
            allgather_size="500000000",
            reduce_scatter="false",
        ),
        zero(leaf_module={"names": ["a"]})
        | {"aio": {"thread_count": 1}, "timers": {"throughput": {"enabled": True}}},
    ],
)
def test_an_accepted_key_may_have_every_value_of_its_type(source: Any) -> None:
    assert {note.kind for note in Config.load(source).notes} == {"accepted"}


def test_every_wrong_field_gets_a_line() -> None:
    lines = refusal({"train_batch_size": 0, "nope": 1, **zero(stage=7, zenflow={})}).splitlines()
    assert {line.partition(":")[0] for line in lines} == {
        "train_batch_size", "nope", "zero_optimization.stage", "zero_optimization.zenflow",
    }  # fmt: skip


def test_a_misspelt_key_in_a_block_that_is_refused_is_reported_beside_the_refusal() -> None:
    lines = refusal(zero(zenflow={"topk_ratio": 0.1, "update_intervall": 4})).splitlines()
    assert [line.partition(":")[0].removeprefix("zero_optimization.") for line in lines] == [
        "zenflow.update_intervall", "zenflow",
    ]  # fmt: skip
    assert "did you mean 'update_interval'?" in lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"train_batch_size": 8, "train_batch_size": 9}',
            "train_batch_size: a key may stand once in an object, found 2",
        ),
        (
            '{"zero_optimization": {"stage": 1, "stage": 1}}',
            "stage: a key may stand once in an object, found 2",
        ),
        ("[1]", "must hold a JSON object, got list"),
        ("3", "must hold a JSON object, got int"),
        ("{'train_batch_size': 0}", "train_batch_size: must be at least 1, got 0"),
        ("", "is not JSON or Hjson"),
        ('{"train_batch_size": 8,\n "gradient_clipping" 1}', "line 2"),
        ("{\n  # a comment\n  stage 1\n}", "line 3"),
        ("{stage: 1 /* a comment without an end", "is not JSON or Hjson"),
        (
            "{zero_optimization: {stage: 1\nstage: 1}}",
            "zero_optimization.stage: a key may stand once in an object",
        ),
        ("[" * 100_000, "is not JSON or Hjson"),
        ("{train_batch_size: 1e999}", "is not JSON or Hjson"),
        ('{"gradient_clipping": NaN}', "gradient_clipping: must be a finite number, got nan"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert message in refusal(path)


def test_what_is_not_a_readable_file_is_refused_by_its_path(tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing.json", tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    assert f"cannot read {str(missing)!r}: No such file" in refusal(missing)
    assert f"cannot read {str(tmp_path)!r}: Is a directory" in refusal(tmp_path)
    assert f"{str(binary)!r} is not JSON or Hjson" in refusal(binary)


# --- any configuration at all ---------------------------------------------------------------------

FIELDS: tuple[tuple[str, ...], ...] = (
    *((name,) for name in Config.model_fields),
    *(
        ("zero_optimization", name)
        for name in Config.model_fields["zero_optimization"].annotation.model_fields
    ),
    *(("optimizer", "params", name) for name in ("lr", "betas", "eps", "weight_decay")),
)
names = st.text("abcdefghijklmnopqrstuvwxyz_03", min_size=1, max_size=12)
scalars = st.none() | st.booleans() | st.integers(-5, 10**10) | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(names, x, max_size=3), max_leaves=5
)


def _with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """FULL with `value` at `path`."""
    source = json.loads(json.dumps(FULL))
    block = source
    for name in path[:-1]:
        block = block[name]
    block[path[-1]] = value
    return source


@given(st.sampled_from(FIELDS), json_values)
def test_a_refused_value_is_refused_by_the_name_of_its_key(
    path: tuple[str, ...], value: Any
) -> None:
    try:
        cfg = Config.load(_with(path, value))
    except ConfigError as error:
        for line in str(error).splitlines():
            field = line.partition(": ")[0]
            assert field == ".".join(path) or field.startswith(".".join(path) + ".")
    else:
        assert Config.load(cfg.model_dump()) == cfg


@given(
    st.sampled_from([(), ("zero_optimization",), ("optimizer",), ("optimizer", "params")]),
    names,
    json_values,
)
def test_an_unknown_key_is_refused_by_its_name(
    block: tuple[str, ...], name: str, value: Any
) -> None:
    path = (*block, name)
    if (
        name in children(".".join(block))
        or path in FIELDS
        or path in (("optimizer", "type"), ("optimizer", "params"))
    ):
        return
    assert refusal(_with(path, value)).startswith(".".join(path) + ": ")


# --- configurations as people have them -----------------------------------------------------------

ZERO_2_OFFLOAD: dict[str, Any] = {
    "train_batch_size": 16.0,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}
ZERO_3_AUTO: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": 1000,
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": float("inf"),
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
CHAT: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
        "zero_quantized_nontrainable_weights": False,
    },
    "bfloat16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": False,
        "max_out_tokens": 512,
        "inference_tp_size": 1,
        "release_inference_cache": False,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    },
    "tensorboard": {
        "enabled": True,
        "output_path": "step1/ds_tensorboard_logs/",
        "job_name": "step1_model_tensorboard",
    },
    "data_types": {"grad_accum_dtype": "fp32"},
}
BERT: dict[str, Any] = {
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 16,
    "steps_per_print": 100,
    "prescale_gradients": False,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 6e-3, "betas": [0.9, 0.99], "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-8, "warmup_max_lr": 6e-3, "warmup_type": "linear"},
    },
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0},
    "sparse_attention": {
        "mode": "fixed",
        "block": 16,
        "different_layout_per_head": True,
        "num_local_blocks": 4,
    },
}
MEGATRON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 1,
        "elastic_checkpoint": False,
        "cpu_offload": False,
        "legacy_stage1": False,
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 1024,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "initial_scale_power": 12,
    },
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
    "data_efficiency": {
        "enabled": False,
        "data_sampling": {"num_workers": 0, "curriculum_learning": {"enabled": False}},
    },
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 1024,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 15000, "difficulty_step": 8},
    },
    "flops_profiler": {"enabled": False},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
    "aio": {
        "block_size": 1048576,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
    },
    "checkpoint": {"use_node_local_storage": True},
}
AS_PEOPLE_HAVE_THEM = (ZERO_2_OFFLOAD, ZERO_3_AUTO, CHAT, BERT, MEGATRON)


def test_configurations_as_people_have_them_load_or_say_which_keys_do_not() -> None:
    assert Config.load(ZERO_2_OFFLOAD).zero_optimization.offload_optimizer.device == "cpu"
    schedule = Config.load(MEGATRON).curriculum_learning.schedule()
    assert schedule is not None and schedule(15000) == 1024
    assert Config.load(BERT).sparse_attention.different_layout_per_head
    assert Config.load(ZERO_3_AUTO).zero_optimization.stage == 3
    with pytest.warns(ConfigWarning, match="^tensorboard: "):
        cfg = Config.load(CHAT)
    assert cfg.bf16.enabled and cfg.data_types.grad_accum_dtype == "float32"
    assert Config.load({"train_batch_size": 16.0}).batch_sizes(4) == (16, 4, 1)


@st.composite
def parts(draw: st.DrawFn, source: Mapping[str, Any]) -> dict[str, Any]:
    """Some of the keys of a configuration, and in its blocks too; once in a while with
    another value.
    """
    kept = (
        draw(st.sets(st.sampled_from(sorted(source)), min_size=len(source) // 2))
        if source
        else set()
    )
    part = {
        key: draw(parts(source[key])) if isinstance(source[key], dict) else source[key]
        for key in source
        if key in kept
    }
    if part and draw(st.integers(0, 9)) == 0:
        part[draw(st.sampled_from(sorted(part)))] = draw(json_values)
    return part


def paths(source: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in source.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}.")


def in_every_spelling(source: Mapping[str, Any], folder: Path) -> Iterator[Any]:
    """The same configuration as JSON, as Hjson, and as base64."""
    text = json.dumps(source)
    for name, content in (
        ("config.json", text),
        ("config.hjson", "# a comment\n" + hjson.dumps(source)),
    ):
        path = folder / name
        path.write_text(content)
        yield path
    yield base64.urlsafe_b64encode(text.encode()).decode()


@given(st.sampled_from(AS_PEOPLE_HAVE_THEM).flatmap(parts))
def test_a_part_of_a_configuration_loads_and_loads_again_the_same_or_every_line_names_a_key_of_it(
    tmp_path_factory: pytest.TempPathFactory, source: dict[str, Any]
) -> None:
    warnings.simplefilter("ignore", ConfigWarning)
    try:
        cfg = Config.load(source)
    except ConfigError as error:
        for line in str(error).splitlines():
            field = line.partition(":")[0]
            assert any(f"{field}.".startswith(f"{path}.") for path in paths(source)), line
        return
    folder = tmp_path_factory.getbasetemp()
    written = cfg.model_dump(mode="json")
    assert Config.load(cfg.model_dump()) == cfg == Config.load(json.loads(cfg.model_dump_json()))
    assert all(Config.load(spelling) == cfg for spelling in in_every_spelling(written, folder))
    loaded = [Config.load(spelling) for spelling in in_every_spelling(source, folder)]
    assert all(
        other == cfg and [note.key for note in other.notes] == [note.key for note in cfg.notes]
        for other in loaded
    )


HJSON = """
// keys without quotes, comments, and commas that nothing follows
{
  train_batch_size: 8          # text after a value
  'gradient_clipping': 0.5,
  /* of more
     lines */
  optimizer: {type: "AdamW", params: {lr: 1e-4, betas: [0.8, 0.9,], eps: 1e-6, weight_decay: 0.1,},}
  zero_optimization: {
    stage: 3
    reduce_bucket_size: 5e8
    round_robin_gradients: true
  }
}
"""


def test_an_hjson_file_says_the_same_as_json(tmp_path: Path) -> None:
    path = tmp_path / "config.hjson"
    path.write_text(HJSON)
    assert Config.load(path) == Config.load(FULL)
    path.write_text("\ufeff" + json.dumps(FULL), encoding="utf-8")
    assert Config.load(path) == Config.load(FULL)


def test_every_key_that_stands_twice_gets_a_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1, "a": 2, "b": {"c": 1, "c": 2, "c": 3}, "d": [{}, {"e": 1, "e": 1}]}')
    assert refusal(path).splitlines() == [
        "a: a key may stand once in an object, found 2; remove all but one",
        "b.c: a key may stand once in an object, found 3; remove all but one",
        "d.1.e: a key may stand once in an object, found 2; remove all but one",
    ]


# --- keys that are useless beside others ----------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "key", "reason", "mended"),
    [
        (
            zero(stage=2, stage3_max_live_parameters=1),
            "zero_optimization.stage3_max_live_parameters",
            "it is for stage 3, and the stage is 2",
            zero(stage=3),
        ),
        (
            zero(max_reuse_distance=1),
            "zero_optimization.stage3_max_reuse_distance",
            "it is for stage 3, and the stage is 0",
            zero(stage=3),
        ),
        (
            zero(allgather_bucket_size=7),
            "zero_optimization.allgather_bucket_size",
            "every rank updates all parameters in stage 0, and gathers none",
            zero(stage=1),
        ),
        (
            zero(round_robin_gradients=True),
            "zero_optimization.round_robin_gradients",
            "nothing is divided in stage 0",
            zero(stage=1),
        ),
        (
            {"fp16": {"hysteresis": 4}},
            "fp16.hysteresis",
            "no loss is scaled: fp16 is off",
            {"fp16": {"enabled": True}},
        ),
        (
            {"fp16": {"loss_scale": 4}},
            "fp16.loss_scale",
            "no loss is scaled: fp16 is off",
            {"torch_autocast": {"enabled": True, "dtype": "fp16"}},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 8, "initial_scale_power": 4}},
            "fp16.initial_scale_power",
            "the scale is fixed: loss_scale is 8.0",
            {"fp16": {"loss_scale": 0}},
        ),
        (
            {"fp16": {"auto_cast": True}},
            "fp16.auto_cast",
            "fp16 is off",
            {"fp16": {"enabled": True}},
        ),
        (
            {"bf16": {"check_grad_overflow": True}},
            "bf16.check_grad_overflow",
            "bf16 is off",
            {"bf16": {"enabled": True}},
        ),
        (
            {"bfloat16": {"immediate_grad_update": True}},
            "bfloat16.immediate_grad_update",
            "bf16 is off",
            {"bfloat16": {"enabled": True}},
        ),
        (
            {"torch_autocast": {"dtype": "bf16"}},
            "torch_autocast.dtype",
            "torch_autocast is off",
            {"torch_autocast": {"enabled": True}},
        ),
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
            "gradient_predivide_factor",
            "prescale_gradients divides by all ranks beforehand",
            {"prescale_gradients": False},
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "activation_checkpointing.cpu_checkpointing",
            "nothing is checkpointed, unless make_train_step(checkpoint=...) says so",
            {"activation_checkpointing": {"every": 1}},
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"total_num_steps": 10, "warmup_num_steps": 20},
                }
            },
            "scheduler.params.warmup_num_steps",
            "the warmup does not end within total_num_steps, which is 10",
            {"scheduler": {"params": {"total_num_steps": 20}}},
        ),
        (
            optimizer("Adam", lr=1.0)
            | {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}},
            "optimizer.params.lr",
            "WarmupLR sets the rate: its warmup_max_lr is 0.5",
            optimizer("Adam", lr=0.5),
        ),
        (
            optimizer("Adam", lr=1.0)
            | {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9999}}},
            "optimizer.params.lr",
            "WarmupDecayLR sets the rate: its warmup_max_lr is 0.001",
            {"scheduler": {"params": {"warmup_max_lr": 1.0}}},
        ),
    ],
)
def test_a_key_that_is_useless_beside_another_is_reported_and_no_error(
    source: dict[str, Any], key: str, reason: str, mended: dict[str, Any]
) -> None:
    found = Config.load(source).conflicts
    assert [(note.key, note.kind, note.reason) for note in found] == [(key, "conflict", reason)]

    def merged(one: Any, other: Any) -> Any:
        if not isinstance(one, dict) or not isinstance(other, dict):
            return other
        return one | {name: merged(one.get(name), value) for name, value in other.items()}

    assert Config.load(merged(source, mended)).conflicts == ()


def test_configurations_are_equal_by_their_values_and_hash_alike() -> None:
    spelt = Config.load({"steps_per_print": 10, "bfloat16": {"enabled": True}})
    assert spelt == Config.load({"bf16": {"enabled": True}}) != Config() and spelt.notes
    assert hash(spelt) == hash(Config.load({"bf16": {"enabled": True}}))


def test_what_is_not_given_conflicts_with_nothing() -> None:
    assert Config().conflicts == () == Config.load(FULL).conflicts


# --- optimizers of other kinds --------------------------------------------------------------------


def test_the_names_of_all_optimizers_are_read_in_any_case() -> None:
    for name in (*OPTIMIZERS, "Adamax", "NAdam", "RMSprop", "ASGD", "Rprop", "RAdam", "Adadelta"):
        for spelling in (name, name.lower(), name.upper()):
            cfg = Config.load(optimizer(spelling))
            assert cfg.optimizer.type == name
            assert Config.load(cfg.model_dump()) == cfg


def test_a_class_of_torch_has_its_own_parameters_and_defaults() -> None:
    cfg = Config.load(optimizer("nadam", weight_decay=0.5, maximize=True, foreach=None))
    params = cfg.optimizer.params
    assert (params.lr, params.betas, params.momentum_decay, params.maximize) == (
        2e-3,
        (0.9, 0.999),
        4e-3,
        True,
    )


def test_lamb_honours_what_adam_does_not() -> None:
    assert (
        Config.load(optimizer("Lamb", bias_correction=False)).optimizer.params.bias_correction
        is False
    )
    assert (
        Config.load(optimizer("Lamb", bias_correction="auto")).optimizer.params.bias_correction
        is True
    )


def _after_two_updates(block: Any, **asked: Any) -> list[float]:
    import torch

    from fzero.optim import ShardContents
    from sharding.layout import FlatLayout

    transform = block.transform(
        contents=ShardContents.whole(FlatLayout(("w",), ((2, 3),), 1)), **asked
    )
    param = torch.linspace(-1, 1, 6)
    state = transform.init(param)
    for grad in (
        torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0, 1.0]),
        torch.tensor([-3.0, 0.25, 1.0, 1.0, 2.0, -1.0]),
    ):
        _, param, state = transform.update(grad, param, state)
    return param.tolist()


@pytest.mark.parametrize(
    ("name", "kind", "params"),
    [
        (
            "Lamb",
            "",
            {
                "lr": 0.5,
                "betas": [0.5, 0.5],
                "eps": 0.5,
                "weight_decay": 0.5,
                "max_coeff": 0.5,
                "bias_correction": False,
            },
        ),
        ("Lamb", "", {"min_coeff": 5.0}),
        (
            "Adafactor",
            "matrix",
            {"lr": 0.5, "beta2_decay": -0.1, "eps": [2.0, 0.9], "weight_decay": 0.5},
        ),
        ("Adafactor", "matrix", {"d": 3.0, "lr": 0.5}),
        (
            "Muon",
            "muon",
            {
                "lr": 0.5,
                "muon_lr": 0.25,
                "momentum": 0.5,
                "weight_decay": 0.5,
                "ns_steps": 2,
                "nesterov": False,
            },
        ),
        (
            "Muon",
            "adam",
            {"lr": 0.5, "adam_lr": 0.25, "betas": [0.5, 0.5], "eps": 0.5, "weight_decay": 0.5},
        ),
        (
            "Adamax",
            "",
            {"lr": 0.5, "betas": [0.5, 0.5], "eps": 0.5, "weight_decay": 0.5, "maximize": True},
        ),
    ],
)
def test_every_hyper_parameter_of_these_reaches_the_update(
    name: str, kind: str, params: dict[str, Any]
) -> None:
    found = _after_two_updates(Config.load(optimizer(name, **params)).optimizer, kind=kind)
    for field in params:
        fewer = {key: value for key, value in params.items() if key != field}
        other = _after_two_updates(Config.load(optimizer(name, **fewer)).optimizer, kind=kind)
        assert other != found or (field == "lr" and f"{kind}_lr" in params), (
            f"{name}: {field} changes nothing"
        )


def test_a_schedule_moves_the_rates_of_muon_in_proportion_and_the_first_beta_of_its_adam() -> None:
    both = Config.load(optimizer("Muon", lr=0.5, muon_lr=0.25, adam_lr=0.125)).optimizer
    halved = Config.load(optimizer("Muon", lr=0.25, muon_lr=0.125, adam_lr=0.0625)).optimizer
    for kind in ("muon", "adam"):
        assert _after_two_updates(both, kind=kind, lr=0.25) == _after_two_updates(halved, kind=kind)
    moved = Config.load(optimizer("Muon", betas=[0.5, 0.95])).optimizer
    still = Config.load(optimizer("Muon")).optimizer
    assert _after_two_updates(still, kind="adam", momentum=0.5) == _after_two_updates(
        moved, kind="adam"
    )
    assert _after_two_updates(still, kind="muon", momentum=0.5) == _after_two_updates(
        moved, kind="muon"
    )
    beta = Config.load(optimizer("Adamax", betas=[0.5, 0.999])).optimizer
    assert _after_two_updates(
        Config.load(optimizer("Adamax")).optimizer, momentum=0.5
    ) == _after_two_updates(beta)


def test_muons_adam_has_deepspeeds_rate_where_none_is_given() -> None:
    assert Config.load(optimizer("Muon")).optimizer.params.adam_lr == 3e-4
    assert Config.load(optimizer("Muon", lr="auto")).optimizer.params.adam_lr == 3e-4
    assert Config.load(optimizer("Muon", lr=0.5)).optimizer.params.adam_lr is None
    assert "lr must not be 0 beside muon_lr" in refusal(optimizer("Muon", lr=0, muon_lr=0.5))
    assert "ns_method" in refusal(optimizer("Muon", ns_method="svd"))


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        (
            "Lamb",
            {},
            "Lamb: looks at full parameters, so that its transform needs contents, got None",
        ),
        ("Adafactor", {}, "Adafactor: looks at full parameters"),
        ("Muon", {"kind": "muon"}, "Muon: looks at full parameters"),
        ("Muon", {}, "Muon: the kind of parameters must be 'muon' or 'adam', got ''"),
    ],
)
def test_a_transform_says_what_it_needs(name: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.load(optimizer(name)).optimizer.transform(**asked)


@pytest.mark.parametrize("name", ["Lamb", "Adafactor", "Muon", "Adamax"])
def test_a_groups_hyper_parameters_are_checked_as_the_configurations(name: str) -> None:
    block = Config.load(optimizer(name, weight_decay=0.25)).optimizer
    changed = with_overrides(block, {"lr": 0.5}, "param_groups[0]")
    assert type(changed) is type(block) and (changed.params.lr, changed.params.weight_decay) == (
        0.5,
        0.25,
    )
    with pytest.raises(ConfigError, match=rf"param_groups\[0\].foo: .*; {name} has: lr, "):
        with_overrides(block, {"foo": 1}, "param_groups[0]")


def test_a_value_that_only_the_class_itself_refuses_is_refused_in_a_group_too() -> None:
    with pytest.raises(
        ConfigError, match=r"^param_groups\[0\]: .*Adamax: does not take .* Invalid epsilon"
    ):
        with_overrides(Config.load(optimizer("Adamax")).optimizer, {"eps": -1.0}, "param_groups[0]")


# --- what is shown --------------------------------------------------------------------------------


def test_the_reference_in_docs_is_the_models() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == reference(), (
        "make it anew: python -m fzero config --reference > docs/config.md"
    )


def blocks(block: Any) -> Iterator[Any]:
    yield block
    for name, field in block.model_fields.items():
        inner = block_of(field.annotation)
        if inner is not None and name not in ("optimizer", "scheduler"):
            yield from blocks(inner)


def test_every_honoured_key_has_a_meaning_in_the_reference() -> None:
    found = list(blocks(Config))
    assert len(found) > 5
    for block in found:
        assert all(field.description for field in block.model_fields.values())


def test_every_block_has_a_section_in_the_reference() -> None:
    page = reference()
    for name, field in Config.model_fields.items():
        if field.annotation in blocks(Config):
            section = page.partition(f"\n## `{name}`")[2].partition("\n## ")[0]
            assert all(f"| `{key}`" in section for key in field.annotation.model_fields)
    assert "=" not in "".join(
        re.findall(r"^\|[^|]*\|([^|]*)\|", page.partition("## Accepted")[0], flags=re.MULTILINE)
    ), "a block as a default"


def test_the_console_script_is_the_command() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["fzero"].partition(":")
    assert getattr(importlib.import_module(module), function) is main


def test_the_command_shows_values_and_reasons_or_every_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "config.json"
    given_keys = {
        "steps_per_print": 10,
        "wandb": {"enabled": True},
        "fp16": {"enabled": False, "hysteresis": 3},
    }
    path.write_text(json.dumps(SWITCHED_OFF | given_keys))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        assert main(["config", str(path)]) == 0
    shown = capsys.readouterr().out
    for row in (
        r"wandb +\{'enabled': True\} +not yet +for the engine",
        r"fp16\.hysteresis +3 +no effect +no loss is scaled",
        r"zero_optimization\.stage +3 +given",
        r"zero_optimization\.zero_hpz_partition_size +1 → None +given",
        r"steps_per_print +10 +accepted +for the engine",
        r"optimizer\.params\.lr +auto +auto",
        r" +auto +auto +transformers. Trainer fills it in",
    ):
        assert re.search(row, shown), shown
    assert "gradient_clipping" not in shown and re.search(
        r"\d+ other keys have their defaults; --defaults", shown
    )
    # in the file's order
    assert shown.index("fp16.enabled") < shown.index("optimizer.type") < shown.index("wandb")
    assert main(["config", str(path), "--defaults"]) == 0
    assert re.search(r"gradient_clipping +1\.0 +default", capsys.readouterr().out)
    path.write_text('{"zero_optimization": {"stage": 7}, "gradient_cliping": 1}')
    assert main(["config", str(path)]) == 1
    errors = capsys.readouterr().err
    assert (
        "zero_optimization.stage: must be 0, 1, 2 or 3" in errors
        and "did you mean 'gradient_clipping'" in errors
    )


HF_FILE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""A file of transformers' documentation, which its Trainer fills in."""


def test_a_file_for_the_trainer_has_no_conflicts_and_its_autos_are_explained_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(HF_FILE))
    assert main(["config", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "conflict" not in shown
    assert (
        shown.count("the Trainer switches its block on") == 1
        and shown.count("Trainer fills it in") == 1
    )
    assert len(re.findall(r" auto +auto", shown)) == 9
    path.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 2},
                "fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 2},
            }
        )
    )
    assert main(["config", str(path)]) == 0
    assert re.search(r"fp16\.hysteresis +2 +conflict +the scale is fixed", capsys.readouterr().out)


def test_a_warning_is_shown_by_the_first_rank_only() -> None:
    program = """
import os, torch
second = os.fork() == 0
os.environ["RANK"] = str(int(second))
if second:
    os.dup2(1, 2)
import fzero
fzero.Config.load({"comet": {"enabled": True}})
if not second:
    assert os.wait()[1] == 0
"""
    job = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=job, capture_output=True, text=True, check=True)
    assert "ConfigWarning: comet" in ended.stderr and "ConfigWarning" not in ended.stdout


@pytest.mark.parametrize("size", [0, 1, None])
def test_tensor_parallelism_of_one_rank_is_off(size: int | None) -> None:
    block = {} if size is None else {"autotp_size": size}
    assert Config.load({"tensor_parallel": {**block, "tp": {"tp_size": 1}}}) is not None


def test_a_leading_tilde_of_every_path_is_the_home_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    offload = {"device": "nvme", "nvme_path": "~/fast"}
    cfg = Config.load(
        {"zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload}}
    )
    assert cfg.zero_optimization.offload_optimizer.nvme_path == "/home/me/fast"
    assert cfg.zero_optimization.offload_param.nvme_path == "/home/me/fast"
    keys = read_keys(
        {"csv_monitor": {"output_path": "~/logs"}, "flops_profiler": {"output_file": "a/~/b"}}
    )[1]
    assert (
        keys.csv_monitor.output_path == "/home/me/logs"
        and keys.flops_profiler.output_file == "a/~/b"
    )
