"""`fzero.log` with the real packages of its targets, where they are installed: the test
reads back what they stored.

pip install tensorboard wandb trackio mlflow
"""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = 1 << 15
"""Bytes of a block of LevelDB's log format."""

SCRIPT = """
import sys
import torch
from torch import nn
import fzero

target = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))


def loss_fn(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


cfg = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}
step = fzero.make_train_step(model, cfg, loss_fn=loss_fn)
state = step.init()
for run in range(2):  # the run of a block ends with it
    folder = f"log{run}"
    with fzero.log(step, ["jsonl", target], folder=folder, project="tried", peak=1e12, live=False) as log:
        for batch in log.batches([torch.arange(8).view(2, 4)] * 3):
            state, metrics = step(state, batch)
            if run:  # infinity and NaN
                metrics = metrics._replace(loss=metrics.loss / 0, grad_norm=metrics.loss * torch.nan)
            log(metrics, epoch=run)
"""


@pytest.mark.long
@pytest.mark.parametrize("target", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_package_stores_every_loss(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(target) is None:
        pytest.skip(f"{target} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, target],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for run in range(2):
        lines = [
            json.loads(line)
            for line in (tmp_path / f"log{run}" / "rank0.jsonl").read_text().splitlines()
        ]
        # MLflow stores infinity so
        most = sys.float_info.max if target == "mlflow" else float("inf")
        expected = [(line["step"], min(float(line["loss"]), most)) for line in lines]
        assert [step for step, _ in expected] == [1, 2, 3]
        assert stored(target, tmp_path, run) == pytest.approx(dict(expected), rel=1e-6)


def stored(target: str, folder: Path, run: int) -> dict[int, float]:
    """The losses that a package has stored, by step."""
    if target == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / f"log{run}"))
        events.Reload()
        return {event.step: event.value for event in events.Scalars("loss")}
    if target == "wandb":
        return wandb_losses(sorted((folder / "wandb").glob("offline-run-*/*.wandb"))[run])
    if target == "mlflow":
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("tried")
        found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])[
            run
        ]
        assert found.info.status == "FINISHED"
        return {
            metric.step: metric.value
            for metric in client.get_metric_history(found.info.run_id, "loss")
        }
    with sqlite3.connect(folder / "trackio" / "tried.db") as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by id"
        ).fetchall()
    names = list(dict.fromkeys(name for name, _, _ in rows))
    return {
        step: float(json.loads(values)["loss"]) for name, step, values in rows if name == names[run]
    }


def wandb_losses(path: Path) -> dict[int, float]:
    """The losses in the file of an offline run: protobuf records in LevelDB's log
    format, with seven bytes before them.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, record, losses = path.read_bytes(), 7, b"", dict[int, float]()
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        length, part = struct.unpack_from("<HB", data, at + 4)
        if left < 7 or part == 0:
            at += left
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # a whole record, or the last part of one
            history = wandb_internal_pb2.Record.FromString(record).history.item
            record = b""
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in history
            }
            if "loss" in values:
                losses[values["_step"]] = float(values["loss"])
    return losses
