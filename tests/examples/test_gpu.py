"""`make gpu` runs without a card as far as that goes: its laws on the pretended device, its parts on the processor."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_cuda import PretendedCuda

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    return done, json.loads((folder / "results.json").read_text())["parts"]


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


def test_ranks_agree_and_name_one_that_stays_away(tmp_path: Path) -> None:
    done, parts = run(tmp_path, "--tiny", "--parts", "between ranks;hang")
    assert done.returncode == 0, done.stdout
    assert len(parts["between ranks"]["laws"]) == 8 and "rank 1" in parts["hang"]["rows"][0]


def test_an_interrupt_keeps_what_was_measured_and_names_the_rest(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--out",
        str(tmp_path),
        "--tiny",
        "--parts",
        "checkpoint;hang;largest",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "checkpoint: passed\n"
        running.send_signal(signal.SIGINT)
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    found = [parts[name].get("not_run") for name in ("checkpoint", "hang", "largest")]
    assert found == [None, "interrupted in it", "interrupted before it"]
    assert "- **largest**: interrupted before it" in (tmp_path / "report.md").read_text()


def test_a_part_that_fails_ends_no_other_and_is_reported(tmp_path: Path) -> None:
    done, parts = run(tmp_path, "--tiny", "--parts", "DeepSpeed 3;checkpoint")
    assert done.returncode == 1
    assert parts["DeepSpeed 3"]["error"] == "no part has this name" and parts["checkpoint"]["passed"]
