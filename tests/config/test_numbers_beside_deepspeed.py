"""Limits of keys, and learning rates of parameter groups, beside the real DeepSpeed,
which runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fzero

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("theirs") / "values.json"
    program = Path(__file__).parents[1] / "support" / "deepspeed_values.py"
    subprocess.run([sys.executable, program, file], check=True, capture_output=True, timeout=400)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.filterwarnings("ignore:.*does not honour it yet")
def test_every_number_of_the_zero_block_that_deepspeed_accepts_is_accepted(
    theirs: dict[str, Any],
) -> None:
    """A key without effect here is accepted with any number; a key that has one,
    exactly where DeepSpeed accepts it.
    """
    wrong: list[Any] = []
    for block, key, value, is_accepted in theirs["accepted"]:
        inner = {key: value} if not block else {block: {"device": "cpu", key: value}}
        try:
            cfg = fzero.Config.load({"zero_optimization": {"stage": 3, **inner}})
            has_effect = not cfg.notes
            is_wrong = not is_accepted and has_effect
        except fzero.ConfigError:
            is_wrong = is_accepted
        if is_wrong:
            wrong.append((block, key, value, is_accepted))
    assert len(theirs["accepted"]) > 100 and not wrong


def test_configured_schedules_give_every_group_deepspeed_s_rates(theirs: dict[str, Any]) -> None:
    for name, params, lrs, expected in theirs["rates"]:
        model = nn.ModuleDict({f"m{i}": nn.Linear(1, 1) for i in range(len(lrs))})
        groups = [{"params": [*model[f"m{i}"].parameters()], "lr": lr} for i, lr in enumerate(lrs)]
        cfg = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.7}},
            "scheduler": {"type": name, "params": params},
        }
        _, optimizer, _, scheduler = fzero.initialize(
            model=model, model_parameters=groups, config=cfg
        )
        found = []
        for _ in expected:
            found.append([group["lr"] for group in optimizer.param_groups])
            scheduler.step()
        assert found == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in expected], (
            name,
            params,
            lrs,
        )
        if len(lrs) == 1:
            rate = fzero.Config.load(cfg).scheduler.for_groups(1)[0].rate(lrs[0])
            assert [rate(n) for n in range(20)] == [
                pytest.approx(row[0], rel=1e-12, abs=1e-15) for row in expected
            ]
