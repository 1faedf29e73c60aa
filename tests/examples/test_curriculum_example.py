"""The example of curricula runs, and leaves its picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_example_of_curricula_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        ROOT / "examples" / "curriculum.py",
        "--steps",
        "4",
        "--seeds",
        "2",
        "--times",
        "0",
    ]
    done = subprocess.run(
        [*command, "--out", tmp_path], check=True, capture_output=True, text=True, timeout=300
    )
    assert [line.split()[0] for line in done.stdout.splitlines()[2:5]] == [
        "plain",
        "curriculum",
        "LTD",
    ]
    assert (tmp_path / "curriculum.png").stat().st_size > 5000
