"""Schedules, counters and files beside the real DeepSpeed, which runs in a process of
its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_data import CURRICULA, LENGTHS, LTD, STEPS, VALUES, curriculum

from fzero.data import Metric, read_metric, write_metric
from fzero.data.index_files import read_rows
from fzero.deepspeed.engine.data_schedulers import (
    CurriculumScheduler,
    ProgressiveLayerDrop,
    RandomLTDScheduler,
)
from fzero.deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
from fzero.deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    batch_by_seqlens,
)

pytestmark = pytest.mark.long
OWN = np.array([5, 300, 5, 7, 7, 7, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("theirs")
    write_metric(found / "ours", "seqlen", Metric.of(OWN))
    program = Path(__file__).parents[1] / "support" / "deepspeed_data.py"
    subprocess.run([sys.executable, program, found], check=True, capture_output=True, timeout=300)
    return found


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
    return found


def test_difficulties_are_deepspeed_s(theirs: dict[str, Any]) -> None:
    for (kind, numbers), values in zip(CURRICULA, theirs["curricula"], strict=True):
        own = CurriculumScheduler(curriculum(kind, numbers))
        assert [own.get_current_difficulty(), *map(own.update_difficulty, range(1, 60))] == values


def test_kept_tokens_and_layer_tokens_are_deepspeed_s(theirs: dict[str, Any]) -> None:
    own = RandomLTDScheduler(LTD)
    for n, state in zip(STEPS, theirs["ltd"], strict=True):
        own.update_seq(n)
        assert own.state_dict() == state
    resumed = RandomLTDScheduler(LTD)
    resumed.update_seq(59)  # it holds no history: all follows from the number of updates
    assert resumed.state_dict() == own.state_dict()
    assert RandomLTDScheduler(LTD).get_total_layer_tokens(30) == theirs["total"]


def test_theta_is_deepspeed_s(theirs: dict[str, Any]) -> None:
    own = ProgressiveLayerDrop(0.3, 0.01)
    for n, theta in enumerate(theirs["theta"]):
        own.update_state(n)
        assert own.get_theta() == pytest.approx(theta, rel=1e-15)  # the exp of another library


def test_deepspeed_reads_our_files(theirs: dict[str, Any]) -> None:
    assert theirs["rows"]["seqlen_index_to_sample"] == ["uint8", [[6], [0, 2], [3, 4, 5], [1]]]
    assert theirs["rows"]["seqlen_index_to_metric"] == ["uint16", [[0], [5], [7], [300]]]
    assert theirs["rows"]["seqlen_sample_to_metric"] == [
        "uint16",
        [[value] for value in OWN.tolist()],
    ]


def test_files_of_deepspeed_s_analyzer_are_read_and_ours_have_their_bytes(folder: Path) -> None:
    base = folder / "theirs" / "mod" / "mod"
    found = read_metric(f"{base}_index_to_sample", f"{base}_index_to_metric")
    assert found.of_each_sample().tolist() == VALUES
    ours = write_metric(folder / "again", "mod", Metric.of(VALUES))
    for ending in (
        "sample_to_metric",
        "index_to_metric",
        "index_to_sample",
        "index_to_sample_percentile_merged",
    ):
        assert (
            Path(f"{base}_{ending}.bin").read_bytes() == Path(f"{ours}_{ending}.bin").read_bytes()
        )
        one, two = read_rows(f"{base}_{ending}"), read_rows(f"{ours}_{ending}")
        assert one.sizes.tolist() == two.sizes.tolist() and one.values.dtype == two.values.dtype


def test_batches_by_tokens_are_deepspeed_s_but_for_the_last_sample(theirs: dict[str, Any]) -> None:
    """DeepSpeed 0.19 never uses the last sample; among those before it the batches are
    equal.
    """
    order = sorted(range(len(LENGTHS)), key=lambda index: (LENGTHS[index], index))
    parts, sizes, longest = batch_by_seqlens(LENGTHS, 64, order[:-1], effective_batch_size=2)
    theirs_parts, theirs_sizes, theirs_longest = theirs["packed"]
    num = min(len(sizes), len(theirs_sizes))
    assert (
        num > 5
        and [[number, ids] for number, ids in parts][: 2 * num - 2] == theirs_parts[: 2 * num - 2]
    )
    assert (
        sizes[: num - 1] == theirs_sizes[: num - 1]
        and longest[: num - 1] == theirs_longest[: num - 1]
    )


def test_the_analyzer_writes_deepspeed_s_bytes(folder: Path) -> None:
    analyzer = DataAnalyzer(
        VALUES,
        2,
        batch_size=5,
        metric_names=["mod", "total"],  # type: ignore[arg-type]
        metric_functions=[
            torch.as_tensor,
            lambda batch: torch.stack([batch.sum(), batch.square().sum()]),
        ],
        metric_types=["single_value_per_sample", "accumulate_value_over_samples"],
        save_path=folder / "analyzed",
    )
    for analyzer.worker_id in (1, 0):
        analyzer.run_map()
    analyzer.run_reduce()
    endings = (
        "sample_to_metric",
        "index_to_metric",
        "index_to_sample",
        "index_to_sample_percentile_merged",
    )
    for name in (*(f"mod/mod_{ending}.bin" for ending in endings), "total/total_metric_value.bin"):
        assert (folder / "theirs" / name).read_bytes() == (
            folder / "analyzed" / name
        ).read_bytes(), name
