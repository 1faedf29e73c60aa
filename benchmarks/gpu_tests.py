"""The tests of `tests/` that have a meaning on a device, by pytest: as many as the time
allows, in the order of their worth.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_scale import Scale, keep

ROOT = Path(__file__).parents[1]
SECONDS_TO_END = 12
SECONDS_TINY = 80
"""Without a card: they run with the other tests, too."""


def run_tests(scale: Scale) -> dict[str, Any]:
    """Runs `pytest --device`; a plugin of the tests (`tests/support/devices.py`)
    chooses them and writes a line for each.
    """
    if missing := [
        name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None
    ]:
        return {"not_run": f"{' and '.join(missing)} is not installed"}
    until = float(os.environ["GPU_UNTIL"]) - SECONDS_TO_END
    until = until if scale.on_card else min(until, time.time() + SECONDS_TINY)
    lines = Path(os.environ["GPU_OUT"]) / "rows" / "tests.jsonl"
    lines.unlink(missing_ok=True)
    device = "cuda" if scale.on_card else "pretended"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--device",
        device,
        "--until",
        str(until),
        "--lines",
        str(lines),
    ]
    command += ["-p", "no:cacheprovider", "-o", "addopts=", "-q", "--tb=short", str(ROOT / "tests")]
    if scale.on_card and importlib.util.find_spec("xdist"):
        command += [
            "-n",
            str(max(2, (os.cpu_count() or 1) - 4)),
            "--dist",
            "load",
            "--maxschedchunk",
            "1",
        ]
    log = lines.with_suffix(".log")
    few_examples = os.environ | {"HYPOTHESIS_PROFILE": "short"}
    with log.open("wb") as out:
        running = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=few_examples
        )
        while running.poll() is None and time.time() < until + SECONDS_TO_END / 2:
            time.sleep(0.5)
            keep(found_in(lines))
        was_in_a_test = running.poll() is None
        if was_in_a_test:
            running.kill()
            running.wait()
    found = found_in(lines)
    if was_in_a_test:
        return found | {"cut_off": "the time was over before the last tests had ended"}
    if running.returncode not in (0, 1, 5) and not found["failed"]:
        return found | {
            "passed": False,
            "error": f"pytest ended with {running.returncode}",
            "traceback": log.read_text()[-6000:],
        }
    return found


def found_in(path: Path) -> dict[str, Any]:
    """The counts, the tests that failed with the end of their report, and why others
    were not run.
    """
    text = path.read_text() if path.exists() else ""
    tests = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    by: dict[str, list[dict[str, Any]]] = {
        "passed": [],
        "failed": [],
        "skipped": [],
        "not reached": [],
    }
    for test in tests:
        by[test["outcome"]].append(test)
    why: dict[str, int] = {}
    for test in by["skipped"]:
        why[test["said"]] = why.get(test["said"], 0) + 1
    return {
        "passed": bool(by["passed"]) and not by["failed"],
        "tests": {kind: len(of) for kind, of in by.items()},
        "failed": [{"name": test["name"], "said": test["said"]} for test in by["failed"][:40]],
        "skipped": why,
        "not_reached": [test["name"] for test in by["not reached"]][:100],
        "files": per_file(tests),
    }


def per_file(tests: list[dict[str, Any]]) -> dict[str, str]:
    counts: dict[str, dict[str, int]] = {}
    for test in tests:
        of = counts.setdefault(test["name"].partition("::")[0], {})
        of[test["outcome"]] = of.get(test["outcome"], 0) + 1
    return {
        file: ", ".join(f"{num} {kind}" for kind, num in of.items()) for file, of in counts.items()
    }
