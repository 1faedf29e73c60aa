"""`make gpu` runs without a card as far as that goes: its laws on the pretended device,
its rows on the processor.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from pretended_cuda import PretendedCuda

from fzero.launch.reaper import marked

ROOT = Path(__file__).parents[2]

long = pytest.mark.long


def run(
    folder: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--out",
        str(folder),
        "--tiny",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3100)
    parts = json.loads((folder / "results.json").read_text())["parts"]
    return done, {name: row for part in parts.values() for name, row in part.items()}


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


@long
@pytest.mark.parametrize("name", ["stages", "offload", "checkpoint"])
def test_its_laws_hold_on_the_pretended_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_OUT", str(tmp_path))
    laws, scale = module("gpu_laws", monkeypatch), module("gpu_scale", monkeypatch)
    with PretendedCuda():
        result = getattr(laws, name)(scale.CARD)
    assert result["passed"] and len(result["laws"]) > 1, result["laws"]


def test_a_weight_that_is_no_number_fails_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = module("gpu_scale", monkeypatch)
    one, two = torch.zeros(2), torch.tensor([0.0, float("nan")])
    laws = scale.Laws()
    laws.check(
        "bits",
        scale.difference({"weights": {"a": one, "b": two}}, {"weights": {"a": one, "b": one}}),
        0,
    )
    assert not laws.result()["passed"]


@long
def test_every_row_of_laws_speed_and_host_state_runs_on_the_processor(tmp_path: Path) -> None:
    # Two minutes alone; on a machine that does other things no part may be cut off, either.
    done, rows = run(tmp_path, "--laws", "--speed", "--host-state", "--seconds", "3000")
    assert done.returncode == 0, done.stdout
    parts = module_parts()
    assert {*rows} == {
        name for part in ("laws", "speed", "host-state") for name in parts.PARTS[part].rows
    }
    assert all(row["passed"] or "error" in row for row in rows.values() if "not_run" not in row)
    assert not [
        name
        for name, row in rows.items()
        if "not_run" in row
        and "card" not in row["not_run"]
        and row["not_run"] not in ("no model of this size with --tiny",)
    ]
    assert "| FSDP2, blocks compiled |" in (tmp_path / "report.md").read_text()
    assert (
        len(rows["between ranks"]["laws"]) == 8
        and "rank 1" in rows["a rank that stays away"]["rows"][0]["report"]
    )


def module_parts() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("gpu_parts")
    finally:
        sys.path.pop(0)


@long
def test_tests_run_on_the_pretended_device(tmp_path: Path) -> None:
    done, rows = run(tmp_path, "--tests", "--seconds", "400")
    found = rows["tests"]
    assert found["tests"]["passed"] and not found["failed"], done.stdout


@pytest.mark.long
def test_tests_that_have_not_begun_in_time_are_reported(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "--device",
        "pretended",
        "--until",
        "0",
    ]
    command += [
        "--lines",
        str(lines),
        *(str(ROOT / "tests" / file) for file, _ in devices.ON_A_DEVICE[1:4]),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(found) > 50 and {row["outcome"] for row in found} <= {"not reached", "skipped"}
    # The first cases of all functions come first, of the files in their order.
    functions = [row["name"].partition("[")[0] for row in found]
    first = list(dict.fromkeys(functions))
    assert functions[: len(first)] == first
    files = [name.partition("::")[0].removeprefix("tests/") for name in first]
    assert list(dict.fromkeys(files)) == [file for file, _ in devices.ON_A_DEVICE[1:4]]


def test_a_row_that_has_not_ended_has_neither_passed_nor_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {"tests": {"not_run": "it was in it", "passed": True, "seconds": 0.0, "run": 0}}
    assert "0 passed, 0 failed, 1 not run." in module("gpu_page", monkeypatch).row_lines(
        "tests", rows
    )


def test_tests_that_are_cut_off_keep_their_results_and_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = module("gpu_tests", monkeypatch)
    monkeypatch.setenv("GPU_OUT", str(tmp_path))
    monkeypatch.setenv("GPU_UNTIL", str(time.time() + 60))
    (tmp_path / "rows").mkdir()
    line = json.dumps({"name": "a.py::b", "outcome": "passed", "seconds": 0.1, "said": ""})
    hangs = (
        f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, "
        f"'rows/tests.jsonl').write_text({line!r}); time.sleep(99)"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **how: start([sys.executable, "-c", hangs], **how)
    )
    monkeypatch.setattr(tests, "keep", lambda found: None)
    monkeypatch.setattr(tests, "SECONDS_TINY", 3)
    monkeypatch.setattr(tests, "SECONDS_TO_END", 2)
    found = tests.run_tests(module("gpu_scale", monkeypatch).TINY)
    assert found["passed"] and found["tests"]["passed"] == 1 and "time was over" in found["cut_off"]


@long
def test_packages_that_are_missing_come_from_the_folder_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = module("gpu", monkeypatch)
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / "wheels")
    assert "make gpu-wheels" in gpu.install(["no_such_package"], tmp_path / "site")
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text('[project]\nname = "no-such-package"\nversion = "1"\n')
    (source / "no_such_package.py").write_text("value = 3\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "-w",
        str(tmp_path / "wheels"),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert gpu.install(["no_such_package"], tmp_path / "site") == ""
    assert importlib.import_module("no_such_package").value == 3


@long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_what_was_measured_and_names_the_rest(
    number: signal.Signals, tmp_path: Path
) -> None:
    names = ["FSDP2", "a rank that stays away", "1.3B, state on the device"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--out",
        str(tmp_path),
        "--tiny",
    ]
    mark = f"GPU_OUT={tmp_path}".encode()
    with subprocess.Popen(
        [*command, "--rows", ";".join(names)], stdout=subprocess.PIPE, text=True
    ) as running:
        until = time.time() + 100
        # the row's process, the launcher and two ranks
        while len(marked(mark)) < 4 and time.time() < until:
            time.sleep(0.1)
        assert len(marked(mark)) >= 4
        for _ in range(2):  # the second one must not disturb what the first one began
            running.send_signal(number)
            time.sleep(0.1)
        running.communicate()
    assert running.returncode == 130 and not marked(mark) and not (tmp_path / "compiled").exists()
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    found = {name: row["not_run"] for part in parts.values() for name, row in part.items()}
    assert found == {"a rank that stays away": "interrupted in it"}


def lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, limit: float, until: float = 60.0
) -> dict[str, Any]:
    """What a lane finds of two rows whose process is a small program, which gets their
    names as its last argument.
    """
    monkeypatch.setenv("GPU_RUN", tmp_path.name)
    lanes = module("gpu_lanes", monkeypatch)
    monkeypatch.setattr(lanes, "SECONDS_TO_START", 5)
    files = {name: tmp_path / f"{name}.json" for name in ("a", "b")}
    start = (
        "import json, sys, time, os, pathlib\n"
        "def keep(name, **row):\n"
        f" new = pathlib.Path({str(tmp_path)!r}, name + '.new')\n"
        " new.write_text(json.dumps(row))\n"
        " new.replace(new.with_suffix('.json'))\n"
        "names = sys.argv[-1].split(';')\n"
    )
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    made = lanes.Lane(
        "x",
        [sys.executable, "-c", start + program],
        dict.fromkeys(files, limit),
        files,
        environment,
        time.time() + until,
    )
    found: dict[str, Any] = {}
    while not made.is_done:
        found |= {name: row for name, row in made.poll() if "ended" in row}
        time.sleep(0.02)
    assert not lanes.started(f"GPU_LANE={made.mark}")
    return found


HANGS = "keep(n, begun=time.time(), passed=True); time.sleep(99)"
ENDS = "keep(n, begun=time.time(), passed=True, seconds=1.0, ended=True)"


@pytest.mark.parametrize(
    ("program", "limit", "errors"),
    [
        (f"for n in names: {ENDS}", 50, [None, None]),
        (
            f"for n in names:\n if n == 'a': raise SystemExit('broken')\n {ENDS}",
            50,
            ["exit 1: broken", None],
        ),
        (f"n = names[0]\nif n == 'a':\n {HANGS}\n{ENDS}", 1, ["took more than 1 s", None]),
    ],
)
def test_a_row_that_fails_or_hangs_ends_no_other(
    program: str,
    limit: float,
    errors: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = lane(tmp_path, monkeypatch, program, limit)
    assert [found[name].get("error") for name in ("a", "b")] == errors


def test_a_row_that_is_cut_off_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lane(
        tmp_path,
        monkeypatch,
        "keep('a', begun=time.time(), passed=True, tokens=3); time.sleep(99)",
        50,
        until=8,
    )
    assert (
        found["a"]["tokens"] == 3 and found["a"]["error"] == "no time was left" and "b" not in found
    )


def test_the_page_says_where_it_ran_with_what_and_what_the_figures_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu_page, parts = module("gpu_page", monkeypatch), module("gpu_parts", monkeypatch)
    assert {*gpu_page.PLAIN} <= {*parts.SPEED}
    figures = {
        "parameters": 1_300_000_000,
        "tokens": 16384,
        "ms": 500.0,
        "mfu": 0.4,
        "tflops": 400.0,
        "loss": 5.5,
        "run": 0,
    }
    figures |= {"peak_mib": 2048.0, "first_step_s": 60.0, "passed": True, "seconds": 70.0}
    speed = {
        "plain, eager": figures | {"tokens_per_second": 10_000.0},
        "fzero, stage 0": figures | {"tokens_per_second": 12_500.0},
        "planned peaks": {
            "passed": True,
            "rows": [{"plan": "stage 0", "peak_mib": 2000.0}],
            "seconds": 1.0,
            "run": 0,
        },
    }
    versions = {"python": "3.12.1", "torch": "2.13.0"}
    machine = {
        "command": "benchmarks/gpu.py --speed",
        "date": "2030-01-01",
        "commit": "abc",
        "cards": ["H100, 80.0 GiB"],
    }
    machine |= {
        "power": "700.00 W",
        "result": "ended after 160 s",
        "system": {"cores": "16"},
        "versions": versions,
    }
    page = gpu_page.page({"tiny": False, "runs": [machine], "parts": {"speed": speed}})
    for said in (
        "# fzero on H100, 80.0 GiB",
        "1. `benchmarks/gpu.py --speed`, 2030-01-01, commit abc, ended after 160 s: H100, 80.0 "
        "GiB, power",
        "power limit, clock and driver 700.00 W",
        "(torch 2.11, torch 2.12, python 3.11, python 3.13)",
        "1,300.0 M parameters",
        "| fzero, stage 0 | 12,500 | 1.25 | 500.0 | 400.0 | 40.0% | 2,048 | 2,000 (-2.3%) | 60.0 | "
        "5.500 | 1 |",
        "over the best plain loop: stage 0 1.25 (goal: at least 1.00 in each)",
    ):
        assert said in page, said


def test_a_row_is_not_run_again_where_it_has_passed_with_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = module("gpu", monkeypatch)
    monkeypatch.setenv("GPU_COMMIT", "abc")
    first = gpu.Run(gpu.options_of(["--tiny", "--speed", "--out", str(tmp_path)]))
    first.record("speed", "FSDP2", {"passed": True})
    first.record("speed", "fzero, stage 0", {"passed": True, "error": "no time was left"})
    first.write()
    for commit, again, left_out in (
        ("abc", [], {"FSDP2"}),
        ("abc", ["--again"], set()),
        ("def", [], set()),
    ):
        monkeypatch.setenv("GPU_COMMIT", commit)
        second = gpu.Run(gpu.options_of(["--tiny", "--speed", "--out", str(tmp_path), *again]))
        rows = second.rows_of("speed")
        assert {*gpu.PARTS["speed"].rows} - {*rows} == left_out


def test_device_gaps_are_the_times_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = module("gpu_speed", monkeypatch)
    events = [
        {"cat": "kernel", "ts": ts, "dur": dur, "name": name}
        for ts, dur, name in [(0, 40, "a"), (10, 10, "b"), (50, 50, "c")]
    ]
    found = speed.idle(
        [*events, {"cat": "cpu_op", "ts": 40, "dur": 10, "name": "host"}], speed.DEVICE, 1
    )
    assert found["idle"] == 0.1 and [gap["before"] for gap in found["rows"]] == ["c"]


def test_parts_fit_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = module("gpu_parts", monkeypatch)
    assert {name: part.seconds for name, part in parts.PARTS.items()} == {
        "laws": 150, "speed": 200, "host-state": 150, "tests": 200,
    }  # fmt: skip
    assert parts.TOTAL < 600
