"""The example of a pipeline, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ["pipeline.py", "--order", "zero_bubble"],
        ["pipeline.py", "--ranks", "4"],
        ["train_gpt.py", "--pipe", "2"],
    ],
)
def test_the_example_learns_on_two_stages(command: list[str]) -> None:
    name, *options = command
    arguments = [sys.executable, str(EXAMPLES / name), *options, "--size", "tiny", "--steps", "30"]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "2 stages, 4 micro-batches" in run.stdout and "layers of the stages: 0-" in run.stdout
    bits = [float(number) for number in re.findall(r"([\d.]+) bits per byte", run.stdout)]
    assert len(bits) == 10 and bits[-1] < bits[0] - 0.5 and "def " in run.stdout
