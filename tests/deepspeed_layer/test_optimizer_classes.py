"""The classes of `engine.optimizer` and of the optimizer inside it: those of DeepSpeed
in each stage, as measured there.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import SAMPLES, Net, criterion, data
from training import make

import fzero
from fzero.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from fzero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from fzero.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from fzero.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from fzero.deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from fzero.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from fzero.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

WRAPPERS = (
    DeepSpeedOptimizer,
    ZeROOptimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
)
WRAPPED = {  # stage, 16 bits: the wrappers that engine.optimizer is one of; none in stage 0 in fp32
    (0, False): (),
    (0, True): WRAPPERS[:1],
    (1, False): WRAPPERS[:3],
    (1, True): WRAPPERS[:3],
    (2, False): WRAPPERS[:3],
    (2, True): WRAPPERS[:3],
    (3, False): (*WRAPPERS[:2], WRAPPERS[3]),
    (3, True): (*WRAPPERS[:2], WRAPPERS[3]),
}
TORCH = {"torch_adam": True}
CONFIGURED: list[tuple[str, dict[str, Any], bool, type[torch.optim.Optimizer]]] = [
    ("Adam", {}, False, FusedAdam),
    ("AdamW", {}, False, FusedAdam),
    ("Adam", TORCH, False, torch.optim.AdamW),
    ("AdamW", TORCH, False, torch.optim.AdamW),
    ("Adam", TORCH | {"adam_w_mode": False}, False, torch.optim.Adam),
    ("Adam", {}, True, DeepSpeedCPUAdam),
    ("Lion", {}, False, FusedLion),
    ("Lion", {}, True, DeepSpeedCPULion),
    ("Adagrad", {}, False, torch.optim.Adagrad),
    ("Adagrad", {}, True, DeepSpeedCPUAdagrad),
    ("SGD", {}, False, torch.optim.SGD),
]


def _made(
    stage: int, *, bf16: bool = False, offloads: bool = False, client: Any = None, **keys: Any
) -> Any:
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offloads else {})
    model = make(Net)
    optimizer = None if client is None else client(model.parameters())
    engine, found, *_ = fzero.initialize(
        model=model,
        optimizer=optimizer,
        config={"zero_optimization": zero, "bf16": {"enabled": bf16, "auto_cast": bf16}, **keys},
    )
    assert found is engine.optimizer and engine.client_optimizer is optimizer
    assert optimizer is None or (found is optimizer) == (WRAPPED[stage, bf16] == ())
    return engine, optimizer


def _step(engine: Any) -> None:
    x, y = data(0)
    engine.backward(criterion(engine(x), y))
    engine.step()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("stage", "bf16"), WRAPPED)
@pytest.mark.parametrize("client", [None, torch.optim.AdamW])
def test_the_optimizer_is_of_deepspeeds_classes_in_each_stage(
    stage: int, bf16: bool, client: Any
) -> None:
    keys: dict[str, Any] = {} if client else {"optimizer": {"type": "AdamW", "params": TORCH}}
    engine, optimizer = _made(stage, bf16=bf16, client=client, **keys)
    assert (
        tuple(cls for cls in WRAPPERS if isinstance(engine.optimizer, cls)) == WRAPPED[stage, bf16]
    )
    found, depth = engine.optimizer, 0
    while hasattr(found, "optimizer"):  # as libraries look for the innermost
        found, depth = found.optimizer, depth + 1
    assert (
        depth == bool(WRAPPED[stage, bf16])
        and isinstance(found, torch.optim.AdamW)
        and engine.basic_optimizer is found
    )
    assert optimizer is None or not depth or found is optimizer


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "params", "offloads", "kind"), CONFIGURED)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_configured_optimizer_is_of_the_class_that_deepspeed_makes(
    name: str, params: dict[str, Any], offloads: bool, kind: type, stage: int
) -> None:
    if offloads and stage == 0:
        pytest.skip("DeepSpeed offloads no optimizer in stage 0")
    engine, _ = _made(
        stage, offloads=offloads, optimizer={"type": name, "params": {"lr": 0.1, **params}}
    )
    basic = engine.basic_optimizer
    assert type(basic) is kind
    with pytest.raises(RuntimeError, match=r"call engine.step\(\)"):
        basic.step()
    assert basic.param_groups[0] is engine.optimizer.param_groups[0]
    _step(engine)
    param = next(engine.module.parameters())
    assert name == "SGD" or {*basic.state[param]} == {*engine.optimizer.state[param]} != set()


class Own(torch.optim.AdamW):
    """A script's class with something of its own."""

    def __init__(self, params: Any, word: str = "") -> None:
        super().__init__(params, lr=0.1)
        self.word = word


def test_in_stage_0_in_fp32_the_optimizer_is_the_scripts_own_object() -> None:
    """As in DeepSpeed: given as an object or as a function, with its class, its
    attributes, and what torch does with it.
    """
    made_by: list[Own] = []

    def maker(params: Any) -> Own:
        made_by.append(Own(params, "mine"))
        return made_by[-1]

    engine, found, *_ = fzero.initialize(model=make(Net), optimizer=maker, config={})
    assert found is made_by[0] is engine.basic_optimizer and engine.client_optimizer is maker
    assert type(found) is Own and found.word == "mine"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(found, 1, 0.5)
        _step(engine)
        scheduler.step()
        _step(engine)
    assert engine.get_lr() == [0.05]
    alone = copy.deepcopy(found)
    read = pickle.loads(pickle.dumps(found))
    for other in (alone, read):
        assert type(other) is Own and len(other.state) == len(found.state) > 0
    assert [*found.state_dict()["state"][0]] == ["step", "exp_avg", "exp_avg_sq"]
    param = next(engine.module.parameters())
    alone.state[alone.param_groups[0]["params"][0]]["exp_avg"].fill_(7.0)
    found.load_state_dict(alone.state_dict())
    _step(engine)
    assert found.state[param]["exp_avg"].max() > 1


@pytest.mark.parametrize(("stage", "bf16"), WRAPPED)
def test_hooks_of_a_scripts_optimizer_run_at_each_update(stage: int, bf16: bool) -> None:
    seen: list[Any] = []

    def hooked(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.25)
        optimizer.register_step_pre_hook(lambda which, args, kwargs: seen.append(("before", which)))
        optimizer.register_step_post_hook(lambda which, args, kwargs: seen.append(("after", which)))
        return optimizer

    micro = {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": 2}
    engine, optimizer = _made(stage, bf16=bf16, client=hooked, **micro)
    for _ in range(4):
        _step(engine)
    assert seen == [("before", optimizer), ("after", optimizer)] * 2


def test_hooks_of_an_optimizer_change_gradients_before_and_weights_after() -> None:
    """In stage 0 in fp32, where parameters show gradients."""

    def halve(params: list[torch.nn.Parameter]) -> None:
        assert params[0].grad is not None
        params[0].grad.mul_(0.5)

    def hook(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: halve(params))
        optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in params])

    engine, optimizer = _made(
        0, client=lambda params: torch.optim.SGD(params, lr=0.25), gradient_clipping=0.0
    )
    hook([*engine.module.parameters()], optimizer)
    own = make(Net)
    plain = torch.optim.SGD(own.parameters(), lr=0.25)
    hook([*own.parameters()], plain)
    for index in range(3):
        _step(engine)
        x, y = data(0)
        plain.zero_grad()
        criterion(own(x), y).backward()
        plain.step()
        pairs = zip(engine.module.parameters(), own.parameters(), strict=True)
        apart = max((one - other).abs().max().item() for one, other in pairs)
        assert apart < 1e-6, (index, apart)
    optimizer.register_step_pre_hook(lambda *_: ((), {}))
    with pytest.raises(RuntimeError, match=r"hook must return None.*leave the return out"):
        _step(engine)


def test_a_step_that_a_script_has_put_on_the_object_is_refused() -> None:
    model = make(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(
        fzero.ConfigError, match=r"step replaced on the object.*register_step_pre_hook"
    ):
        fzero.initialize(model=model, optimizer=optimizer, config={})


@pytest.mark.parametrize("stage", [0, 2])
def test_a_script_writes_and_reads_files_of_its_own_through_the_engine(
    tmp_path: Path, stage: int
) -> None:
    engine, _ = _made(stage)
    files, path = engine.checkpoint_engine, tmp_path / "tag" / "mine.pt"
    files.makedirs(path.parent, exist_ok=True)
    files.create(CheckpointCommitInfo("tag", str(tmp_path), save_latest=True))
    files.save({"weights": torch.arange(3.0), "step": 7}, path)
    assert files.commit(None) and files.is_data_parallel_writer(0) and not files.is_decoupled()
    read = files.load(str(path), map_location=torch.device("cpu"))
    assert read["step"] == 7 and torch.equal(read["weights"], torch.arange(3.0))
    torch.save({"args": Namespace(lr=1)}, path)
    with pytest.raises(
        ValueError, match=r"must hold tensors and plain values, and needs .*Namespace"
    ):
        files.load(path)
    with pytest.raises(ValueError, match=r"checkpoint_engine.load: .*missing.pt is missing"):
        files.load(tmp_path / "missing.pt")
    with pytest.raises(
        AttributeError, match=r"checkpoint_engine: must not be replaced.*fzero.start_save"
    ):
        engine.checkpoint_engine = files
    assert (
        engine._get_optimizer_ckpt_name("d", "t", 3) == "d/t/expp_rank_3_mp_rank_00_optim_states.pt"
    )


def test_rates_set_in_the_inner_optimizer_count() -> None:
    engine, _ = _made(1, optimizer={"type": "SGD", "params": {"lr": 0.5}})
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.optimizer.optimizer.param_groups[0]["lr"] = 0.0
    _step(engine)
    assert all(
        torch.equal(value, before[name]) for name, value in engine.module_state_dict().items()
    )
    torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1)


def test_an_optimizer_without_a_class_here_is_torchs_base() -> None:
    engine, _ = _made(1, optimizer={"type": "Lamb", "params": {"lr": 0.1}})
    _step(engine)
    assert type(engine.basic_optimizer) is torch.optim.Optimizer


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_scripts_own_muon_is_refused_with_the_configurations(stage: int) -> None:
    """It would train matrices only, and fzero updates flat shards; the configuration's
    Muon has Adam for the rest.
    """
    remedy = r'must not be torch\.optim\.Muon.*"optimizer": \{"type": "Muon"\}'
    for make_optimizer in (torch.optim.Muon, lambda params: torch.optim.Muon(list(params), lr=0.1)):
        model = torch.nn.Linear(4, 4, bias=False)
        given = (
            make_optimizer(model.parameters())
            if make_optimizer is torch.optim.Muon
            else make_optimizer
        )
        with pytest.raises(fzero.ConfigError, match=remedy):
            fzero.initialize(
                model=model, optimizer=given, config={"zero_optimization": {"stage": stage}}
            )
    config = {
        "optimizer": {"type": "Muon"},
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 2,
    }
    engine = fzero.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
    assert engine.optimizer_name() == "muon"
