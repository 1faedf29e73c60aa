"""The classes of `engine.optimizer` and of the optimizer inside it: those of DeepSpeed in each stage, as measured there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import Net, criterion, data
from training import make

import fzero
from fzero.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from fzero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from fzero.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from fzero.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from fzero.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from fzero.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

WRAPPERS = (DeepSpeedOptimizer, ZeROOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
WRAPPED = {  # stage, 16 bits: the wrappers that engine.optimizer is one of; none in stage 0 in fp32
    (0, False): (), (0, True): WRAPPERS[:1], (1, False): WRAPPERS[:3], (1, True): WRAPPERS[:3], (2, False): WRAPPERS[:3],
    (2, True): WRAPPERS[:3], (3, False): (*WRAPPERS[:2], WRAPPERS[3]), (3, True): (*WRAPPERS[:2], WRAPPERS[3]),
}  # fmt: skip
TORCH = {"torch_adam": True}
CONFIGURED: list[tuple[str, dict[str, Any], bool, type[torch.optim.Optimizer]]] = [
    ("Adam", {}, False, FusedAdam), ("AdamW", {}, False, FusedAdam), ("Adam", TORCH, False, torch.optim.AdamW),
    ("AdamW", TORCH, False, torch.optim.AdamW), ("Adam", TORCH | {"adam_w_mode": False}, False, torch.optim.Adam),
    ("Adam", {}, True, DeepSpeedCPUAdam), ("Lion", {}, False, FusedLion), ("Lion", {}, True, DeepSpeedCPULion),
    ("Adagrad", {}, False, torch.optim.Adagrad), ("Adagrad", {}, True, DeepSpeedCPUAdagrad), ("SGD", {}, False, torch.optim.SGD),
]  # fmt: skip


def _made(stage: int, *, bf16: bool = False, offloads: bool = False, client: Any = None, **keys: Any) -> Any:
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offloads else {})
    model = make(Net)
    optimizer = None if client is None else client(model.parameters())
    engine, found, *_ = fzero.initialize(
        model=model, optimizer=optimizer, config={"zero_optimization": zero, "bf16": {"enabled": bf16}, **keys}
    )
    assert found is engine.optimizer and engine.client_optimizer is optimizer
    return engine, optimizer


def _step(engine: Any) -> None:
    x, y = data(0)
    engine.backward(criterion(engine(x), y))
    engine.step()


@pytest.mark.parametrize(("stage", "bf16"), WRAPPED)
@pytest.mark.parametrize("client", [None, torch.optim.AdamW])
def test_the_optimizer_is_of_deepspeeds_classes_in_each_stage(stage: int, bf16: bool, client: Any) -> None:
    keys: dict[str, Any] = {} if client else {"optimizer": {"type": "AdamW", "params": TORCH}}
    engine, optimizer = _made(stage, bf16=bf16, client=client, **keys)
    assert tuple(cls for cls in WRAPPERS if isinstance(engine.optimizer, cls)) == WRAPPED[stage, bf16]
    found, depth = engine.optimizer, 0
    while hasattr(found, "optimizer"):  # as libraries look for the innermost
        found, depth = found.optimizer, depth + 1
    assert (
        depth == bool(WRAPPED[stage, bf16]) and isinstance(found, torch.optim.AdamW) and engine.basic_optimizer is found
    )
    assert optimizer is None or not depth or found is optimizer


@pytest.mark.parametrize(("name", "params", "offloads", "kind"), CONFIGURED)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_configured_optimizer_is_of_the_class_that_deepspeed_makes(
    name: str, params: dict[str, Any], offloads: bool, kind: type, stage: int
) -> None:
    if offloads and stage == 0:
        pytest.skip("DeepSpeed offloads no optimizer in stage 0")
    engine, _ = _made(stage, offloads=offloads, optimizer={"type": name, "params": {"lr": 0.1, **params}})
    basic = engine.basic_optimizer
    assert isinstance(basic, kind) and type(basic).__name__ == kind.__name__
    with pytest.raises(RuntimeError, match=r"call engine.step\(\)"):
        basic.step()
    assert basic.param_groups[0] is engine.optimizer.param_groups[0]
    _step(engine)
    param = next(engine.module.parameters())
    assert name == "SGD" or {*basic.state[param]} == {*engine.optimizer.state[param]} != set()


def test_rates_set_in_the_inner_optimizer_count() -> None:
    engine, _ = _made(1, optimizer={"type": "SGD", "params": {"lr": 0.5}})
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.optimizer.optimizer.param_groups[0]["lr"] = 0.0
    _step(engine)
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1)


def test_an_optimizer_without_a_class_here_is_torchs_base() -> None:
    engine, _ = _made(1, optimizer={"type": "Lamb", "params": {"lr": 0.1}})
    _step(engine)
    assert type(engine.basic_optimizer).__mro__[1] is torch.optim.Optimizer


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_scripts_own_muon_is_refused_with_the_configurations(stage: int) -> None:
    """It would train matrices only, and fzero updates flat shards; the configuration's Muon has Adam for the rest."""
    remedy = r'must not be torch\.optim\.Muon.*"optimizer": \{"type": "Muon"\}'
    for make_optimizer in (torch.optim.Muon, lambda params: torch.optim.Muon(list(params), lr=0.1)):
        model = torch.nn.Linear(4, 4, bias=False)
        given = make_optimizer(model.parameters()) if make_optimizer is torch.optim.Muon else make_optimizer
        with pytest.raises(fzero.ConfigError, match=remedy):
            fzero.initialize(model=model, optimizer=given, config={"zero_optimization": {"stage": stage}})
    config = {"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2}
    engine = fzero.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
    assert engine.optimizer_name() == "muon"
