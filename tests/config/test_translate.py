"""Translations: the file for FSDP2 trains as fzero does; files of accelerate become
configurations; what has none is named.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import nn

import fzero
from fzero.__main__ import main
from fzero.config.config import Config, ConfigError
from fzero.config.table import ShownConfig
from fzero.config.translate import from_accelerate, from_fsdp2, to_fsdp2

CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3},
}


def _trained(stage: int) -> tuple[list[float], list[float]]:
    """The losses of FSDP2 as translated, and of fzero, on this rank's rows."""
    cfg = CONFIG | {"zero_optimization": {"stage": stage}}
    names: dict[str, Any] = {}
    exec(compile(to_fsdp2(ShownConfig.load(cfg), "a dict"), "translated", "exec"), names)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean()

    rank = torch.distributed.get_rank()
    batches = [
        torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(n))[rank] for n in range(4)
    ]
    theirs, found = model(), list[float]()
    optimizer = names["prepare"](theirs, [theirs[0], theirs[2]], "cpu")
    for batch in batches:
        found.append(names["step"](theirs, optimizer, batch.chunk(2), loss_fn))
    step = fzero.make_train_step(model(), cfg, loss_fn=loss_fn)
    state, own = step.init(), list[float]()
    for batch in batches:
        state, metrics = step(state, batch)
        own.append(metrics.loss.item())
    return found, own


@pytest.mark.parametrize("stage", [2, 3])
def test_the_file_for_fsdp2_trains_as_the_configuration_does(stage: int, ranks: RankPool) -> None:
    (first, own), (second, _) = ranks(2, _trained, stage)
    assert [(a + b) / 2 for a, b in zip(first, second)] == pytest.approx(own, rel=1e-4)


def test_auto_is_left_out_of_the_file_and_named() -> None:
    params = {"lr": "auto", "weight_decay": "auto"}
    cfg = CONFIG | {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": params}}
    text = to_fsdp2(ShownConfig.load(cfg), "a dict")
    (line,) = re.findall(r"^# left out, .*$", text, re.MULTILINE)
    assert "gradient_clipping, optimizer.params.lr, optimizer.params.weight_decay" in line
    code = text.replace(line, "")
    assert (
        "auto" not in code and "clip_grad_norm_" not in code and "AdamW(model.parameters()" in code
    )


@pytest.mark.parametrize(
    ("arguments", "zero"),
    [
        ({"fsdp": "shard_grad_op offload"}, {"stage": 2, "offload_param": {"device": "cpu"}}),
        ({"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}}, {"stage": 2}),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_offload_params": True}},
            {"stage": 3, "offload_param": {"device": "cpu"}},
        ),
    ],
)
def test_the_arguments_of_a_trainer_are_read_with_their_block(
    arguments: dict[str, Any], zero: dict[str, Any]
) -> None:
    made, left = from_fsdp2(arguments)
    found = made["zero_optimization"]
    assert {
        key: value for key, value in found.items() if key != "offload_optimizer"
    } == zero and left == []


def test_a_key_without_a_counterpart_is_named_in_the_file() -> None:
    offload = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 2, "zero_hpz_partition_size": 2, "offload_optimizer": {"device": "cpu"}}
    text = to_fsdp2(
        ShownConfig.load(
            CONFIG | {"zero_optimization": zero | {"stage": 3}, "bf16": {"enabled": True}}
        ),
        "x.json",
    )
    assert "# not translated: zero_optimization.zero_hpz_partition_size = 2" in text
    assert "# not translated: zero_optimization.offload_optimizer.device = cpu" in text
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)" in text
    assert (
        "torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-08, "
        "weight_decay=0.1)" in text
    )
    text = to_fsdp2(
        ShownConfig.load(CONFIG | {"zero_optimization": {"stage": 3, "offload_param": offload}}),
        "x.json",
    )
    assert "CPUOffloadPolicy(pin_memory=True)" in text and "not translated" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimization": {"stage": 1}}, "FSDP2 has stages 2 and 3, got 1"),
        ({"fp16": {"enabled": True}}, "neither scales a loss"),
        (
            {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
            "optimizer.type: must be one of Adam",
        ),
    ],
)
def test_what_fsdp2_has_not_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_fsdp2(ShownConfig.load(CONFIG | change), "x.json")


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        ({"fsdp_reshard_after_forward": True}, 3),
        ({"fsdp_reshard_after_forward": False}, 2),
        ({"reshard_after_forward": "FULL_SHARD"}, 3),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 2),
        ({"fsdp_sharding_strategy": 3}, 0),
    ],
)
def test_a_strategy_of_fsdp_is_a_stage(given: dict[str, Any], stage: int) -> None:
    made, left = from_fsdp2(given)
    assert Config.load(made).zero_optimization.stage == stage and not left


def test_an_unknown_key_is_left_and_an_unknown_strategy_refused() -> None:
    assert from_fsdp2({"fsdp_version": 2, "mesh_of_my_own": 3})[1] == ["mesh_of_my_own = 3"]
    with pytest.raises(ConfigError, match="got 'HYBRID_SHARD'; "):
        from_fsdp2({"fsdp_sharding_strategy": "HYBRID_SHARD"})
    with pytest.raises(ConfigError, match=r"distributed_type: must be FSDP.*got 'TPU'"):
        from_accelerate({"distributed_type": "TPU"})
    with pytest.raises(ConfigError, match="pass that file"):
        from_accelerate(
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"deepspeed_config_file": "ds.json"},
            }
        )


YAML = """
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  offload_param_device: none
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  zero3_init_flag: true
  zero3_save_16bit_model: true
  of_tomorrow: 1
num_processes: 8
"""


def test_the_command_translates_a_file_and_names_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(YAML)
    assert main(["config", str(tmp_path / "a.yaml"), "--from", "accelerate"]) == 0
    printed = capsys.readouterr()
    cfg = Config.load(json.loads(printed.out))
    zero = cfg.zero_optimization
    assert (
        zero.stage,
        cfg.bf16.enabled,
        cfg.gradient_accumulation_steps,
        cfg.gradient_clipping,
    ) == (3, True, 4, 1.0)
    assert zero.offload_optimizer is not None and zero.offload_param is None
    assert printed.err == "not translated: of_tomorrow = 1\n"
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    assert main(["config", str(tmp_path / "c.json"), "--to", "fsdp2"]) == 0
    compile(capsys.readouterr().out, "printed", "exec")


def test_a_class_of_transformers_takes_sizes() -> None:
    from fzero.estimation.models import ModelError, named

    small = named(
        "LlamaForCausalLM,num_hidden_layers=2,hidden_size=64,intermediate_size=128,vocab_size=100"
    )
    assert small.model.config.num_hidden_layers == 2 and small.num_params < 1e6  # type: ignore[union-attr]
    with pytest.raises(
        ModelError, match=r"'num_hiden_layers' must be.*of LlamaConfig.*did you mean num_hidden"
    ):
        named("LlamaForCausalLM,num_hiden_layers=2")


@pytest.mark.parametrize(
    ("name", "content", "source", "message"),
    [
        ("a.yaml", b"\xff\xfe\x00", "accelerate", "a.yaml is not YAML"),
        ("a.yaml", b"a: [1", "accelerate", "a.yaml is not YAML"),
        ("fsdp.py", b"import torch", "fsdp2", "fsdp.py is not JSON"),
        (
            "ds.json",
            b'{"zero_optimization": {"stage": 3}}',
            "accelerate",
            "distributed_type: must be FSDP.*got 'None'",
        ),
    ],
)
def test_a_file_of_another_kind_is_named(
    name: str,
    content: bytes,
    source: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A configuration of DeepSpeed, for one, must not become one without ZeRO."""
    (tmp_path / name).write_bytes(content)
    assert main(["config", str(tmp_path / name), "--from", source]) == 1
    assert re.search(message, capsys.readouterr().err)
