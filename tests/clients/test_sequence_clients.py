"""accelerate and transformers' Trainer divide sequences among two ranks, unchanged, with
fzero in DeepSpeed's place.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

JOB = Path(__file__).with_name("sequence_job.py")


def _found(case: str, stage: int, folder: Path) -> list[float]:
    file = folder / "losses.json"
    alias = ["-m", "fzero", "run", "--as-deepspeed", "--no_local_rank", "--num_procs", "2"]
    done = subprocess.run(
        [sys.executable, *alias, str(JOB), case, str(stage), str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    losses: list[float] = json.loads(file.read_text())
    return losses


@pytest.mark.long
def test_accelerate_trains_on_parts_of_sequences_as_a_plain_loop(tmp_path: Path) -> None:
    sys.path.insert(0, str(JOB.parent))
    import sequence_job as job

    found, model, expected = _found("accelerate", 3, tmp_path), job.llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=job.RATE)
    rows = job.rows()
    for number in (0, 0, 1, 1):  # accelerate gives both ranks the same batches
        some = rows[number * job.SAMPLES : (number + 1) * job.SAMPLES]
        batch: dict[str, Tensor] = {key: torch.stack([row[key] for row in some]) for key in rows[0]}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=2e-6)  # rounding of fp32


@pytest.mark.long
def test_the_trainer_gives_every_stage_the_same_losses(tmp_path: Path) -> None:
    found = _found("trainer", 3, tmp_path)
    assert len(found) == 4
    assert found == pytest.approx(_found("trainer", 1, tmp_path), rel=2e-6)
    # TRL's trainer calls the model without a cache, and reads the shifted labels afterwards
    assert found == pytest.approx(_found("sft", 3, tmp_path), rel=2e-6)
