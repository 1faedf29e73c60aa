"""DeepSpeed's models of a configuration, and what its configuration class answers: held
to the real package.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Net, quiet, settings
from pydantic import Field
from training import make

import fzero
from fzero.config.deepspeed_models import DeepSpeedConfigModel
from fzero.deepspeed.runtime import config_utils
from fzero.deepspeed.runtime.config import DeepSpeedConfig
from fzero.deepspeed.runtime.zero import config, leaf_module_config, offload_config

REAL = pytest.mark.long
"""For tests that import the real package, which takes some seconds."""


def _theirs(module: str) -> Any:
    with quiet():
        return importlib.import_module(f"deepspeed.runtime.{module}")


def _outcome(made: Callable[[], Any]) -> Any:
    """What a model holds as JSON and which fields were given, or the class of the
    error.
    """
    try:
        with quiet():
            model = made()
            fields = type(model).model_fields
            held = {name: getattr(model, name, "absent") for name in fields}
            blocks = {
                name: sorted(x.model_fields_set)
                for name, x in held.items()
                if hasattr(x, "model_fields_set")
            }
            return (
                json.dumps(model.model_dump(mode="json"), sort_keys=True),
                sorted(model.model_fields_set),
                blocks,
            )
    except Exception as error:
        return type(error).__name__


OFFLOAD = {"device": "cpu"}
BLOCKS: list[dict[str, Any]] = [
    {},
    {"stage": 3},
    {"stage": 3, "overlap_comm": False},
    {"stage": 4},
    {"stage": "2"},
    {"stage": "auto"},
    {"stag": 2},
    {"stage3_prefetch_bucket_size": 7},
    {"prefetch_bucket_size": 7},
    {"stage3_max_live_parameters": -1},
    {"reduce_bucket_size": 0},
    {"reduce_bucket_size": 5e8},
    {"allgather_bucket_size": 1.5},
    {"stage3_gather_16bit_weights_on_model_save": True},
    {"stage3_gather_fp16_weights_on_model_save": True},
    {"cpu_offload": True},
    {"cpu_offload": False},
    {"cpu_offload_param": True},
    {"cpu_offload_use_pin_memory": True},
    {"cpu_offload": True, "offload_optimizer": OFFLOAD},
    {"offload_optimizer": OFFLOAD},
    {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/x",
            "ratio": 0.5,
            "pipeline_read": True,
        },
    },
    {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    {"offload_param": {"device": "tpu"}},
    {"offload_param": {"device": "none", "buffer_count": 3, "max_in_cpu": 9}},
    {"offload_optimizer": {"buffer_size": 3}},
    {"leaf_module": {"classes": "A", "names": ["a", "a"]}},
    {"leaf_module": None},
    {"leaf_module": 3},
    {"mics_shard_size": 2},
    {"zenflow": {"topk_ratio": 0.5}},
    {"zenflow": {"select_strategy": "x"}},
    {"zenflow": {"update_interval": 0}},
    {"zeropp_loco_param": {"err_beta": 0.8}},
    {"zero_hpz_partition_size": -1},
    {"stage": 3, "elastic_checkpoint": True},
]


@REAL
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_block_zero_optimization_is_read_as_deepspeed_reads_it(block: dict[str, Any]) -> None:
    there, here = _theirs("zero.config").get_zero_config, config.get_zero_config
    assert _outcome(lambda: here({"zero_optimization": block})) == _outcome(
        lambda: there({"zero_optimization": block})
    )


@REAL
@pytest.mark.parametrize(
    "given", [{}, {"zero_optimization": True, "allgather_size": 7}, {"zero_optimization": False}]
)
def test_the_old_forms_of_the_block_are_read_as_deepspeed_reads_them(given: dict[str, Any]) -> None:
    there, here = _theirs("zero.config").get_zero_config, config.get_zero_config
    assert _outcome(lambda: here(given)) == _outcome(lambda: there(given))


MODELS = [
    ("zero.config", config, "DeepSpeedZeroConfig"),
    ("zero.offload_config", offload_config, "DeepSpeedZeroOffloadParamConfig"),
    ("zero.offload_config", offload_config, "DeepSpeedZeroOffloadOptimizerConfig"),
    ("zero.leaf_module_config", leaf_module_config, "DeepSpeedZeroLeafModuleConfig"),
    ("zero.config", config, "ZenFlowConfig"),
]


@REAL
@pytest.mark.parametrize(("place", "module", "name"), MODELS, ids=[name for *_, name in MODELS])
def test_models_have_deepspeeds_fields_defaults_and_assignments(
    place: str, module: Any, name: str
) -> None:
    there, here = getattr(_theirs(place), name), getattr(module, name)
    shape = [
        {
            n: (f.alias, repr(f.get_default(call_default_factory=True)), str(f.metadata))
            for n, f in x.model_fields.items()
        }
        for x in (there, here)
    ]
    assert shape[0] == shape[1] and issubclass(here, config_utils.DeepSpeedConfigModel)
    for field in there.model_fields:
        for value in (-1, 0, 1, "x", True, None, 0.5, "cpu", {"device": "cpu"}):
            found = []
            for cls in (there, here):
                model = cls()
                found.append(_outcome(lambda: [setattr(model, field, value), model][1]))  # noqa: B023
            assert found[0] == found[1], (field, value)


def _script_model(base: type[Any]) -> type[Any]:
    class Inner(base):  # type: ignore[misc]
        size: int = 3

    class Outer(base):  # type: ignore[misc]
        new: int = 0
        inner: Inner = Inner()
        old: str = Field(
            "0", json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": int}
        )
        kept: int = Field(
            5, json_schema_extra={"deprecated": True, "new_param": "new", "set_new_param": False}
        )
        gone: int = Field(
            5, json_schema_extra={"deprecated": True, "deprecated_msg": "it does nothing"}
        )
        deep: int = Field(1, json_schema_extra={"deprecated": True, "new_param": "inner.size"})

    return Outer


@REAL
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"old": "7"},
        {"old": "7", "new": 3},
        {"kept": 1},
        {"gone": 2},
        {"deep": 9},
        {"old": "x"},
        {"new": "auto"},
    ],
)
def test_deprecated_fields_of_a_scripts_model_move_as_in_deepspeed(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    there, here = (
        _script_model(_theirs("config_utils").DeepSpeedConfigModel),
        _script_model(DeepSpeedConfigModel),
    )
    assert _outcome(lambda: here(**given)) == _outcome(lambda: there(**given))
    with contextlib.suppress(Exception):
        here(**given)
    assert len([r for r in caplog.records if "is deprecated" in r.message]) == len(
        {"old", "kept", "gone", "deep"} & {*given}
    )


# --- the configuration as a whole -----------------------------------------------------------------

OWN = {
    "activation_checkpointing_config",
    "autotuning_config",
    "checkpoint_config",
    "compile_config",
    "compression_config",
    "data_efficiency_config",
    "datastates_config",
    "expert_parallel_config",
    "nebula_config",
    "tensor_parallel_config",
    "timers_config",
    "weight_quantization_config",
    "checkpoint_parallel_write_pipeline",
    "seq_parallel_communication_data_type",
}
"""Attributes of DeepSpeed's class of features that fzero does not have, or configures
in another way.
"""
IN_PART = {
    "float16_config": (),
    "bfloat16_config": ("immediate_grad_update",),
    "hybrid_engine": ("max_out_tokens",),
    "flops_profiler_config": (),
    "monitor_config": (),
    "comms_config": (),
    "zero_config": (),
}
"""Blocks, whose fields are compared one by one, but for those named."""
GIVEN: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 7,
    "gradient_clipping": 0.25,
    "prescale_gradients": True,
    "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 9, "cpu_offload": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "fp16": {"enabled": True, "loss_scale_window": 7},
    "checkpoint": {"tag_validation": "Fail"},
    "wall_clock_breakdown": True,
    "zero_allow_untested_optimizer": True,
    "data_types": {"grad_accum_dtype": "fp32"},
    "aio": {"queue_depth": 4},
    "csv_monitor": {"enabled": True, "output_path": "x"},
    "comms_logger": {"enabled": True, "verbose": True},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.01},
    "dump_state": True,
    "dataloader_drop_last": True,
    "flops_profiler": {"enabled": True, "top_modules": 3},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "eigenvalue": {"enabled": True, "tol": 0.5, "layer_name": "blocks"},
}


def _fields(block: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(block, "__dict__", {})
    return {name: value for name, value in found.items() if not hasattr(value, "__dict__")}


@REAL
@pytest.mark.parametrize("given", [{"train_batch_size": 4}, GIVEN], ids=["defaults", "given"])
def test_the_configuration_answers_as_deepspeeds_does(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = (
        _theirs("config").DeepSpeedConfig(json.loads(json.dumps(given))),
        DeepSpeedConfig(given),
    )
    compared = 0
    for name, theirs in vars(there).items():
        if name in OWN:
            with pytest.raises(
                AttributeError, match=rf"DeepSpeedConfig.{name}: fzero has none; engine.config"
            ):
                getattr(here, name)
        elif name in IN_PART:
            ours = getattr(here, name)
            for field, value in _fields(theirs).items():
                if field not in IN_PART[name]:
                    assert getattr(ours, field) == value, (name, field)
                    compared += 1
        else:
            assert getattr(here, name) == theirs, name
            compared += 1
    assert compared > 100


def test_a_name_that_deepspeed_has_not_is_no_attribute() -> None:
    found = DeepSpeedConfig({"train_batch_size": 1})
    assert hasattr(found, "eigenvalue_tol") and not hasattr(found, "eigenvalue_steps")


def test_the_engine_has_its_configuration_under_deepspeeds_name() -> None:
    given = settings(2, train_batch_size=12) | {
        "zero_optimization": {"stage": 2, "round_robin_gradients": True}
    }
    engine = fzero.initialize(model=make(Net), config=given)[0]
    found = engine._config
    assert (
        isinstance(found, DeepSpeedConfig)
        and found.zero_config.stage == found.zero_optimization_stage == 2
    )
    assert (
        found.zero_config.round_robin_gradients and found.zero_enabled and found is engine._config
    )
    before = engine.train_batch_size()
    engine.set_train_batch_size(2 * before)
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (
        2 * before,
        engine.gradient_accumulation_steps(),
    )
    with pytest.raises(AttributeError, match=r"engine._config.gradient_clipping: cannot be set"):
        found.gradient_clipping = 0.5


# --- rollouts -------------------------------------------------------------------------------------


@REAL
def test_rollouts_are_built_from_the_same_configurations() -> None:
    tokenizer, engine = SimpleNamespace(pad_token_id=0, eos_token_id=None), object()
    given: list[Any] = [
        SimpleNamespace(engine="hybrid_engine"),
        SimpleNamespace(engine="vllm"),
        {"engine": "hybrid_engine"},
        None,
        SimpleNamespace(
            engine="hybrid_engine",
            use_graph_capture=True,
            enable_profiling=True,
            use_shared_prefill=True,
        ),
    ]
    outcomes = []
    for package in ("deepspeed", "fzero.deepspeed"):
        with quiet():
            rollout = importlib.import_module(f"{package}.runtime.rollout")
        found: list[Any] = []
        for cfg in [rollout.RolloutConfig(), *given]:
            for engine_given, tokenizer_given in (
                (engine, tokenizer),
                (None, tokenizer),
                (engine, None),
            ):
                try:
                    made = rollout.build_rollout(cfg, engine_given, tokenizer_given)
                    found.append(
                        [
                            made.engine is engine,
                            made.tokenizer is tokenizer,
                            made.use_graph_capture,
                            made.enable_profiling,
                            made.use_shared_prefill,
                            made.get_last_profile(),
                        ]
                    )
                except Exception as error:
                    found.append(type(error).__name__)
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
