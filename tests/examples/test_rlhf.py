"""The example of reinforcement learning: its reward rises, by a step and by DeepSpeed's
calls.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/rlhf.py"


@pytest.mark.long
@pytest.mark.parametrize("by", ["step", "engine"])
def test_the_reward_rises(by: str, tmp_path: Path) -> None:
    picture = tmp_path / "rlhf.png"
    words = [
        "--num_procs",
        "2",
        str(EXAMPLE),
        "--by",
        by,
        "--seeds",
        "1",
        "--updates",
        "12",
        "--out",
        str(picture),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "fzero", "run", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"reward per token (\S+) -> (\S+)", done.stdout)[0])
    assert last > first + 0.5 and picture.exists()
