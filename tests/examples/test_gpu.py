"""`make gpu` runs without a card as far as that goes: its laws on the pretended device, its parts on the processor."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_cuda import PretendedCuda

from fzero.launch.reaper import marked

ROOT = Path(__file__).parents[2]

long = pytest.mark.long


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    return done, json.loads((folder / "results.json").read_text())["parts"]


@long
@pytest.mark.parametrize("name", ["stages", "offload", "checkpoint"])
def test_its_laws_hold_on_the_pretended_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("GPU_OUT", str(tmp_path))
    parts = importlib.import_module("gpu_parts")
    with PretendedCuda():
        result = parts.LAWS[name][0](parts.CARD)
    assert result["passed"] and len(result["laws"]) > 1, result["laws"]


def test_a_weight_that_is_no_number_fails_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parts = importlib.import_module("gpu_parts")
    one, two = torch.zeros(2), torch.tensor([0.0, float("nan")])
    laws = parts.Laws()
    laws.check("bits", parts.difference({"weights": {"a": one, "b": two}}, {"weights": {"a": one, "b": one}}), 0)
    assert not laws.result()["passed"]


@long
def test_contenders_and_the_largest_model_run_on_the_processor(tmp_path: Path) -> None:
    names = ["plain, compiled", "fzero, stage 3, block", "FSDP2, compiled", "largest"]
    stale = tmp_path / "compiled" / "extensions" / "lock"  # of a compiler that was killed: later ones would wait for it
    stale.parent.mkdir(parents=True)
    stale.touch()
    done, parts = run(tmp_path, "--tiny", "--parts", ";".join(names))
    assert done.returncode == 0 and [*parts] == names, done.stdout
    assert all(parts[name]["tokens_per_second"] for name in names[:3])
    assert not stale.exists() and any((tmp_path / "compiled" / "inductor").iterdir())
    assert "| FSDP2, compiled |" in (tmp_path / "report.md").read_text()


@long
def test_ranks_agree_and_name_one_that_stays_away(tmp_path: Path) -> None:
    done, parts = run(tmp_path, "--tiny", "--parts", "between ranks;hang")
    assert done.returncode == 0, done.stdout
    assert len(parts["between ranks"]["laws"]) == 8 and "rank 1" in parts["hang"]["rows"][0]["report"]


@long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_what_was_measured_and_names_the_rest(number: signal.Signals, tmp_path: Path) -> None:
    names = ["checkpoint", "hang", "largest"]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path), "--tiny"]
    mark = f"GPU_OUT={tmp_path}".encode()
    with subprocess.Popen([*command, "--parts", ";".join(names)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "checkpoint: passed\n"
        until = time.time() + 100
        while len(marked(mark)) < 4 and time.time() < until:  # the part, the launcher and two ranks
            time.sleep(0.1)
        assert len(marked(mark)) >= 4
        for _ in range(2):  # the second one must not disturb what the first one began
            running.send_signal(number)
            time.sleep(0.1)
        running.communicate()
    assert running.returncode == 130 and not marked(mark) and not (tmp_path / "compiled").exists()
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    found = [parts[name].get("not_run") for name in names]
    assert found == [None, "interrupted in it", "interrupted before it"]
    assert "- **largest**: not run: interrupted before it" in (tmp_path / "report.md").read_text()


@long
def test_a_part_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("GPU_OUT", str(tmp_path))
    monkeypatch.setenv("GPU_RUN", tmp_path.name)
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "SECONDS_TINY", 4)
    result = gpu.run_part("hang", [], argparse.Namespace(tiny=True, out=tmp_path, cards=2))
    assert result == {"passed": False, "error": "took more than 4 s"}
    assert not marked(f"GPU_OUT={tmp_path}".encode())


def test_the_page_says_where_it_ran_with_what_and_what_the_figures_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")
    speed = {"parameters": 1_300_000_000, "tokens": 8192, "num_steps": 14, "ms": 500.0, "used": 0.4, "loss": 5.5}
    speed |= {"product_flops": 4e14, "peak_mib": 2048.0, "first_step_s": 60.0, "passed": True, "seconds": 70.0}
    parts = {
        gpu.PLAIN: speed | {"tokens_per_second": 10_000.0},
        "fzero, stage 0": speed | {"tokens_per_second": 12_500.0},
        "largest": {"not_run": "interrupted in it", "seconds": 0.0},
    }
    versions = {"python": "3.12.1", "torch": "2.13.0"}
    machine = {"date": "2030-01-01", "commit": "abc", "cards": ["H100, 80.0 GiB"], "versions": versions}
    results = {"machine": machine | {"system": {"cores": "16"}}, "tiny": False, "result": "interrupted after 160 s"}
    page = gpu.page(results | {"parts": parts})
    for said in (
        "# fzero on H100, 80.0 GiB",
        "2030-01-01, commit abc; interrupted after 160 s.",
        "- cores: 16",
        "(torch 2.11, torch 2.12, python 3.11, python 3.13)",
        "- **largest**: not run: interrupted in it",
        "1,300.0 M parameters",
        "| fzero, stage 0 | 12,500 | 1.25 | 500.0 | 0.40 | 400 | 2,048 | 60.0 | 5.500 |",
        "fastest of fzero over plain, compiled: 1.25 (goal: at least 1.0)",
    ):
        assert said in page, said
    assert "goal" not in gpu.page(results | {"parts": parts, "tiny": True})


def test_every_part_has_its_seconds_within_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parts = importlib.import_module("gpu_parts")
    assert sum(seconds for _, seconds in parts.PARTS.values()) <= parts.TOTAL < 600


def test_the_largest_model_is_kept_before_the_next_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("GPU_OUT", str(tmp_path))
    monkeypatch.setenv("GPU_UNTIL", str(time.time() + 3600))
    parts = importlib.import_module("gpu_parts")

    def train(_: Any, width: int, num_blocks: int) -> dict[str, Any]:
        if width == 64:
            return {"loss": 1.0, "step_s": 1.0}
        kept = json.loads((tmp_path / "part.json").read_text())
        assert kept["passed"] and [row["width"] for row in kept["rows"]] == [64]
        raise MemoryError("full")

    monkeypatch.setattr(parts, "trained_on_host", train)
    rows = parts.largest(parts.TINY)["rows"]
    assert [row.get("error") for row in rows] == [None, "full"]
    monkeypatch.setenv("GPU_UNTIL", "0")
    rows = parts.largest(parts.TINY)["rows"]
    assert [row.get("not_run") for row in rows] == ["no time left"]


@long
def test_a_part_that_fails_ends_no_other_and_is_reported(tmp_path: Path) -> None:
    done, parts = run(tmp_path, "--tiny", "--parts", "DeepSpeed 3;checkpoint")
    assert done.returncode == 1
    assert parts["DeepSpeed 3"]["error"] == "no part has this name" and parts["checkpoint"]["passed"]
