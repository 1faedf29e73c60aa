"""transformers' Trainer, accelerate, TRL and PEFT through the alias: two ranks, stages
2 and 3, beside DeepSpeed's own losses.

`client_jobs.py` is the program; `record.py` has recorded what it found with the real
DeepSpeed.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import record

MISSING = [name for name in ("trl", "peft", "datasets", "accelerate") if find_spec(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs the extra `clients`: {', '.join(MISSING)} not installed"
    ),
]
ROOT = Path(__file__).parents[2]
RECORD: dict[str, Any] = json.loads(record.RECORD.read_text())["cases"]

UNLIKE = {"sft_lora:3"}
"""Where DeepSpeed's stage 3 differs from its own stage 2 in the first loss, and after a
resume from its own run; the reference is its stage 2."""


def _close(found: list[float], expected: list[float], tolerance: float) -> bool:
    return len(found) == len(expected) and all(
        isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in zip(found, expected)
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_clients_train_as_with_deepspeed(tmp_path: Path, stage: int) -> None:
    """Losses differ by rounding: 2e-6 of a loss between DeepSpeed's own stages 2 and 3;
    TRL's sampled tokens are the same.
    """
    cases = [f"{name}:{stage}" for name in record.NAMES]
    alias = ["-m", "fzero", "run", "--as-deepspeed", "--no_local_rank", "--num_procs", "2"]
    found = record.run(alias, cases, tmp_path, [str(ROOT)])
    assert found["of"] == "fzero"
    wrong = []
    for case in cases:
        mine, expected = found[case], RECORD[case.replace("3", "2") if case in UNLIKE else case]
        for key in sorted(expected.keys() & mine.keys() - {"saved"}):
            values = [x if isinstance(x, list) else [x] for x in (mine[key], expected[key])]
            if not _close(*values, 1e-4 if key in ("norms", "adapters") else 1e-5):
                wrong.append(f"{case} {key}: {values[0]}, and DeepSpeed {values[1]}")
        if not _close(mine["resumed"], mine["losses"][2:], 0.0):
            wrong.append(
                f"{case} resumed: {mine['resumed']}, and without a stop {mine['losses'][2:]}"
            )
    assert not wrong, "\n".join(wrong)
    own = found[f"accelerate:{stage}"]
    assert _close(own["losses"], own["step"], 1e-6), "the losses of make_train_step"
    assert found[f"sft_lora:{stage}"]["adapters"] > 0.01, "adapters load back and change the logits"
    assert found[f"trainer:{stage}"]["saved"] == pytest.approx(
        RECORD[f"trainer:{stage}"]["saved"], rel=1e-6
    )
