"""What scripts hand to `initialize` and ask of what it returns: optimizers, schedulers,
data, printing, DeepSpeed's names.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Net, assert_close, criterion, data, made, mine, plainly, settings
from ranks import RankPool
from torch import Tensor, nn
from training import make

import fzero
import fzero.deepspeed as deepspeed
from fzero.config.config import ConfigError, ConfigWarning
from fzero.deepspeed.pipe import PipelineModule

NUM_STEPS = 4
EXAMPLES = Path(__file__).parents[2] / "examples"


# --- optimizers and schedulers of the script ------------------------------------------------------


def _grouped(model: nn.Module) -> list[dict[str, Any]]:
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    return [{"params": rest}, {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_grouped(model), lr=1e-2, weight_decay=0.1)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_grouped(model), lr=0.1, momentum=0.9, nesterov=True)


def _amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_grouped(model), lr=1e-2, amsgrad=True)


def _rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(_grouped(model), lr=1e-2, momentum=0.5)


def _fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return deepspeed.ops.adam.FusedAdam(_grouped(model), lr=1e-2, weight_decay=0.1)


OPTIMIZERS = [_adamw, _adam, _sgd, _amsgrad, _rmsprop, _fused_adam]


def _step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)


def _one(model: Any, index: int) -> list[Tensor]:
    x, y = data(index)
    return [criterion(model(x), y)]


def _plain(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> tuple[list[float], dict[str, Tensor]]:
    """The loop of a script without an engine, with its scheduler."""
    module = make(Net)
    optimizer = make_optimizer(module)
    scheduler, rates = _step_lr(optimizer), []
    for index in range(NUM_STEPS):
        _one(module, index)[0].backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        rates.append(optimizer.param_groups[-1]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return rates, module.state_dict()


def _client(stage: int, which: int) -> tuple[list[float], dict[str, Tensor]]:
    model = make(Net)
    optimizer = OPTIMIZERS[which](model)
    cfg = settings(stage)
    del cfg["optimizer"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, seen, _, scheduler = fzero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=_step_lr(optimizer), config=cfg
        )
        rates = []
        for index in range(NUM_STEPS):
            x, y = mine(engine, data(index))
            engine.backward(criterion(engine(x), y))
            rates.append(seen.param_groups[-1]["lr"])
            engine.step()
        assert (
            scheduler.get_last_lr()
            == [group["lr"] for group in seen.param_groups]
            == engine.get_lr()
        )
    return rates, engine.module_state_dict()


@pytest.mark.covering(0)
@pytest.mark.parametrize("which", range(len(OPTIMIZERS)), ids=[f.__name__ for f in OPTIMIZERS])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_scripts_own_optimizer_and_scheduler_train_as_they_do_without_an_engine(
    ranks: RankPool, stage: int, which: int
) -> None:
    plain_rates, expected = _plain(OPTIMIZERS[which])
    for rates, weights in ranks(2, _client, stage, which):
        assert rates == pytest.approx(plain_rates)
        assert_close(weights, expected)


def test_what_a_script_writes_into_the_groups_counts_from_the_next_update_on() -> None:
    module = make(Net)
    own = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    engine = made(2)
    for index in range(3):
        for group in (own.param_groups[0], engine.optimizer.param_groups[0]):
            group["lr"], group["weight_decay"], group["betas"] = (
                1e-2 / (index + 1),
                0.1 * index,
                (0.9 - 0.1 * index, 0.99),
            )
        _one(module, index)[0].backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        own.step()
        own.zero_grad()
        engine.backward(_one(engine, index)[0])
        engine.step()
    assert_close(engine.module_state_dict(), module.state_dict())


def test_the_schedule_of_the_configuration_is_that_of_a_step() -> None:
    cfg = settings(1, scheduler={"type": "OneCycle", "params": {
        "cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}})  # fmt: skip
    engine, _, _, scheduler = fzero.initialize(model=make(Net), config=cfg)
    step = fzero.make_train_step(
        make(Net), cfg, loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])
    )
    state = step.init()
    # the words that transformers looks for
    with pytest.raises(AssertionError, match="need to call step"):
        scheduler.get_last_lr()
    for index in range(5):
        x, y = data(index)
        engine.backward(criterion(engine(x), y))
        engine.step()
        state, metrics = step(state, (x, y))
        assert engine.metrics.lr == metrics.lr
    assert all(
        torch.equal(x, y)
        for x, y in zip(engine.module_state_dict().values(), step.gather(state).values())
    )
    assert scheduler.state_dict() == {"last_batch_iteration": 4}


def test_groups_of_parameters_go_with_the_configurations_optimizer() -> None:
    model = make(Net)
    engine, seen, _, _ = fzero.initialize(
        model=model, model_parameters=_grouped(model), config=settings(2)
    )
    assert [group["weight_decay"] for group in seen.param_groups] == [0.1, 0.0]
    _, expected = plainly(_one, NUM_STEPS, optimizer=lambda params: _adamw_of(list(params)))
    for index in range(NUM_STEPS):
        engine.backward(_one(engine, index)[0])
        engine.step()
    assert_close(engine.module_state_dict(), expected)


def test_groups_may_be_of_named_parameters_and_an_optimizer_may_have_none() -> None:
    model = make(Net)
    groups = [{"params": model.named_parameters(), "lr": 0.5}]
    engine, seen, *_ = fzero.initialize(model=model, model_parameters=groups, config=settings(0))
    assert engine.get_lr() == [0.5] and seen.param_groups[0]["params"] == [*model.parameters()]
    cfg, none = settings(0), torch.optim.AdamW([{"params": []}], lr=0.5)
    del cfg["optimizer"]
    with pytest.warns(ConfigWarning, match="optimizer: does not hold"):
        engine = fzero.initialize(model=make(Net), optimizer=none, config=cfg)[0]
    assert engine.get_lr() == [0.5]


def _adamw_of(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    model = make(Net)
    names = [name for name, _ in model.named_parameters()]
    norms = [p for n, p in zip(names, params) if "norm" in n]
    rest = [p for n, p in zip(names, params) if "norm" not in n]
    groups = [{"params": rest}, {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def test_factories_are_called_with_what_they_make_something_of() -> None:
    cfg = settings(0)
    del cfg["optimizer"]
    engine, seen, _, scheduler = fzero.initialize(
        model=make(Net),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        lr_scheduler=_step_lr,
        config=cfg,
    )
    for index in range(2):
        engine.backward(_one(engine, index)[0])
        engine.step()
    assert seen.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == pytest.approx(0.15)


# --- what is wrong --------------------------------------------------------------------------------


def _not_the_models(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)}


def _not_new(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters())
    _one(model, 0)[0].backward()
    optimizer.step()
    return {"optimizer": optimizer}


def _not_elementwise(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.LBFGS(model.parameters())}


def _unknown_key(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [{"params": list(model.parameters()), "momentun": 0.9}]}


def _without_params(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [{"lr": 0.1}]}


def _numbers(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [1, 2]}


def _twice(model: nn.Module) -> dict[str, Any]:
    return {"config_params": settings(0)}


def _mpu(model: nn.Module) -> dict[str, Any]:
    return {"mpu": argparse.Namespace(get_data_parallel_world_size=lambda: 2)}


def _iterable(model: nn.Module) -> dict[str, Any]:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            yield 1

    return {"training_data": Stream(), "config": settings(0, train_batch_size=2)}


def _no_batch_size(model: nn.Module) -> dict[str, Any]:
    return {"training_data": [1, 2, 3]}


def _local_files(model: nn.Module) -> dict[str, Any]:
    return {"config": settings(0, checkpoint={"use_node_local_storage": True})}


WRONG = {
    _not_the_models: "optimizer: must hold parameters of the model, got another tensor, of shape",
    _not_new: "optimizer: must be new, got a Adam that has made steps",
    _not_elementwise: "LBFGS",
    _unknown_key: r"model_parameters\[0\].momentun",
    _without_params: "model_parameters: must be groups with the key 'params', got",
    _numbers: "model_parameters: must be parameters of the model, got 1",
    _twice: "config: must be given once",
    _mpu: "mpu: must have no model parallelism",
    _iterable: "training_data: must be a dataset with a length",
    _no_batch_size: "train_micro_batch_size_per_gpu: must be given for the loader",
    _local_files: "checkpoint.use_node_local_storage: must be False",
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_what_initialize_cannot_do_is_an_error_that_names_the_argument(
    case: Callable[[nn.Module], dict[str, Any]],
) -> None:
    model = make(Net)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=WRONG[case]):
        warnings.simplefilter("ignore", ConfigWarning)
        fzero.initialize(model=model, **{"config": settings(0), **case(model)})


def test_an_optimizer_in_both_places_is_the_scripts_with_a_warning() -> None:
    model = make(Net)
    with pytest.warns(ConfigWarning, match="optimizer: is also in the configuration"):
        engine = fzero.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=settings(0)
        )[0]
    assert engine.get_lr() == [0.5]


# --- data -----------------------------------------------------------------------------------------


def _reads(
    drop_last: bool, saved: dict[str, int] | None, num_batches: int
) -> tuple[list[list[int]], dict[str, int]]:
    cfg = settings(0, train_micro_batch_size_per_gpu=3, dataloader_drop_last=drop_last)
    loader = fzero.initialize(model=make(Net), config=cfg, training_data=list(range(29)))[2]
    if saved:
        loader.load_state_dict(saved)
    batches = deepspeed.utils.RepeatingLoader(loader)
    seen = [next(batches).tolist() for _ in range(num_batches)]
    return seen, loader.state_dict()


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_goes_on_where_another_one_stopped_on_another_number_of_ranks(
    ranks: RankPool, drop_last: bool
) -> None:
    (whole,) = ranks(1, _reads, drop_last, None, 20)
    first = ranks(2, _reads, drop_last, None, 4)
    assert first[0][1] == first[1][1] == {"epoch": 0, "samples": 24}
    for (theirs, _), offset in zip(first, (0, 1)):  # both ranks together read what one would
        assert {x for batch in theirs for x in batch} <= {
            x for batch in whole[0][:8] for x in batch
        }, offset
    (rest,) = ranks(1, _reads, drop_last, first[0][1], 12)
    assert rest[0] == whole[0][8:20]
    epoch = {x for batch in whole[0][: 9 if drop_last else 10] for x in batch}
    assert len(epoch) == (27 if drop_last else 29)


SIZES = [(12, 3), (13, 3), (29, 4), (15, 4), (3, 2), (7, 7)]
"""Samples of a dataset, and of a batch of one rank."""


EPOCHS: list[list[int | None]] = [[None, None, None], [0, 1, 2], [4, 4, None], [3, 0, 3]]
"""The epoch that a script sets before each; None where it sets none."""
Epochs = dict[str, list[tuple[int, list[list[int]]]]]
"""By loader, the length and the batches of each epoch."""


def _drawn(loader: Any, epochs: list[int | None]) -> list[tuple[int, list[list[int]]]]:
    found = []
    for epoch in epochs:
        if epoch is not None and hasattr(loader.data_sampler, "set_epoch"):
            loader.data_sampler.set_epoch(epoch)
        found.append((len(loader), [batch.tolist() for batch in loader]))
    return found


def _of_every_loader(num_samples: int, batch_size: int, drop_last: bool) -> list[Epochs]:
    """The epochs of each loader that the engine makes, for each of `EPOCHS`."""
    data = list(range(num_samples))
    keys = {"train_micro_batch_size_per_gpu": batch_size, "dataloader_drop_last": drop_last}
    layers, found = (
        PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss()),
        list[Epochs](),
    )
    for epochs in EPOCHS:
        engine, _, loader, _ = fzero.initialize(
            model=make(Net), config=settings(0, **keys), training_data=data
        )
        piped = fzero.initialize(model=layers, config=settings(0, **keys), training_data=data)[2]
        made = {"training_data": loader, "pipeline": piped} | {
            route: engine.deepspeed_io(data, route=route) for route in ("train", "eval", "predict")
        }
        made["sampler"] = engine.deepspeed_io(data, data_sampler=list(reversed(data)))
        found.append({name: _drawn(loader, epochs) for name, loader in made.items()})
    return found


def _deepspeeds(
    num: int, size: int, drop_last: bool, rank: int, of: Any, *, counts: bool = False
) -> list[Epochs]:
    """The epochs of DeepSpeed's loaders: `of` makes one from a dataset, a sampler or
    None, and the rest.

    `counts`: whether the epoch is set to 0, 1, 2 where the script does not set it.
    """
    data, found = list(range(num)), list[Epochs]()
    for epochs in EPOCHS:
        sets = [*range(3)] if counts and epochs == [None] * 3 else epochs
        in_order = torch.utils.data.DistributedSampler(data, 2, rank, shuffle=False)  # type: ignore[arg-type, var-annotated]
        samplers = dict.fromkeys(("training_data", "train")) | dict.fromkeys(
            ("pipeline", "eval", "predict"), in_order
        )
        samplers["sampler"] = [*reversed(data)]  # type: ignore[assignment]
        found.append(
            {name: _drawn(of(data, x, size, drop_last, rank), sets) for name, x in samplers.items()}
        )  # type: ignore[arg-type]
    return found


def _as_deepspeed(data: Any, sampler: Any, size: int, drop_last: bool, rank: int) -> Any:
    """What DeepSpeedDataLoader makes: DistributedSampler's order of the epoch set last,
    padded to the ranks and then cut.
    """
    sampler = torch.utils.data.DistributedSampler(data, 2, rank) if sampler is None else sampler
    loader: Any = torch.utils.data.DataLoader(data, size, sampler=sampler, drop_last=drop_last)
    loader.data_sampler = sampler
    return loader


@pytest.mark.covering(1)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_loader_draws_the_batches_of_deepspeeds(
    ranks: RankPool, sizes: tuple[int, int], drop_last: bool
) -> None:
    """Length, order, shuffling and padding of three epochs, whatever epochs a script
    sets. Where it sets none, each is shuffled anew here: these are the batches of a
    script that counts its epochs. (DeepSpeed repeats the order of the first.)"""
    for rank, found in enumerate(ranks(2, _of_every_loader, *sizes, drop_last)):
        assert found == _deepspeeds(*sizes, drop_last, rank, _as_deepspeed, counts=True)


@pytest.mark.long
def test_deepspeeds_loader_is_what_the_table_says() -> None:
    real = importlib.import_module("deepspeed.runtime.dataloader").DeepSpeedDataLoader

    def of(data: Any, sampler: Any, size: int, drop_last: bool, rank: int) -> Any:
        return real(
            data,
            size,
            False,
            0,
            None,
            num_local_io_workers=0,
            data_sampler=sampler,
            data_parallel_world_size=2,
            data_parallel_rank=rank,
            dataloader_drop_last=drop_last,
        )

    for (num, size), drop_last, rank in itertools.product(SIZES, (False, True), range(2)):
        args = (num, size, drop_last, rank)
        assert _deepspeeds(*args, of) == _deepspeeds(*args, _as_deepspeed), args
        alone = _deepspeeds(*args, of)[0]["training_data"]
        assert alone == [alone[0]] * 3, args


def _sets_epochs(
    saved: dict[str, int] | None, epoch: int
) -> tuple[list[list[int]], dict[str, int]]:
    """The first two batches after a script has set the epoch, and the position."""
    cfg = settings(0, train_micro_batch_size_per_gpu=3)
    loader = fzero.initialize(model=make(Net), config=cfg, training_data=list(range(29)))[2]
    if saved:
        loader.load_state_dict(saved)
    loader.data_sampler.set_epoch(epoch)
    return [batch.tolist() for _, batch in zip(range(2), loader, strict=False)], loader.state_dict()


def test_a_script_that_sets_the_epoch_it_resumes_in_goes_on_inside_it() -> None:
    begun, saved = _sets_epochs(None, 5)
    assert saved == {"epoch": 5, "samples": 6}
    rest, _ = _sets_epochs(saved, 5)
    other, _ = _sets_epochs(saved, 6)
    fifth, sixth = (torch.utils.data.DistributedSampler(range(29), 1, 0) for _ in range(2))  # type: ignore[arg-type, var-annotated]
    fifth.set_epoch(5)
    sixth.set_epoch(6)
    assert [*itertools.chain(*begun, *rest)] == [*fifth][:12]
    assert [*itertools.chain(*other)] == [*sixth][:6] != [*fifth][:6]


def test_a_loader_that_stopped_inside_a_batch_of_all_ranks_says_so() -> None:
    loader = fzero.initialize(
        model=make(Net),
        config=settings(0, train_micro_batch_size_per_gpu=4),
        training_data=list(range(29)),
    )[2]
    with pytest.raises(ValueError, match="a multiple of 4 samples"):
        loader.load_state_dict({"epoch": 0, "samples": 6})


# --- what it prints and writes --------------------------------------------------------------------


def test_steps_per_print_wall_clock_and_csv_do_what_they_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = made(
        1, train_batch_size=12, steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True,
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
    )  # fmt: skip
    losses = []
    for index in range(4):
        loss = _one(engine, index)[0]
        losses.append(engine.backward(loss).item())
        engine.step()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("step=")] == [
        f"step={n}, skipped=0, lr=[0.01], mom=[(0.9, 0.999)]" for n in (2, 4)
    ]
    assert [line for line in lines if line.startswith("wall clock")] == [
        f"wall clock of step {n}" for n in range(1, 5)
    ]
    assert all(
        sum(line.split()[:1] == [part] for line in lines) >= 4
        for part in ("forward", "backward", "update")
    )
    assert sum(line.startswith("memory of step") for line in lines) == 4
    assert any("stage 1" in line for line in lines)
    with (tmp_path / "run" / "Train_Samples_train_loss.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "Train/Samples/train_loss"]
    assert [(int(n), float(x)) for n, x in rows[1:]] == [
        (12 * (n + 1), pytest.approx(x)) for n, x in enumerate(losses)
    ]


def test_tensorboard_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # an import fails
    with pytest.raises(ConfigError, match="pip install"):
        made(0, tensorboard={"enabled": True})


def test_keys_of_the_engine_are_checked_like_others() -> None:
    with pytest.raises(ConfigError, match=r"csv_monitor.enabled: .*got 'maybe'"):
        made(0, csv_monitor={"enabled": "maybe"})
    with pytest.raises(ConfigError, match=r"checkpoint\.tag_validation"):
        made(0, checkpoint={"tag_validation": "SOMETIMES"})


# --- DeepSpeed's names ----------------------------------------------------------------------------


def test_a_command_line_names_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(settings(2, train_batch_size=24, train_micro_batch_size_per_gpu=4))
    )
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    deepspeed.init_distributed()
    engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, model=make(Net))
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and (loader, scheduler) == (None, None)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (24, 4)
    assert engine.gradient_accumulation_steps() == 6
    engine.set_train_batch_size(8)
    assert (
        engine.gradient_accumulation_steps() == 2 and not engine.is_gradient_accumulation_boundary()
    )
    with pytest.raises(ConfigError, match="must be a multiple of 4"):
        engine.set_train_batch_size(6)
    assert (engine.zero_optimization_stage(), engine.fp16_enabled(), engine.bfloat16_enabled()) == (
        2,
        False,
        False,
    )
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    assert engine.optimizer is optimizer and optimizer.loss_scale == 1.0
    accelerator = deepspeed.get_accelerator()
    assert accelerator.device_name() == engine.device.type
    assert deepspeed.comm.get_world_size() == 1 and deepspeed.comm.get_rank() == 0


def test_a_step_was_applied_only_if_the_last_call_updated() -> None:
    engine = made(1, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4)
    reported = [engine.was_step_applied()]
    for index in range(8):
        x, y = data(index, 2)
        engine.backward(criterion(engine(x), y))
        engine.step()
        reported.append(engine.was_step_applied())
    assert reported == [False, *[False, False, False, True] * 2]


@pytest.mark.parametrize("stage", [0, 3])
def test_of_a_frozen_parameter_there_is_no_master_no_gradient_and_no_state(stage: int) -> None:
    module = make(Net)
    module.blocks[1].requires_grad_(False)
    engine = fzero.initialize(model=module, config=settings(stage))[0]
    x, y = data(0)
    engine.backward(criterion(engine(x), y))
    get, frozen, trained = deepspeed.utils, module.blocks[1].up.weight, module.blocks[0].up.weight
    assert (
        get.safe_get_full_fp32_param(frozen) is None
        and get.safe_get_full_fp32_param(trained) is not None
    )
    assert get.safe_get_full_grad(frozen) is None and get.safe_get_full_grad(trained) is not None
    assert get.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert get.safe_get_full_optimizer_state(trained, "exp_avg") is not None
    for set_ in (
        lambda: get.safe_set_full_grad(frozen, torch.zeros(1)),
        lambda: get.safe_set_full_optimizer_state(frozen, torch.zeros(1), "exp_avg"),
    ):
        with pytest.raises(ValueError, match=r"'blocks\.1\.up\.weight': must be trained"):
            set_()


@pytest.mark.parametrize("folder", ["", None, 3])
def test_an_empty_path_is_no_folder(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = made(0)
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(ValueError, match="_dir: must be a path, got"):
            call(folder)
    assert not list(tmp_path.iterdir())


def test_leaf_modules_that_are_not_there_are_reported() -> None:
    module, find = make(Net), deepspeed.utils.set_z3_leaf_modules
    names = ["Linear"], ["torch.nn.modules.linear.Linear"], [nn.Linear]
    assert len({tuple(find(module, given)) for given in names}) == 1 and find(module, [nn.Linear])
    for given in ([nn.Conv2d], ["Lineer"], []):
        with pytest.raises(
            ValueError,
            match=r"must be those of some modules of Net, got .*its modules are of Block, La",
        ):
            find(module, given)
        assert find(module, given, raise_if_not_found=False) == []
    for wrong in ("Linear", nn.Linear, [nn.Linear(1, 1)]):
        with pytest.raises(ValueError, match="must be a list of classes or their names"):
            find(module, wrong)


def test_who_must_not_join_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []
    monkeypatch.setattr(
        "fzero.comms.process_group.join", lambda *args, **kwargs: joined.append(args)
    )
    deepspeed.init_distributed(dist_init_required=False)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(
        ConfigError,
        match="dist_init_required: must not be False where torchrun has started 2 ranks",
    ):
        deepspeed.init_distributed(dist_init_required=False)
    assert not joined
    deepspeed.init_distributed()
    assert len(joined) == 1


class Recomputed(Net):
    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = []
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x)
            hidden.append(x)
        return {"logits": self.head(x), "hidden": hidden}


def _recomputes(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    deepspeed.checkpointing.configure(None, partition_activations=False)
    found = []
    for engine in (
        made(stage),
        made(stage, Recomputed),
        made(stage, activation_checkpointing={"every": 1}),
    ):
        for index in range(2):
            x, y = mine(engine, data(index))
            engine.backward(criterion(engine(x), y))
            engine.step()
        found.append(engine.module_state_dict())
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_what_runs_again_in_the_backward_changes_nothing(ranks: RankPool, stage: int) -> None:
    for plain, theirs, ours in ranks(2, _recomputes, stage):
        assert all(
            torch.equal(plain[name], theirs[name]) and torch.equal(plain[name], ours[name])
            for name in plain
        )


def test_what_checkpointing_cannot_do_is_an_error() -> None:
    with pytest.raises(ValueError, match="partition_activations must be False"):
        deepspeed.checkpointing.configure(None, partition_activations=True)


def test_an_engine_compiles_its_blocks() -> None:
    engine = made(3)
    engine.compile(backend="aot_eager")
    _, expected = plainly(_one, 2)
    for index in range(2):
        engine.backward(_one(engine, index)[0])
        engine.step()
    assert_close(engine.module_state_dict(), expected)
    with pytest.raises(ValueError, match="takes a backend and no other arguments"):
        engine.compile(compile_kwargs={"dynamic": True})


@pytest.mark.long
def test_the_example_learns_on_two_ranks_and_goes_on_on_one(tmp_path: Path) -> None:
    script = [
        str(EXAMPLES / "from_deepspeed.py"),
        "--deepspeed_config",
        str(EXAMPLES / "ds_config.json"),
        "--out",
        str(tmp_path),
    ]
    launch = [sys.executable, "-m", "fzero", "--num_procs", "2"]
    first = subprocess.run(
        [*launch, *script, "--steps", "40"], capture_output=True, text=True, timeout=240
    )
    assert first.returncode == 0, first.stderr
    assert "step=40, skipped=0" in first.stdout
    right = re.search(r"after 40 steps ([0-9.]+)% of the digits", first.stdout)
    assert right is not None and float(right[1]) > 40  # ten by chance
    again = subprocess.run(
        [sys.executable, *script, "--steps", "42"], capture_output=True, text=True, timeout=240
    )
    assert again.returncode == 0, again.stderr
    assert (
        f"goes on from {tmp_path / 'global_step40'}" in again.stdout
        and "after 42 steps" in again.stdout
    )
    assert (tmp_path / "pytorch_model.bin").exists()
