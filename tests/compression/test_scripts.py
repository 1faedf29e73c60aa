"""Scripts in DeepSpeed's order: compress, initialize, train, clean."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compressing import ALL, HEADS, data, net, settings, technique, trained
from torch import nn

import fzero
from fzero.compression import compression_of
from fzero.deepspeed import zero
from fzero.deepspeed.compression import (
    compression_scheduler,
    convert_conv1d_to_linear,
    init_compression,
    redundancy_clean,
)
from fzero.deepspeed.compression.basic_layer import Embedding_Compress, LinearLayer_Compress
from fzero.deepspeed.compression.compress import student_initialization
from fzero.deepspeed.compression.helper import recursive_getattr, recursive_setattr
from fzero.deepspeed.missing import stand_in
from fzero.deepspeed.names import Definition

SHRINKING = {
    "row_pruning": technique(
        {"dense_ratio": 0.5}, ["up"], [["down"]], method="topk", schedule_offset=0
    ),
    "head_pruning": technique(
        {"dense_ratio": 0.5}, ["out"], [["value"]], num_heads=HEADS, schedule_offset=0
    ),
}


def script(techniques: dict[str, Any], stage: int) -> tuple[Any, list[float]]:
    cfg = settings(techniques, stage, gradient_clipping=0, train_micro_batch_size_per_gpu=16)
    model = init_compression(net(), cfg)
    engine, *_ = fzero.initialize(model=model, config=cfg)
    losses = []
    for index in range(4):
        loss = engine(*data(index))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return engine, losses


@pytest.mark.parametrize("stage", [0, 3])
def test_a_script_trains_as_a_step_does(stage: int) -> None:
    engine, losses = script(ALL, stage)
    expected, weights = trained(ALL, stage)
    assert losses == pytest.approx(expected, rel=1e-6)
    found = engine.train_step.gather(engine.state)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_model_that_zero_init_divides_is_compressed_as_a_plain_one() -> None:
    block = {
        "layer_reduction": {
            "enabled": True,
            "module_name_prefix": "blocks",
            "teacher_layer": [1, 0],
        }
    }
    cfg = settings(ALL | block, 3, train_micro_batch_size_per_gpu=16)
    found = []
    for divides in (True, False):
        with zero.Init(enabled=divides):
            student, teacher = net(0), net(2)
        engine = fzero.initialize(
            model=init_compression(student, cfg, teacher_model=teacher), config=cfg
        )[0]
        loss = engine(*data(0))
        engine.backward(loss)
        engine.step()
        found.append(
            {
                **engine.module_state_dict(),
                **redundancy_clean(engine, cfg).state_dict(),
                "loss": loss,
            }
        )
        with zero.Init(enabled=divides):
            alone = net(0)
        init_compression(alone, cfg | {"compression_training": SHRINKING})
        # it stays divided
        assert all(bool(param.numel()) != divides for param in alone.head.parameters())
        found[-1] |= {
            f"clean.{key}": x for key, x in redundancy_clean(alone, cfg).state_dict().items()
        }
    assert found[0].keys() == found[1].keys() and all(
        torch.equal(x, found[1][name]) for name, x in found[0].items()
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_redundancy_clean_gives_a_smaller_model_with_the_engines_outputs(stage: int) -> None:
    engine, _ = script(SHRINKING, stage)
    engine.eval()
    with torch.no_grad():
        expected = engine(*data(7))
    small = redundancy_clean(engine.module, settings(SHRINKING))
    assert tuple(recursive_getattr(small, "blocks.0.mlp.up").weight.shape) == (6, 8)
    with torch.no_grad():
        torch.testing.assert_close(small(*data(7)), expected)
    assert not any("scores" in name for name in small.state_dict())
    again = redundancy_clean(small, settings({}))
    assert again is small


def test_a_script_that_never_calls_init_compression_is_warned_and_trains_without() -> None:
    cfg = settings(ALL, train_micro_batch_size_per_gpu=16)
    with pytest.warns(fzero.ConfigWarning, match="compression_training: compresses nothing here"):
        engine, *_ = fzero.initialize(model=net(), config=cfg)
    assert not compression_of(engine.train_step)


def test_a_model_without_enabled_techniques_is_returned_unchanged() -> None:
    model = net()
    keys = model.state_dict().keys()
    assert init_compression(model, settings({})) is model and model.state_dict().keys() == keys


def test_wrong_orders_are_errors_with_the_fix() -> None:
    with pytest.raises(fzero.ConfigError, match="needs a model after init_compression"):
        redundancy_clean(net(), settings(ALL))
    model = init_compression(net(), settings(ALL))
    with pytest.raises(fzero.ConfigError, match="must be applied once to a model"):
        init_compression(model, settings(SHRINKING))
    with pytest.raises(fzero.ConfigError, match="needs the teacher"):
        init_compression(
            net(), settings({"layer_reduction": {"enabled": True, "teacher_layer": [1]}})
        )
    with pytest.raises(ValueError, match="mpu: must be None"):
        init_compression(net(), settings(ALL), mpu=object())


def test_helpers_and_layer_classes_have_deepspeeds_names() -> None:
    class Conv1D(nn.Module):
        def __init__(self, num_out: int, num_in: int) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.randn(num_in, num_out)),
                nn.Parameter(torch.randn(num_out)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.bias

    model = nn.Sequential(nn.Sequential(Conv1D(5, 3)), nn.ReLU())
    x = torch.randn(2, 3)
    expected = model(x)
    assert convert_conv1d_to_linear(model, Conv1D) is model
    assert isinstance(model[0][0], LinearLayer_Compress) and not isinstance(
        model[0][0], Embedding_Compress
    )
    torch.testing.assert_close(model(x), expected)
    recursive_setattr(model, "0.0", nn.Identity())
    assert isinstance(recursive_getattr(model, "0.0"), nn.Identity)
    scheduler = compression_scheduler(model, {})
    scheduler.step()
    assert scheduler.training_steps == 1


def test_a_student_begins_with_its_teachers_layers() -> None:
    block = {
        "layer_reduction": {
            "enabled": True,
            "module_name_prefix": "blocks",
            "teacher_layer": [1, 0],
        }
    }
    student, teacher = net(1), net(2)
    student_initialization(student, teacher, settings(block))
    assert torch.equal(student.blocks[0].value.weight, teacher.blocks[1].value.weight)
    again = init_compression(net(1), settings(block), teacher_model=teacher)
    assert all(
        torch.equal(x, y) for x, y in zip(again.parameters(), student.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("basic_layer.QuantAct", "activation_quantization"),
        ("basic_layer.ColumnParallelLinear_Compress", "ZeRO stage 3"),
        ("basic_layer.RowParallelLinear_Compress", "ZeRO stage 3"),
        ("utils.SymQuantizer", "fzero.compression.formulas has quantize"),
        ("utils.TopKBinarizer", "top_share"),
    ],
)
def test_classes_without_a_counterpart_say_what_to_use(name: str, says: str) -> None:
    module, _, of_module = name.partition(".")
    missing = stand_in(Definition(f"deepspeed.compression.{module}", of_module, "classes"))
    assert not isinstance(torch.nn.Linear(1, 1), missing)
    with pytest.raises(
        NotImplementedError,
        match=rf"^deepspeed\.compression\.{module}\.{of_module}: .*{re.escape(says)}",
    ):
        missing()
