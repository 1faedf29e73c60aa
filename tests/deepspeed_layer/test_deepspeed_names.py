"""The names of DeepSpeed that other packages import, imported as they do, and held to
the real package where it can be called.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Net, assert_close, criterion, data, made, mine, quiet, settings
from ranks import RankPool
from torch import Tensor, nn
from training import make

import fzero
import fzero.deepspeed as deepspeed
from fzero.deepspeed.engine.settings_table import GIVEN, REFUSED
from fzero.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from fzero.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from fzero.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from fzero.deepspeed.utils.torch import required_torch_version

CLIENTS = {
    "accelerate": """
        :zero.Init zero.GatheredParameters DeepSpeedEngine initialize runtime.lr_schedules.VALID_LR_SCHEDULES
        comm:init_distributed get_rank  ops.adam:DeepSpeedCPUAdam  ops.adagrad:DeepSpeedCPUAdagrad  ops.lion:DeepSpeedCPULion
        utils:set_z3_leaf_modules groups  checkpoint.utils:clone_tensors_for_torch_save
        launcher.runner:DEEPSPEED_ENVIRONMENT_NAME  runtime.utils:move_to_device
    """,
    "transformers": """
        :zero.register_external_parameter utils.is_initialized checkpointing.is_configured
        accelerator:get_accelerator  utils:logger  runtime.zero:partition_parameters
        runtime.zero.partition_parameters:zero_wrapper_for_fp_tensor_constructor _orig_torch_arange get_accelerator
    """,
    "trl": (
        ":zero.GatheredParameters zero.unwrap_model_for_generation __version__ "
        "runtime.engine:DeepSpeedEngine"
    ),
    "peft": ":zero.GatheredParameters  utils:safe_get_full_fp32_param",
    "lightning": """
        :init_distributed zero.Init checkpointing.checkpoint checkpointing.configure checkpointing.reset
        ops.adam:FusedAdam  utils.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint  runtime.config:DeepSpeedConfig
        runtime.lr_schedules:WarmupLR WarmupDecayLR OneCycle LRRangeTest WarmupCosineLR
        runtime.base_optimizer:ZeROOptimizer  accelerator:get_accelerator  runtime.utils:see_memory_usage
    """,
    "openrlhf": """
        runtime.zero.partition_parameters:ZeroParamStatus  runtime.zero.offload_config:OffloadDeviceEnum OffloadStateTypeEnum
        ops.adam:DeepSpeedCPUAdam FusedAdam  utils:safe_get_full_grad  :init_distributed
    """,
    "ms-swift": (
        ":utils.logger.setLevel utils.groups.get_data_parallel_rank "
        "runtime.zero.utils:is_zero_param"
    ),
    "axolotl": (
        ":zero.GatheredParameters utils.set_z3_leaf_modules runtime.zero.config:ZeroStageEnum"
    ),
    "sentence-transformers": ":DeepSpeedEngine zero.GatheredParameters",
    "the examples": """
        :add_config_arguments add_tuning_arguments DeepSpeedConfigError DeepSpeedOptimizer OnDevice version
        moe.utils:split_params_into_different_moe_groups_for_optimizer is_moe_param has_moe_layers
        elasticity:compute_elastic_config  profiling.flops_profiler:get_model_profile FlopsProfiler
        runtime.dataloader:RepeatingLoader DeepSpeedDataLoader  runtime.zero:MiCS_Init  git_version_info:git_hash
        utils:RepeatingLoader instrument_w_nvtx log_dist OnDevice safe_update_full_grad_vectorized get_z3_leaf_modules
        utils.logging:logger log_dist warning_once print_json_dist  utils.timer:SynchronizedWallClockTimer ThroughputTimer
        comm:all_reduce get_local_rank get_world_group ReduceOp barrier is_initialized
        utils:safe_get_local_fp32_param safe_set_local_fp32_param safe_get_local_grad safe_set_local_optimizer_state
        runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3  runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer
        runtime.activation_checkpointing:checkpointing  ops.adam.cpu_adam:DeepSpeedCPUAdam  ops.lion.fused_lion:FusedLion
    """,
}
"""Module and names as each package takes them: `module:name name`; without a module
they are attributes of deepspeed.
"""


def _wanted() -> list[tuple[str, str, str]]:
    found = []
    for client, text in CLIENTS.items():
        module = ""
        for word in text.split():
            module, _, name = word.rpartition(":") if ":" in word else (module, "", word)
            found.append((client, module, name))
    return found


@pytest.mark.parametrize(("client", "module", "name"), _wanted())
def test_a_client_finds_its_names(client: str, module: str, name: str) -> None:
    found: Any = importlib.import_module(".".join(filter(None, ("fzero.deepspeed", module))))
    for part in name.split("."):
        found = getattr(found, part)


REAL = pytest.mark.long
"""For tests that import the real package, which takes some seconds."""


# --- the engine's configuration -------------------------------------------------------------------

FAILING = {"compile_zero_optimization_stage", "swap_tensor_config", "random_ltd_initialize"}
"""Methods that raise in DeepSpeed where nothing is configured."""
DIFFERING = {
    "tensor_parallel_config",
    "data_efficiency_config",
    "data_sampling_config",
    "random_ltd_config",
    "aio_config",
    "loss_scale",
    "zero_gather_16bit_weights_on_model_save",
    "zero_reduce_bucket_size",
    "zero_allgather_bucket_size",
    "dynamic_loss_scale",
}
"""Methods whose answer is fzero's own: what it does, or a shorter block for a feature
that is off.
"""
NOT_READ = FAILING | DIFFERING
OF_OTHER_TYPES = {
    *("get_data_types", "optimizer_name", "zero_optimization", "zero_offload_optimizer"),
}
GIVEN_KEYS: dict[str, Any] = {
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "round_robin_gradients": True,
        "sub_group_size": 12345,
        "contiguous_gradients": False,
        "stage3_max_live_parameters": 77,
        "stage3_prefetch_bucket_size": 55,
        "stage3_param_persistence_threshold": 44,
        "offload_optimizer": {"device": "cpu"},
    },
    "fp16": {
        "enabled": True,
        "initial_scale_power": 10,
        "loss_scale_window": 7,
        "hysteresis": 3,
        "min_loss_scale": 2,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "checkpoint": {"tag_validation": "Fail"},
    "prescale_gradients": True,
    "gradient_clipping": 0.25,
    "wall_clock_breakdown": False,
}


@REAL
@pytest.mark.parametrize("keys", [{}, GIVEN_KEYS], ids=["defaults", "given"])
def test_what_the_engine_says_of_its_configuration_is_what_deepspeeds_says(
    keys: dict[str, Any],
) -> None:
    with quiet():
        config = importlib.import_module("deepspeed.runtime.config")
        real: Any = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
        read = config.DeepSpeedConfig({"train_batch_size": 1, **keys})

        class Fake:
            _config, optimizer, client_optimizer, global_rank = read, None, None, 0

            def __getattr__(self, name: str) -> Any:
                found = real.__dict__[name]
                return (
                    found.fget(self)
                    if isinstance(found, property)
                    else types.MethodType(found, self)
                )

        fake, compared = Fake(), []
        given = {"optimizer": {"type": "AdamW"}} | keys
        engine = fzero.initialize(model=make(Net), config={"train_batch_size": 1, **given})[0]
        if not keys:
            engine.config.pop("optimizer")
        for name, method in real.__dict__.items():
            inner = method.fget if isinstance(method, property) else method
            if (
                name.startswith("_")
                or name in NOT_READ | REFUSED.keys()
                or not inspect.isfunction(inner)
            ):
                continue
            source = inspect.getsource(inner)
            if len(inspect.signature(inner).parameters) != 1 or "self._config" not in source:
                continue
            theirs, ours = (getattr(x, name) for x in (fake, engine))
            theirs, ours = (x if isinstance(method, property) else x() for x in (theirs, ours))
            if name in OF_OTHER_TYPES or theirs == ours:
                compared.append(name)
                continue
            raise AssertionError(f"{name}: {ours!r} here, {theirs!r} there")
    assert len(compared) > 100 and GIVEN.keys() - NOT_READ <= set(compared)


def test_what_is_not_configuration_is_refused_in_words() -> None:
    engine = made(1)
    with pytest.raises(
        RuntimeError,
        match=r"engine.allreduce_bucket: must not be called.*engine.backward\(loss\) reduces",
    ):
        engine.allreduce_bucket()
    with pytest.raises(AttributeError, match=r"engine.optimizer: has no 'averaged_gradients'"):
        getattr(engine.optimizer, "averaged_gradients")  # noqa: B009
    with pytest.raises(RuntimeError, match=r"call engine.backward\(loss\)"):
        engine.optimizer.backward(None)


def test_a_script_finds_its_tools_on_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = made(3, train_batch_size=12, csv_monitor=monitor, wall_clock_breakdown=True)
    engine.timers("mine").start()
    for index in range(4):
        x, y = data(index)
        engine.backward(criterion(engine(x), y))
        engine.step()
    engine.timers("mine").stop()
    engine.timers.log(["mine", "other"])
    assert "time (ms) | mine: " in capsys.readouterr().out
    assert engine.tput_timer.global_step_count == 4 and engine.tput_timer.avg_samples_per_sec() > 0
    engine.monitor.write_events([("Eval/loss", 0.5, 48)])
    assert (tmp_path / "job" / "Eval_loss.csv").read_text() == "step,Eval/loss\n48,0.5\n"
    assert (
        engine.mpu,
        engine.data_parallel_group,
        engine.seq_parallel_group,
        engine.has_moe_layers,
    ) == (
        None,
        None,
        None,
        False,
    )
    engine.empty_partition_cache()
    dataset = [(x, int(y)) for x, y in zip(*data(0))]
    batches = list(engine.deepspeed_io(dataset, batch_size=5, route="eval"))
    assert [len(y) for _, y in batches] == [5, 5, 2] and torch.equal(
        torch.cat([x for x, _ in batches]), data(0)[0]
    )
    assert {tuple(x.tolist()) for x, _ in engine.deepspeed_io(dataset, batch_size=1).dataset} == {  # type: ignore[attr-defined]
        tuple(x.tolist()) for x in data(0)[0]
    }


# --- errors and classes that scripts ask for ------------------------------------------------------


class _Path:
    """A path that is no pathlib.Path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def _in_no_sync(engine: Any) -> None:
    with engine.no_sync():
        engine.step()


ASSERTED = {
    "no model": lambda: fzero.initialize(model=None, config=settings(1)),
    "two configurations": lambda: fzero.initialize(
        model=make(Net), config=settings(1), config_params=settings(1)
    ),
    "no batch size": lambda: DeepSpeedConfig(
        {"gradient_accumulation_steps": 2, "train_batch_size": 3}
    ),
    "no_sync in stage 2": lambda: made(2).no_sync().__enter__(),
    "step in no_sync": lambda: _in_no_sync(made(1)),
    "scale of no scalar": lambda: made(1).scale(torch.ones(2)),
    "backward of no tensor": lambda: made(1).backward(1.0),
    "no version": lambda: required_torch_version(),
}
"""What DeepSpeed asserts, so that scripts catch an AssertionError."""


@pytest.mark.parametrize("case", ASSERTED)
def test_what_deepspeed_asserts_is_an_assertion_error_here(case: str) -> None:
    with pytest.raises(AssertionError):
        ASSERTED[case]()


@pytest.mark.parametrize("name", deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES)
def test_a_configured_scheduler_is_an_instance_of_its_class(name: str) -> None:
    params = {
        "LRRangeTest": {},
        "WarmupLR": {},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    }
    block = {
        "type": name,
        "params": params.get(name, {"total_num_steps": 9, "warmup_num_steps": 2}),
    }
    scheduler = fzero.initialize(model=make(Net), config=settings(1, scheduler=block))[3]
    classes = {
        x: getattr(deepspeed.runtime.lr_schedules, x)
        for x in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    }
    expected = {name} | ({"WarmupLR"} if name == "WarmupDecayLR" else set())
    assert {x for x, cls in classes.items() if isinstance(scheduler, cls)} == expected


def test_paths_of_any_class_are_paths(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(settings(1)))
    engine = fzero.initialize(model=make(Net), config=_Path(tmp_path / "c.json"))[0]  # type: ignore[arg-type]
    _steps(engine, 0)
    engine.save_checkpoint(_Path(tmp_path))  # type: ignore[arg-type]
    engine.save_16bit_model(_Path(tmp_path))  # type: ignore[arg-type]
    assert engine.load_checkpoint(_Path(tmp_path))[0] is not None  # type: ignore[arg-type]


def test_errors_of_elasticity_have_deepspeeds_classes() -> None:
    elasticity = deepspeed.elasticity
    block = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.1}
    for wrong in (
        {},
        {"elasticity": {"enabled": True}},
        {"elasticity": block | {"micro_batch_sizes": [0]}},
    ):
        with pytest.raises(elasticity.ElasticityConfigError) as error:
            elasticity.compute_elastic_config(wrong, "0.19.6")
        assert isinstance(error.value, elasticity.ElasticityError)
    with pytest.raises(elasticity.ElasticityIncompatibleWorldSize):
        elasticity.compute_elastic_config({"elasticity": block}, "0.19.6", world_size=3)


# --- the optimizer --------------------------------------------------------------------------------


def _steps(engine: Any, *indices: int) -> None:
    for index in indices:
        x, y = mine(engine, data(index))
        engine.backward(criterion(engine(x), y))
        engine.step()


BF16 = {"bf16": {"enabled": True, "auto_cast": True}, "data_types": {"buffer_dtype": "bf16"}}
NVME = "nvme"


def _saves_its_part(stage: int, keys: dict[str, Any], folder: Path | None) -> None:
    cfg = settings(stage, **keys)
    if folder is not None:
        cfg["zero_optimization"]["offload_optimizer"] = {"device": NVME, "nvme_path": str(folder)}
    engine, optimizer, *_ = fzero.initialize(model=make(Net), config=cfg)
    assert optimizer is not None
    _steps(engine, 0, 1)
    saved = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(optimizer.state_dict())
    weights = engine.module_state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    _steps(engine, 2)
    expected = None
    for _ in range(2):
        engine.load_module_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert optimizer.get_lr() == [1e-2]
        _steps(engine, 3, 4)
        found = engine.module_state_dict()
        assert expected is None or all(torch.equal(x, expected[name]) for name, x in found.items())
        expected = found
    other, theirs, *_ = fzero.initialize(model=make(Net), config=settings(stage, **keys))
    assert theirs is not None
    if folder is None:
        other.load_module_state_dict(weights)
        theirs.load_state_dict([saved] * engine.world_size)
        _steps(other, 3, 4)
        assert expected is not None
        assert all(torch.equal(x, expected[name]) for name, x in other.module_state_dict().items())
    with pytest.raises(ValueError, match=r"must be given what optimizer.state_dict"):
        theirs.load_state_dict({**saved, "world_size": 17})


@pytest.mark.parametrize(
    ("stage", "keys", "in_files"), [(1, {}, False), (3, BF16, False), (2, {}, True)]
)
def test_a_rank_saves_and_loads_its_own_part_of_the_optimizer(
    ranks: RankPool, tmp_path: Path, stage: int, keys: dict[str, Any], in_files: bool
) -> None:
    ranks(2, _saves_its_part, stage, keys, tmp_path if in_files else None)


def test_the_optimizer_has_what_scripts_read() -> None:
    engine = made(3, fp16={"enabled": True, "initial_scale_power": 5, "loss_scale_window": 9})
    optimizer = engine.optimizer
    assert optimizer is not None
    scaler = optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.dynamic, scaler.scale_window) == (32.0, True, 9)
    assert (optimizer.clip_grad, engine.loss_scale, engine.loss_scale()) == (1.0, 32, 0.0)
    assert not hasattr(made(2).optimizer, "parameter_offload")
    # as TRL removes hooks around a generation, and adds them again
    offload = optimizer.parameter_offload
    params = [
        *offload.module.named_parameters(recurse=True),
        *offload.module.ds_external_parameters(),
    ]
    for hook in (*params, *offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload._register_deepspeed_module(offload.module)
    optimizer.offload_states(
        include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu, pin_memory=True
    )
    with pytest.raises(RuntimeError, match="call reload_states first"):
        engine(data(0)[0])
    engine.reload_states(non_blocking=True)


def _generates() -> tuple[Tensor, bool]:
    engine = made(3)
    params = list(engine.module.parameters())
    to_fetch = [
        p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE
    ]
    assert len(to_fetch) == len(params) and sum(p.ds_numel for p in params) == sum(
        p.numel() for p in make(Net).parameters()
    )
    with deepspeed.zero.GatheredParameters(to_fetch):
        assert {p.ds_status for p in params} == {ZeroParamStatus.AVAILABLE}
    with deepspeed.zero.unwrap_model_for_generation(engine) as model:
        found = [
            model.module(mine(engine, data(0))[0])["logits"] for _ in range(engine.global_rank + 1)
        ]
    assert {p.ds_status for p in params} == {ZeroParamStatus.NOT_AVAILABLE}
    engine.destroy()
    return found[0].detach(), hasattr(params[0], "ds_id")


def test_a_script_sees_which_parameters_a_rank_holds(ranks: RankPool) -> None:
    for rank, (found, is_marked) in enumerate(ranks(2, _generates)):
        expected = make(Net)(data(0)[0])["logits"].detach().chunk(2)[rank]
        torch.testing.assert_close(found, expected)
        assert not is_marked


# --- single parameters ----------------------------------------------------------------------------


def _reads_parts(stage: int, folder: Path, where: str) -> dict[str, list[Tensor]]:
    cfg = settings(stage, train_micro_batch_size_per_gpu=6, gradient_accumulation_steps=2)
    if where == NVME:
        nvme = {"device": NVME, "nvme_path": str(folder)}
        cfg["zero_optimization"] |= {"offload_optimizer": nvme} | (
            {"offload_param": nvme} if stage == 3 else {}
        )
    engine = fzero.initialize(model=make(Net), config=cfg)[0]
    tools, param = deepspeed.utils, engine.module.head.weight
    assert tools.safe_get_full_grad(param) is None
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x), y))
    early = tools.safe_get_full_grad(param)
    engine.step()
    x, y = mine(engine, data(1))
    engine.backward(criterion(engine(x), y))
    full, part = tools.safe_get_full_grad(param), tools.safe_get_local_grad(param)
    assert full is not None and early is not None and part is not None
    tools.safe_set_local_grad(param, 2 * part)
    doubled = tools.safe_get_full_grad(param)
    tools.safe_update_full_grad_vectorized([param], lambda grad, p: grad / 2)
    restored = tools.safe_get_full_grad(param)
    engine.step()
    moment = tools.safe_get_full_optimizer_state(param, "exp_avg")
    tools.safe_set_full_optimizer_state(param, 3 * moment, "exp_avg")
    tools.safe_set_full_fp32_param(param, tools.safe_get_full_fp32_param(param) + 1)
    local = tools.safe_get_local_optimizer_state(param, "exp_avg")
    tools.safe_set_local_optimizer_state(param, local + 1, "exp_avg")
    tools.safe_set_local_fp32_param(param, tools.safe_get_local_fp32_param(param) + 1)
    parts = [
        tools.safe_get_local_fp32_param(param),
        tools.safe_get_local_optimizer_state(param, "exp_avg"),
    ]
    wholes = [
        tools.safe_get_full_fp32_param(param),
        tools.safe_get_full_optimizer_state(param, "exp_avg"),
    ]
    after = engine.module_state_dict()["head.weight"]
    _steps(engine, 2)
    _steps(engine, 3)
    weights = list(engine.module_state_dict().values())
    return {
        "grads": [early, full, doubled, restored],
        "moment": [moment],
        "wholes": wholes,
        "parts": parts,
        "weights": [after, *weights],
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stage", "where"), [(0, "device"), (1, "device"), (3, "device"), (1, NVME), (3, NVME)]
)
def test_parts_and_wholes_of_a_parameter_are_read_and_written(
    ranks: RankPool, tmp_path: Path, stage: int, where: str
) -> None:
    found = ranks(2, _reads_parts, stage, tmp_path, where)
    plain = make(Net)
    sums = [torch.zeros(())]
    for index in range(2):
        loss = criterion(plain(data(index)[0]), data(index)[1]) / 2
        sums.append(sums[-1] + torch.autograd.grad(loss, plain.head.weight)[0])
    early, full = sums[1:]
    for one in found:
        for value, expected in zip(one["grads"], (early, full, 2 * full, full), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        weight, moment = one["wholes"]
        torch.testing.assert_close(moment, 3 * one["moment"][0] + 1)
        torch.testing.assert_close(one["weights"][0], weight)
    for index in range(2):
        parts = [one["parts"][index] for one in found]
        joined = parts[0] if stage == 0 else torch.cat(parts)
        assert torch.equal(joined.view(3, -1), found[0]["wholes"][index])


def test_files_take_what_memory_takes(ranks: RankPool, tmp_path: Path) -> None:
    here, there = (
        ranks(2, _reads_parts, 3, tmp_path / where, where)[0] for where in ("device", NVME)
    )
    assert all(
        torch.equal(x, y) for key in here for x, y in zip(here[key], there[key], strict=True)
    )


# --- schedules, optimizers, configuration ---------------------------------------------------------

SCHEDULES = [
    ("WarmupLR", {"warmup_max_lr": [0.1, 0.3], "warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_type": "linear", "warmup_num_steps": 4}),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_max_lr": 0.1, "warmup_num_steps": 4}),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 3, "cos_min_ratio": 0.1}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 4,
            "decay_step_size": 3,
        },
    ),
]


@REAL
@pytest.mark.parametrize(("name", "params"), SCHEDULES)
def test_schedules_write_deepspeeds_rates(name: str, params: dict[str, Any]) -> None:
    def rates(module: Any) -> list[Any]:
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.2, 0.4)]
        optimizer = torch.optim.AdamW(groups)
        schedule = getattr(module, name)(optimizer, **params)
        found = []
        for _ in range(15):
            optimizer.step()
            schedule.step()
            found.append(
                [*schedule.get_last_lr(), *(group["lr"] for group in optimizer.param_groups)]
            )
            if name == "OneCycle":
                found[-1].append(optimizer.param_groups[0]["betas"][0])
        loaded = getattr(module, name)(optimizer, **params)
        loaded.load_state_dict(schedule.state_dict())
        loaded.step()
        return [*found, loaded.get_last_lr()]

    with quiet():
        theirs = rates(importlib.import_module("deepspeed.runtime.lr_schedules"))
    torch.testing.assert_close(rates(deepspeed.runtime.lr_schedules), theirs)


def test_a_script_passes_its_own_schedule_and_lion() -> None:
    model = make(Net)
    optimizer = deepspeed.ops.lion.FusedLion(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_num_steps=3)
    config = {"train_batch_size": 12, "gradient_clipping": 0.0}
    engine, _, _, found = fzero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    plain = make(Net)
    momenta = [torch.zeros_like(p) for p in plain.parameters()]
    for index in range(4):
        lr = engine.get_lr()[0]
        grads = torch.autograd.grad(
            criterion(plain(data(index)[0]), data(index)[1]), list(plain.parameters())
        )
        for p, m, g in zip(plain.parameters(), momenta, grads, strict=True):
            p.data = p.data * (1 - lr * 0.1) - lr * (0.9 * m + 0.1 * g).sign()
            m.copy_(0.99 * m + 0.01 * g)
        _steps(engine, index)
    assert found is schedule and schedule.last_batch_iteration == 3
    assert_close(engine.module_state_dict(), plain.state_dict())


@REAL
def test_configurations_are_read_as_deepspeed_reads_them() -> None:
    given = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
    }
    with quiet():
        theirs = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig(dict(given))
    ours = DeepSpeedConfig(given)
    names = (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "zero_enabled zero_optimization_stage"
    )
    for name in [
        *names.split(),
        "gradient_clipping",
        "optimizer_name",
        "world_size",
        "elasticity_enabled",
    ]:
        assert getattr(ours, name) == getattr(theirs, name), name
    with pytest.raises(DeepSpeedConfigError, match="did you mean"):
        DeepSpeedConfig({"zero_optimization": {"stag": 2}})


@REAL
@pytest.mark.parametrize("version", [0.1, 0.2])
def test_elastic_batches_are_deepspeeds(version: float) -> None:
    block = {
        "enabled": True,
        "max_train_batch_size": 2000,
        "micro_batch_sizes": [2, 4, 6],
        "version": version,
    }
    for num_ranks in (4, 8):
        args = ({"elasticity": block}, "0.19.6", num_ranks)
        with quiet():
            theirs = importlib.import_module("deepspeed.elasticity").compute_elastic_config(*args)
        assert deepspeed.elasticity.compute_elastic_config(*args) == tuple(theirs)
    with pytest.raises(DeepSpeedConfigError, match=r"elasticity.enabled: must be true"):
        deepspeed.elasticity.compute_elastic_config({}, "0.19.6")


@REAL
def test_a_model_profile_counts_what_deepspeeds_counts(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    with quiet():
        real = importlib.import_module("deepspeed.profiling.flops_profiler")
    own = deepspeed.profiling.flops_profiler
    for as_string in (False, True):
        theirs, ours = (
            x.get_model_profile(model, (5, 8), print_profile=False, as_string=as_string)
            for x in (real, own)
        )
        assert ours == theirs
    own.get_model_profile(model, (5, 8))
    assert "Linear" in capsys.readouterr().out
    for text in (
        "number_to_string",
        "macs_to_string",
        "params_to_string",
        "flops_to_string",
        "duration_to_string",
    ):
        for number in (0.002, 12, 1234, 5_678_901, 3 * 10**13):
            assert getattr(own, text)(number) == getattr(real.profiler, text)(number), (
                text,
                number,
            )


# --- the small helpers ----------------------------------------------------------------------------


def test_modules_are_marked_as_leaves() -> None:
    model, tools = make(Net), deepspeed.utils
    found, missing = tools.set_z3_leaf_modules_by_name(
        model, ["blocks.0", "nowhere"], raise_if_not_found=False
    )
    assert (found, missing) == ([model.blocks[0]], ["nowhere"])
    assert tools.set_z3_leaf_modules_by_suffix(model, ["up"])[0] == [
        block.up for block in model.blocks
    ]
    assert tools.set_z3_leaf_modules(model, ["Block"]) == list(model.blocks)
    assert len(tools.get_z3_leaf_modules(model)) == 6 and tools.z3_leaf_module(model.blocks[1])
    assert tools.unset_z3_leaf_modules(model, [type(model.blocks[0])]) == list(model.blocks)
    assert tools.get_z3_leaf_modules(model) == [block.up for block in model.blocks]
    with pytest.raises(ValueError, match="nowhere"):
        tools.set_z3_leaf_modules_by_name(model, ["nowhere"])


def test_tensors_move_between_devices_and_into_files(tmp_path: Path) -> None:
    flat = torch.arange(1000.0)
    item = {"a": [flat[:3], ("text", 4)], "b": (flat[5:],)}
    cloned = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(item)
    assert torch.equal(cloned["a"][0], flat[:3]) and cloned["a"][0].untyped_storage().nbytes() == 12
    assert cloned["a"][1] == ("text", 4)
    moved = deepspeed.runtime.utils.move_to_device({"x": flat, "n": None}, "meta")
    assert moved["x"].is_meta and moved["n"] is None
    assert deepspeed.runtime.utils.get_tensor_bytes([flat, {"b": flat}]) == 8000


def test_models_are_made_on_a_device_in_a_dtype() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = make(Net)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    with deepspeed.OnDevice(dtype=torch.float16, device="cpu", enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    assert torch.zeros(2).dtype == torch.float32


def test_a_script_gives_its_configuration_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"train_batch_size": 12, "optimizer": {"type": "AdamW"}, "zero_optimization": {"sub_group_size": 7}}'
    )
    parser = deepspeed.add_tuning_arguments(
        deepspeed.add_config_arguments(argparse.ArgumentParser())
    )
    for spelling in ("--deepspeed_config", "--deepscale_config"):
        engine = deepspeed.initialize(parser.parse_args([spelling, str(file)]), make(Net))[0]
        assert (engine.zero_sub_group_size(), engine.config["train_batch_size"]) == (7, 12)


def test_experts_are_none() -> None:
    tools, model = deepspeed.moe.utils, make(Net)
    groups = [{"params": list(model.parameters())}]
    assert tools.split_params_into_different_moe_groups_for_optimizer(groups) == groups
    assert tools.has_moe_layers(model) == (False, 0) and not tools.is_moe_param(
        groups[0]["params"][0]
    )


def test_seeds_and_random_states_are_kept_apart() -> None:
    deepspeed.runtime.utils.set_random_seed(2**33 + 5)
    first = (random.random(), torch.rand(2))
    deepspeed.runtime.utils.set_random_seed(2**33 + 5)
    assert first[0] == random.random() and torch.equal(first[1], torch.rand(2))
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    tracker, before = deepspeed.checkpointing.get_cuda_rng_tracker(), torch.get_rng_state()
    with tracker.fork():
        one = torch.rand(3)
    with tracker.fork():
        two = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(one, two)


@REAL
def test_the_accelerator_has_every_method_of_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        real = importlib.import_module("deepspeed.accelerator").DeepSpeedAccelerator
    here = deepspeed.get_accelerator()
    missing = [n for n in dir(real) if not n.startswith("_") and not hasattr(here, n)]
    assert missing == ["register_host_memory", "unregister_host_memory"]
    assert here.memory_allocated() > 0 and here.total_memory() >= here.available_memory() > 0
    with here.stream(here.Stream()):
        event = here.Event(enable_timing=True)
        event.record()
    assert here.on_accelerator(torch.ones(1)) == (here.device_name() == "cpu")
    here.range_push("a")
    here.range_pop()
    deepspeed.runtime.utils.see_memory_usage("before", force=True)
    assert "before\nMA " in capsys.readouterr().out


def _talks() -> tuple[Any, ...]:
    dist, groups = deepspeed.comm, deepspeed.utils.groups
    dist.init_distributed()
    x = torch.full((2,), dist.get_rank() + 1.0)
    dist.all_reduce(x, op=dist.ReduceOp.SUM, prof=True, log_name="mine")
    out = torch.zeros(4)
    dist.allgather_fn(out, torch.full((2,), float(dist.get_rank())))
    both = [torch.ones(1), torch.ones(2)]
    dist.all_reduce_coalesced(both)
    assert (
        groups.get_data_parallel_world_size() == 2
        and groups._get_data_parallel_group() is dist.get_world_group()
    )
    assert (groups.get_model_parallel_world_size(), groups._get_sequence_parallel_group()) == (
        1,
        None,
    )
    assert deepspeed.utils.is_initialized() and dist.get_all_ranks_from_group() == [0, 1]
    return x.tolist(), out.tolist(), [y.tolist() for y in both]


@REAL
def test_ranks_talk_by_deepspeeds_names(ranks: RankPool) -> None:
    assert set(map(str, ranks(2, _talks))) == {
        "([3.0, 3.0], [0.0, 0.0, 1.0, 1.0], [[2.0], [2.0, 2.0]])"
    }
    with quiet():
        real = importlib.import_module("deepspeed.comm")
    names = {
        n
        for n in dir(real.comm)
        if inspect.isfunction(getattr(real.comm, n)) and not n.startswith("_")
    }
    missing = {n for n in names if not hasattr(deepspeed.comm, n)}
    of_its_own = (
        "timed_op set_backend init_deepspeed_backend mpi_discovery has_comm_data "
        "enable_symm_mem_for_group"
    )
    of_its_log = (
        "caller_func comm_operation_count debug_log_name default_args logged_comm_ops "
        "msg_size_from_args tensor_kwarg"
    )
    clouds = (
        "in_aml in_aws_sm in_dlts patch_aml_env_for_torch_nccl_backend "
        "patch_aws_sm_env_for_torch_nccl_backend"
    )
    assert missing == {
        *of_its_own.split(),
        *clouds.split(),
        *(f"get_{name}" for name in [*of_its_log.split(), "tensor_position"]),
    }


def _saves(folder: Path) -> dict[str, Tensor]:
    engine = made(3, **BF16)
    _steps(engine, 0)
    engine.save_checkpoint(folder)
    return engine.module_state_dict()


def test_checkpoints_become_fp32_state_dicts(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks(2, _saves, tmp_path)[0]
    zero_to_fp32, zero_to_torch = deepspeed.utils.zero_to_fp32, deepspeed.utils.zero_to_torch
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == expected.keys() and {x.dtype for x in found.values()} == {torch.float32}
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    zero_to_torch.main([str(tmp_path), str(tmp_path / "narrow"), "--dtype", "bf16"])
    wide, narrow = (torch.load(tmp_path / x / "pytorch_model.bin") for x in ("out", "narrow"))
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(x.bfloat16(), narrow[name]) for name, x in wide.items())
    loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(
        make(Net), tmp_path, tag="global_step1"
    )
    assert torch.load(tmp_path / "out" / "pytorch_model.bin").keys() == loaded.state_dict().keys()
    assert_close(loaded.state_dict(), found)
