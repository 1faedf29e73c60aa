"""`fzero.log`: the numbers that it writes are those of the steps, on every rank, and a
missing package stops it at the start.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero.common.optional import MissingPackageError
from fzero.profiling import run_log

WIDTH, LENGTH, ROWS = 16, 8, 4
CONFIG = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.out(self.table(tokens)).flatten(0, 1), labels.flatten()
        )


def batches(count: int, pause: float = 0.0) -> Iterator[tuple[Tensor, Tensor]]:
    for index in range(count):
        time.sleep(pause)
        tokens = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) + index) % 10
        yield tokens, (tokens + 1) % 10


def made() -> fzero.TrainStep:
    torch.manual_seed(0)
    return fzero.make_train_step(Words(), CONFIG)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(folder: str, **how: Any) -> list[fzero.Metrics]:
    step, found = made(), []
    state = step.init()
    with fzero.log(step, folder=folder, peak=1e12, **how) as log:
        for batch in log.batches(batches(4, pause=0.02)):
            state, metrics = step(state, batch)
            log(metrics, extra=len(found))
            found.append(metrics)
    return found


def test_a_line_holds_the_numbers_of_its_step(tmp_path: Path) -> None:
    metrics, found = trained(str(tmp_path)), lines(tmp_path / "rank0.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3, 4] and [
        line["extra"] for line in found
    ] == [0, 1, 2, 3]
    for line, of_step in zip(found, metrics, strict=True):
        assert line["loss"] == of_step.loss.item() and line["grad_norm"] == of_step.grad_norm.item()
        assert (
            line["lr"] == pytest.approx(0.1) and line["loss_scale"] == 1 and line["overflow"] == 0
        )
        assert line["tokens"] == ROWS * LENGTH
        assert line["tokens_per_second"] == pytest.approx(ROWS * LENGTH / line["seconds"])
        assert 0.02 <= line["data_seconds"] < line["seconds"] and line["memory_bytes"] > 1e6
        # The linear layer: forward, gradient of its input, gradient of its weight; an embedding has
        # no product.
        flops = 3 * 2 * ROWS * LENGTH * WIDTH * 10
        assert line["tflops_per_second"] == pytest.approx(flops / line["seconds"] / 1e12)
        assert line["mfu"] == pytest.approx(flops / line["seconds"] / 1e12)  # of the peak of 1e12


def test_every_few_steps_a_line_holds_their_means(tmp_path: Path) -> None:
    trained(str(tmp_path), every=2, start=10)
    found = lines(tmp_path / "rank0.jsonl")
    assert [line["step"] for line in found] == [12, 14]
    assert all(line["tokens"] == ROWS * LENGTH and line["data_seconds"] >= 0.02 for line in found)


def on_ranks(folder: str) -> list[float]:
    return [metrics.loss.item() for metrics in trained(folder, to=["jsonl", "csv"], live=False)]


def test_every_rank_writes_its_lines_and_rank_0_the_rest(ranks: RankPool, tmp_path: Path) -> None:
    losses = ranks(2, on_ranks, str(tmp_path))
    for rank in range(2):
        found = lines(tmp_path / f"rank{rank}.jsonl")
        assert [line["loss"] for line in found] == losses[rank]
        assert found[0]["tokens_per_second"] == pytest.approx(
            2 * ROWS * LENGTH / found[0]["seconds"]
        )
    assert len((tmp_path / "loss.csv").read_text().splitlines()) == 1 + 4


class Module:
    """Records the calls of its functions. Nobody has begun a run."""

    run = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []

    def active_run(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.mark.parametrize(
    ("target", "function"), [("wandb", "log"), ("trackio", "log"), ("mlflow", "log_metrics")]
)
def test_a_target_gets_every_number(
    target: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Module()
    monkeypatch.setitem(sys.modules, target, module)  # type: ignore[arg-type]
    metrics = trained(str(tmp_path), to=[target, "jsonl"], project="mine")
    assert "mine" in str(module.calls[0])
    written: dict[int, dict[str, float]] = {}
    for name, args, kwargs in module.calls:
        if name == function:
            written.setdefault(kwargs["step"], {}).update(args[0])
    assert [written[n]["loss"] for n in (1, 2, 3, 4)] == [one.loss.item() for one in metrics]
    assert [{"step": step} | values for step, values in written.items()] == lines(
        tmp_path / "rank0.jsonl"
    )
    assert module.calls[-1][0] in ("finish", "end_run")  # with the block


@pytest.mark.parametrize("target", ["wandb", "mlflow"])
def test_a_run_that_the_script_began_is_used_and_stays_open(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Module()
    begun: dict[str, Any] = {"run": object(), "active_run": object}
    for name, value in begun.items():
        monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setitem(sys.modules, target, module)  # type: ignore[arg-type]
    trained(str(tmp_path), to=[target])
    assert {name for name, _, _ in module.calls} <= {"log", "log_metrics"} and module.calls


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Module()
    fake = SimpleNamespace(SummaryWriter=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)  # type: ignore[arg-type]
    metrics = trained(str(tmp_path), to=["tensorboard"])
    assert writer.calls[-1][0] == "close"
    losses = [args for name, args, _ in writer.calls if name == "add_scalar" and args[0] == "loss"]
    assert losses == [("loss", one.loss.item(), n) for n, one in enumerate(metrics, 1)]


@pytest.mark.parametrize("target", run_log.PACKAGES)
def test_a_missing_package_is_named_before_anything_is_written(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, run_log.PACKAGES[target] or target, None)  # an import fails
    with pytest.raises(
        MissingPackageError, match=rf"log: to='{target}'.*pip install 'fzero\[{target}\]', or use"
    ):
        fzero.log(made(), ["jsonl", target], folder=tmp_path / "log")
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"to": ["json"]}, "to must be a list of jsonl, .*got 'json'"),
        ({"to": "jsonl"}, "to must be a list"),
        ({"to": None}, "to must be a list.*got None"),
        ({"folder": 3}, "folder: must be a path"),
        ({"project": None}, "project: must be a name"),
        ({"tokens": 3}, "tokens: must be a function"),
        ({"flops": "many"}, "flops must be a positive number or None, got 'many'"),
        ({"peak": float("inf")}, "peak must be a positive number"),
        ({"every": 0}, "every"),
        ({"peak": -1.0}, "peak must be a positive number or None, got -1.0"),
    ],
)
def test_a_wrong_argument_is_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fzero.log(made(), **how)


def test_a_loss_that_is_not_finite_is_still_a_line_of_json(tmp_path: Path) -> None:
    with fzero.log(made(), folder=tmp_path, flops=1.0, peak=1.0) as log:
        nan, one = torch.tensor(float("nan")), torch.tensor(1.0)
        log(fzero.Metrics(nan, torch.tensor(float("inf")), one, torch.tensor(True), one))
    (line,) = lines(tmp_path / "rank0.jsonl")
    assert line["loss"] == "nan" and line["grad_norm"] == "inf" and line["overflow"] == 1
    assert "data_seconds" not in line and "tokens" not in line  # nothing was measured


def test_a_model_that_cannot_be_counted_is_logged_without_operations(tmp_path: Path) -> None:
    class Branches(Words):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            loss = super().forward(tokens, labels)
            return loss if loss.item() > 0 else -loss

    step = fzero.make_train_step(Branches(), CONFIG)
    state = step.init()
    with (
        fzero.log(step, folder=tmp_path) as log,
        pytest.warns(UserWarning, match="cannot be counted.*pass flops="),
    ):
        for batch in log.batches(batches(1)):
            log(step(state, batch)[1])
    (line,) = lines(tmp_path / "rank0.jsonl")
    assert "mfu" not in line and line["tokens"] == ROWS * LENGTH


def test_rank_0_shows_its_last_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(str(tmp_path))
    shown = capsys.readouterr().err
    assert (
        shown.startswith("step 1: loss ")
        and "tokens/s" in shown
        and "MFU" in shown
        and "data " in shown
    )
    trained(str(tmp_path), live=False)
    assert not capsys.readouterr().err


def test_batches_of_an_accumulation_all_count(tmp_path: Path) -> None:
    """A step may take its micro-batches from the iterator."""
    torch.manual_seed(0)
    step = fzero.make_train_step(Words(), CONFIG | {"gradient_accumulation_steps": 2})
    state = step.init()
    with fzero.log(step, folder=tmp_path, peak=1e12) as log:
        source = log.batches(batches(4))
        for _ in range(2):
            state, metrics = step(state, source)
            log(metrics)
    for line in lines(tmp_path / "rank0.jsonl"):
        assert line["tokens"] == 2 * ROWS * LENGTH
        flops = 2 * 3 * 2 * ROWS * LENGTH * WIDTH * 10
        assert line["tflops_per_second"] == pytest.approx(flops / line["seconds"] / 1e12)


def test_one_log_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    step = made()
    with fzero.log(step, folder=tmp_path, live=False):
        other = fzero.log(step, folder=tmp_path)
        with (
            pytest.raises(
                ValueError, match=r"another one writes .*rank0.jsonl; pass another folder"
            ),
            other,
        ):
            pass
    with other:  # the first one has ended
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught, fzero.log(made(), folder=tmp_path / "file"):
        pass
    assert "pass another folder=" in caught.value.__notes__[0]


def test_a_log_is_called_inside_its_block(tmp_path: Path) -> None:
    step = made()
    _, metrics = step(step.init(), next(batches(1)))
    log = fzero.log(step, folder=tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="must be called inside its block"):
        log(metrics)
    with log:
        log(metrics)
        with pytest.raises(ValueError, match="entered once at a time"), log:
            pass
    with pytest.raises(ValueError, match="must be called inside its block"):
        log(metrics)
    assert len(lines(tmp_path / "rank0.jsonl")) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"step": 3}, "step must not be given"),
        ({"loss": 3.0}, "loss must not be given"),
        ({"note": "good"}, "note must be a number, got 'good'"),
        ({"pair": torch.ones(2)}, "pair must be a number, got a Tensor"),
    ],
)
def test_a_wrong_number_of_the_loop_is_named(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    one = torch.tensor(1.0)
    with fzero.log(made(), folder=tmp_path) as log, pytest.raises(ValueError, match=message):
        log(fzero.Metrics(one, one, one, one, one), **more)
    assert lines(tmp_path / "rank0.jsonl") == []


def test_what_is_no_metrics_is_refused(tmp_path: Path) -> None:
    with (
        fzero.log(made(), folder=tmp_path) as log,
        pytest.raises(ValueError, match="must be what a step returned"),
    ):
        log(torch.ones(()))  # type: ignore[arg-type]
