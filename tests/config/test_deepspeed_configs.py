"""Configurations that run under DeepSpeed: what each key does here, or the warning for
it.
"""

from __future__ import annotations

import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero import Config, ConfigError, ConfigWarning
from fzero.config.table import ShownConfig
from fzero.config.unknown_keys import IGNORED_IN, without_unknown
from fzero.deepspeed.engine.config_keys import EngineKeys, read
from fzero.deepspeed.engine.monitor import monitors
from fzero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from fzero.optim import ShardContents
from fzero.optim.matrix import orthogonalise, orthogonalise_gram
from sharding.layout import FlatLayout


def adam(name: str = "Adam", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def warned(source: Any) -> tuple[Config, EngineKeys, list[str]]:
    """A configuration as `initialize` reads it, and the warnings."""
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        cfg, keys = read(source)
    return (
        cfg,
        keys,
        [str(warning.message) for warning in reported if warning.category is ConfigWarning],
    )


# --- values in DeepSpeed's spellings --------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16", "torch.bfloat16"])
def test_a_dtype_has_the_names_that_deepspeed_takes(name: str) -> None:
    assert (
        Config.load({"torch_autocast": {"enabled": True, "dtype": name}}).torch_autocast.dtype
        == "bfloat16"
    )
    halves = [
        Config.load({"data_types": {"grad_accum_dtype": n}}).data_types
        for n in ("half", "torch.float16")
    ]
    assert [block.grad_accum_dtype for block in halves] == ["float16", "float16"]
    with pytest.raises(ConfigError, match=r"torch_autocast.dtype: must be .*got 'torch.int8'"):
        Config.load({"torch_autocast": {"dtype": "torch.int8"}})


def test_numbers_and_booleans_may_be_strings_and_booleans_numbers() -> None:
    zero = {
        "stage": "2",
        "reduce_bucket_size": "5e8",
        "overlap_comm": 1,
        "contiguous_gradients": "true",
    }
    cfg, keys, reported = warned(
        {
            "bf16": {"enabled": 1},
            "zero_optimization": zero,
            "gradient_clipping": "0.5",
            "steps_per_print": "10",
            "wall_clock_breakdown": 0,
            "prescale_gradients": "False",
            "gradient_allreduce_op": "SUM",
            "train_micro_batch_size_per_gpu": "4",
            "sparse_gradients": "false",
        }
    )
    assert cfg.bf16.enabled is True and cfg.zero_optimization.reduce_bucket_size == 500_000_000
    assert (cfg.gradient_clipping, cfg.prescale_gradients, cfg.gradient_allreduce_op) == (
        0.5,
        False,
        "sum",
    )
    assert (keys.steps_per_print, keys.wall_clock_breakdown, reported) == (10, False, [])


def test_bf16_parameters_may_run_under_autocast_in_bf16() -> None:
    both = {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bf16"}}
    precision = Config.load(both).precision
    assert (precision.param_dtype, precision.autocast) == ("bfloat16", "bfloat16")
    with pytest.raises(ConfigError, match=r"torch_autocast.dtype: must be 'bfloat16' beside bf16"):
        Config.load({**both, "torch_autocast": {"enabled": True, "dtype": "fp16"}})
    with pytest.raises(ConfigError, match=r"fp16.enabled: excludes torch_autocast.enabled"):
        Config.load({"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}})
    seen: list[torch.dtype] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            seen.extend([self.first.weight.dtype, y.dtype])
            return y.float().square().mean()

    engine = fzero.initialize(
        model=Net(), config={**both, **adam(), "zero_optimization": {"stage": 2}}
    )[0]
    # an fp32 batch: only autocast allows that with bf16 parameters
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    assert {*seen} == {torch.bfloat16}


# --- optimizers -----------------------------------------------------------------------------------


def _moments_alone(param: Tensor, grads: list[Tensor], *, decoupled: bool, decay: float) -> Tensor:
    """Adam as in the paper, without the corrections of its moments."""
    first, second, param = torch.zeros_like(param), torch.zeros_like(param), param.clone()
    for grad in grads:
        if decoupled:
            param -= 0.1 * decay * param
        else:
            grad = grad + decay * param
        first, second = 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * grad**2
        param -= 0.1 * first / (second.sqrt() + 1e-8)
    return param


@pytest.mark.parametrize(
    ("name", "mode", "decoupled"),
    [("Adam", True, True), ("Adam", False, False), ("AdamW", False, True)],
)
def test_adam_without_bias_correction_uses_its_moments_as_they_are(
    name: str, mode: bool, decoupled: bool
) -> None:
    params = {
        "lr": 0.1,
        "betas": [0.9, 0.99],
        "weight_decay": 0.3,
        "adam_w_mode": mode,
        "bias_correction": False,
    }
    transform = Config.load(adam(name, **params)).optimizer.transform()
    torch.manual_seed(0)
    start, grads = torch.randn(8), [torch.randn(8) for _ in range(4)]
    param = start.clone()
    state = transform.init(param)
    for grad in grads:
        _, param, state = transform.update(grad.clone(), param, state)
    expected = _moments_alone(
        start.double(), [grad.double() for grad in grads], decoupled=decoupled, decay=0.3
    )
    assert torch.allclose(param.double(), expected, atol=1e-6)
    assert state.step == 4


def test_muon_orthogonalises_by_the_product_as_by_the_matrix() -> None:
    torch.manual_seed(0)
    for shape in ((8, 24), (24, 8), (16, 16), (1, 5)):
        matrix = torch.randn(shape)
        by_product = orthogonalise_gram(matrix[None])
        assert by_product.dtype == torch.float32 and by_product.shape == shape
        # bf16 has three digits
        assert (by_product - orthogonalise(matrix[None]).float()).abs().max() < 0.05
        exact = matrix.double()
        exact = exact.T if shape[0] > shape[1] else exact
        exact /= exact.norm() + 1e-7
        for _ in range(5):
            gram = exact @ exact.T
            exact = 3.4445 * exact + (-4.7750 * gram + 2.0315 * gram @ gram) @ exact
        assert torch.allclose(
            by_product.double(), exact.T if shape[0] > shape[1] else exact, atol=1e-5
        )


def test_muon_honours_its_method() -> None:
    contents = ShardContents.whole(FlatLayout(("w",), ((4, 12),), 1))
    torch.manual_seed(0)
    grad, start, found = torch.randn(48), torch.randn(48), {}
    for method in ("standard", "gram"):
        block = Config.load(adam("Muon", lr=0.1, ns_method=method)).optimizer
        transform = block.transform(contents=contents, kind="muon")
        found[method] = transform.update(grad.clone(), start.clone(), transform.init(start))[1]
    assert torch.allclose(found["gram"], found["standard"], atol=0.02)
    assert not torch.equal(found["gram"], found["standard"])


# --- unused parameters ----------------------------------------------------------------------------


class Parted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        x = self.first(x)
        return (self.second(x) if uses_all else x).sum()


def _steps_with_unused(stage: int) -> str:
    config = {
        **adam(), "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "ignore_unused_parameters": False},
    }  # fmt: skip
    engine = fzero.initialize(model=Parted(), config=config)[0]
    rank = engine.global_rank
    for index in range(2):  # used in one of two micro-steps is used
        engine.backward(engine(torch.ones(1, 4), index == 0))
        engine.step()
    engine.backward(engine(torch.ones(1, 4), rank == 0))
    engine.step()
    engine.backward(engine(torch.ones(1, 4), rank == 0))
    with pytest.raises(ValueError, match="ignore_unused_parameters: is false") as raised:
        engine.step()
    return str(raised.value)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_unused_parameter_is_named_on_all_ranks_where_asked(ranks: RankPool, stage: int) -> None:
    says = ranks(2, _steps_with_unused, stage)
    assert (
        says[0] == says[1]
        and "depend on 'second.weight' on rank 1; 'second.bias' on rank 1; compute" in says[0]
    )


# --- what is ignored, as in DeepSpeed, and what is refused ----------------------------------------


def test_unknown_keys_that_deepspeed_ignores_are_warned_of_by_initialize_alone() -> None:
    source = {
        "zero_optimization.reduce_bucket_size": 1,
        "zero_optimisation": {"stage": 3},
        "gradient_clipping": 0.5,
        "flops_profiler": {"enabled": False, "profile_stepp": 3},
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 1, "prefetch_bucket_size": 5},
    }
    cfg, _, reported = warned(source)
    assert (cfg.gradient_clipping, cfg.zero_optimization.stage, cfg.bf16.enabled) == (0.5, 1, True)
    assert [line.partition(";")[2].strip() for line in reported] == [
        "did you mean 'reduce_bucket_size' inside the block 'zero_optimization'? (ignored, as in "
        "DeepSpeed)",
        "did you mean 'zero_optimization'? (ignored, as in DeepSpeed)",
        "did you mean 'profile_step'? (ignored, as in DeepSpeed)",
    ]
    with pytest.raises(ConfigError) as refused:
        Config.load(source)
    assert len(str(refused.value).splitlines()) == 3
    # as in DeepSpeed
    with pytest.raises(ConfigError, match=r"zero_optimization.stag: unknown key"):
        read({"zero_optimization": {"stag": 1}})


def test_a_file_is_read_as_its_mapping(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"nonsense": 1, "gradient_clipping": 0.5}')
    cfg, _, reported = warned(str(path))
    assert (
        cfg.gradient_clipping == 0.5
        and len(reported) == 1
        and reported[0].startswith("nonsense: unknown key")
    )
    assert without_unknown({"gradient_clipping": 1}) == ({"gradient_clipping": 1}, [])
    assert "flops_profiler" in IGNORED_IN


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            {"activation_checkpointing": {"partition_activations": True}},
            "no rank is model-parallel",
        ),
        (
            {"activation_checkpointing": {"contiguous_memory_optimization": True}},
            "it is for partition_activations",
        ),
        ({"compile": {"deepcompile": True}}, "the step runs in eager mode, with the same numbers"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "the ordinary one",
        ),
        ({"nebula": {"enabled": True}}, "fzero saves nothing by itself"),
        ({"checkpoint": {"writer": {"type": "FAST"}}}, "checkpoint.writer: has no effect"),
        (
            {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
            "checkpoint.parallel_write: has no effect",
        ),
    ],
)
def test_a_key_that_only_makes_training_faster_is_warned_of(source: Any, says: str) -> None:
    _, _, reported = warned(source)
    assert len(reported) == 1 and says in reported[0]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            "offload_optimizer with device 'cpu'",
        ),
        ({"checkpoint": {"use_node_local_storage": True}}, "fzero import-deepspeed"),
    ],
)
def test_a_key_that_changes_results_is_refused_with_what_to_do(source: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        read(source)


# --- the command ----------------------------------------------------------------------------------


def test_what_a_program_fills_in_is_shown_as_auto() -> None:
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"},
    }
    comet = {"enabled": True, "api_key": "secret"}
    shown = ShownConfig.load(
        {
            "zero_optimization": {
                "stage": "2",
                "reduce_bucket_size": 5e8,
                "param_persistence_threshold": "auto",
            },
            "scheduler": scheduler,
            "optimizer": {"type": "adamw", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
            "comet": comet,
        }
    )
    rows = {name: (value, kind) for name, value, kind, _ in shown.rows()}
    assert rows["scheduler.params.total_num_steps"] == ("auto", "auto")
    # the schedule's rate is not known yet: no conflict
    assert rows["optimizer.params.lr"] == ("0.0003", "given")
    assert rows["zero_optimization.reduce_bucket_size"] == ("500000000", "given")
    assert rows["zero_optimization.param_persistence_threshold"] == ("auto", "auto")
    assert "secret" not in rows["comet"][0]
    values = shown.values()
    assert (
        values["scheduler.params.total_num_steps"]
        == values["scheduler.params.warmup_max_lr"]
        == "auto"
    )
    assert (
        values["zero_optimization.stage3_param_persistence_threshold"] == "auto"
        and values["gradient_clipping"] == 1
    )
    with pytest.raises(ConfigError, match="total_num_steps: is required"):
        ShownConfig.load({"scheduler": {"type": "WarmupDecayLR", "params": {}}})
    with pytest.raises(ConfigError, match="total_num_steps: is required"):
        Config.load({"scheduler": scheduler})


# --- classes of optimizers ------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_bias_correction_of_a_class_is_that_of_the_configuration(
    cls: type[torch.optim.Adam],
) -> None:
    given = {"lr": 0.5, "betas": (0.8, 0.9), "bias_correction": False}
    weights = []
    for by_class in (True, False):
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        block = {} if by_class else {"optimizer": {"type": "Adam", "params": given}}
        optimizer = cls(model.parameters(), **given) if by_class else None
        engine = fzero.initialize(
            model=model, optimizer=optimizer, config={"train_batch_size": 3, **block}
        )[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(3, 2)).mean())
            engine.step()
        weights.append(engine.module_state_dict()["weight"])
    assert torch.equal(*weights)
    with pytest.raises(ValueError, match=f"{cls.__name__}.step: bias_correction must be True"):
        cls(nn.Linear(2, 1).parameters(), **given).step()


# --- monitors -------------------------------------------------------------------------------------


class Recorder(types.ModuleType):
    """A module whose calls are recorded; each returns the recorder."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        monkeypatch.setitem(sys.modules, name, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__internal_api__log_metric__":
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call


def _train(**keys: Any) -> None:
    engine = fzero.initialize(
        model=nn.Linear(2, 1), config={**adam(lr=0.5), "train_micro_batch_size_per_gpu": 60, **keys}
    )[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(60, 2)).mean())
        engine.step()


def test_wandb_gets_the_events_that_deepspeed_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Recorder("wandb", monkeypatch)
    wandb.run = None  # the script has begun none
    _train(wandb={"enabled": True, "project": "mine", "team": "us"})
    assert wandb.calls[0] == ("init", (), {"project": "mine", "group": None, "entity": "us"})
    logs = [(args[0], kwargs["step"]) for name, args, kwargs in wandb.calls[1:] if name == "log"]
    assert ({"Train/Samples/lr": 0.5}, 60) in logs and ({"Train/Samples/lr": 0.5}, 180) in logs
    assert {key for event, _ in logs for key in event} >= {
        "Train/Samples/train_loss",
        "Train/Samples/lr",
    }


def test_comet_gets_an_event_once_in_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    comet = Recorder("comet_ml", monkeypatch)
    _train(comet={"enabled": True, "experiment_name": "first", "online": False, "mode": "create"})
    given = {"api_key": None, "project": None, "workspace": None, "experiment_key": None}
    assert comet.calls[:2] == [
        ("start", (), {**given, "mode": "create", "online": False}), ("set_name", ("first",), {})
    ]  # fmt: skip
    logged = [(kwargs["name"], kwargs["step"]) for name, _, kwargs in comet.calls[2:]]
    # 100 samples apart
    assert [step for name, step in logged if name == "Train/Samples/lr"] == [60, 180]


@pytest.mark.parametrize(("key", "package"), [("wandb", "wandb"), ("comet", "comet_ml")])
def test_a_monitor_whose_package_is_missing_names_it(
    key: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # an import fails
    with pytest.raises(
        ConfigError, match=rf"{key}.enabled: needs the package {package}.*or use csv_monitor"
    ):
        monitors(EngineKeys.model_validate({key: {"enabled": True}}))
    with (
        monkeypatch.context() as other,
        pytest.raises(ConfigError, match=f"{key}.enabled: needs the package {package}"),
    ):
        # as on all ranks but the first
        other.setattr("fzero.deepspeed.engine.log.monitors", lambda keys: [])
        _train(**{key: {"enabled": True}})
    with pytest.raises(ConfigError, match=f"{key}.projekt: unknown key"):
        read({key: {"enabled": True, "projekt": "x"}})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_not_offloaded_below_stage_3_and_a_warning_says_so(stage: int) -> None:
    zero = {"stage": stage, "offload_param": {"device": "cpu"}}
    with pytest.warns(
        ConfigWarning, match=f"offload_param: has no effect in stage {stage}, as in DeepSpeed"
    ):
        engine = fzero.initialize(
            model=nn.Linear(2, 1), config={**adam(lr=0.5), "zero_optimization": zero}
        )[0]
    assert engine.zero_offload_param() is None and engine.zero_optimization_stage() == stage
