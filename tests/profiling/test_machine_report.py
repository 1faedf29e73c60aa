"""The laws of `fzero env`: what it reports is there, and every rate is a rate."""

from __future__ import annotations

import json
import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.__main__ import main
from fzero.common.text_tables import as_text
from fzero.profiling.machine import NAMES, MachineReport, MeasuredRates, disk_rates, table
from fzero.profiling.profiler import usual
from fzero.storage.file_tensor import StoreError


@pytest.mark.long
def test_a_machine_is_reported_with_its_versions_and_its_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "--json", "--path", str(tmp_path)]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["versions"]["torch"] == torch.__version__ and "gloo" in reported["backends"]
    assert reported["rates"].keys() == NAMES.keys()
    on_gpu = {"device_copy", "to_device"} if not torch.cuda.is_available() else set()
    for name, rate in reported["rates"].items():
        if name == "overlap":
            assert rate is (
                torch.cuda.is_available() or torch.get_num_threads() < len(os.sched_getaffinity(0))
            )
        elif name in ("latency", "operator"):  # seconds
            assert 0 < rate < 1
        else:
            assert rate is None if name in on_gpu else 1e6 < rate < 1e17, name
    assert not list(tmp_path.iterdir())  # the file that was measured is gone
    shown = as_text(
        table(MachineReport(**reported | {"rates": MeasuredRates(**reported["rates"])}))
    )
    assert (
        all(what in shown for what, _ in NAMES.values())
        and f"{reported['rates']['gather'] / 1e9:.2f} GB/s" in shown
    )


@pytest.mark.long
def test_ranks_that_measure_at_once_are_what_a_plan_is_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "--json", "--ranks", "2", "--path", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rates = MeasuredRates(**json.loads(printed)["rates"])
    assert all(
        getattr(rates, name)
        for name in ("host_copy", "gather", "disk_write", "flops_bf16", "latency")
    )
    machine = rates.machine
    assert (machine.network, machine.latency, machine.flops_fp32) == (
        rates.gather,
        rates.latency,
        rates.flops_fp32,
    )
    assert machine.memory == 2 * (rates.device_copy or rates.host_copy), "a copy reads and writes"
    (tmp_path / "rates.json").write_text(printed)
    plan = [
        "plan",
        "--model",
        "20M",
        "--sequence",
        "64",
        "--world",
        "2",
        "--device",
        "cpu",
        "--json",
    ]
    picture = tmp_path / "peak.png"
    given = ["--rates", str(tmp_path / "rates.json"), "--picture", str(picture)]
    seconds = []
    for more in ([], given, [*given, "--flops", "1e6"]):
        assert main([*plan, *more]) == 0
        seconds.append(
            [one["seconds"] for one in json.loads(capsys.readouterr().out)["configurations"]]
        )
    assert len({tuple(one) for one in seconds}) == 3 and min(seconds[2]) > max(seconds[1])
    assert picture.stat().st_size > 10_000
    (tmp_path / "rates.json").write_text("{}")
    assert main([*plan, *given]) == 1
    assert "must be the output of `fzero env --json`" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "--path", f"{tmp_path}/nowhere"]) == 1
    assert f"--path {tmp_path}/nowhere: " in capsys.readouterr().err


def test_facts_come_at_once_and_then_what_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def measured(name: str, value: Any) -> None:
        def measure(*args: Any, **kwargs: Any) -> Any:
            order.append(capsys.readouterr().out + name)
            return value

        monkeypatch.setattr(f"fzero.profiling.machine.{name}", measure)

    for name in (
        "matrix_rate",
        "attention_rate",
        "pointwise_rate",
        "update_rate",
        "operator_seconds",
    ):
        measured(name, 1e9)
    measured("disk_rates", (1e9, 1e9))
    measured("_run_ranks", [(1e9, 1e-6), None])
    assert main(["env", "--path", str(tmp_path)]) == 0
    assert (
        f"free in {tmp_path}" in order[0]
        and order[0].endswith("disk_rates")
        and "┃ rate" in capsys.readouterr().out
    )
    assert {name.rpartition("\n")[2] for name in order} >= {
        "matrix_rate",
        "attention_rate",
        "_run_ranks",
    }
    order.clear()
    assert main(["env", "--json", "--seconds", "0", "--path", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert [line for line in said.splitlines() if line] == [], "read while it was measured"
    assert order == ["disk_rates", "matrix_rate", "matrix_rate"], "no other rates are needed"


def test_a_slow_call_ends_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("fzero.profiling.profiler.MOST_SECONDS", 0.05)
    usual(lambda: calls.append(time.sleep(0.1)), torch.device("cpu"))
    assert len(calls) == 1


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert fzero.__version__ == metadata.version("fzero")
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"fzero {fzero.__version__}\n"


def test_a_rate_is_that_of_the_median_repetition() -> None:

    pauses = iter([0.5, 0.1, 0.001, *[0.02] * 5])
    assert 0.02 <= usual(lambda: time.sleep(next(pauses)), torch.device("cpu")) < 0.1


def test_the_disk_is_measured_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fzero.profiling.machine.DISK_NBYTES", 1 << 22)
    assert min(disk_rates(tmp_path)) > 0
    with pytest.raises(OSError):
        disk_rates(tmp_path / "missing")

    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr("fzero.profiling.machine.FileStore", full)
    with pytest.raises(
        OSError, match="a file of 4 MiB must be written and read there, got: the disk is full"
    ):
        disk_rates(tmp_path)
    assert not list(tmp_path.iterdir())
