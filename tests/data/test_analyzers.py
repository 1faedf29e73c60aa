"""Analyzers and batches by tokens: every sample measured once by any number of workers,
and rates that follow batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPool
from test_engine_data import ADAM, SAMPLES, Net, Samples
from training import make

import fzero
from fzero.config.config import ConfigError
from fzero.data import analyze, batches_by_tokens, read_metric, scaled_rate
from fzero.data.index_files import read_rows
from fzero.deepspeed.runtime.data_pipeline.data_sampling import (
    variable_batch_size_and_lr as variable,
)
from fzero.deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import (
    DataAnalyzer,
    DistributedDataAnalyzer,
)
from fzero.deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

VALUES = [(index * 37) % 11 for index in range(50)]
METRICS: dict[str, Any] = {
    "metric_names": ["mod", "total"],
    "metric_functions": [torch.as_tensor, lambda batch: torch.stack([batch.sum(), batch.max()])],
    "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_every_sample_is_measured_once_and_progress_is_reported(workers: int) -> None:
    reported: list[tuple[int, int]] = []
    functions = {"mod": lambda batch: batch, "odd": lambda batch: batch % 2}
    how: dict[str, Any] = {
        "batch_size": 8,
        "workers": workers,
        "progress": lambda done, of: reported.append((done, of)),
    }
    found = analyze(VALUES, functions, **how)  # type: ignore[arg-type]
    assert found["mod"].of_each_sample().tolist() == VALUES and found["odd"].up_to(0) == sum(
        v % 2 == 0 for v in VALUES
    )
    assert reported == [(min(50, 8 * (i + 1)), 50) for i in range(7)]


def test_a_metric_that_counts_something_else_is_named() -> None:
    with pytest.raises(
        ValueError,
        match="metric 'mod' must give one whole number for each of the 8 samples of a batch",
    ):
        analyze(VALUES, {"mod": lambda batch: batch[:2]}, batch_size=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got float32 of shape \(8,\)"):
        analyze(VALUES, {"mod": lambda batch: batch.float()}, batch_size=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the dataset must have samples, and is empty"):
        analyze([], {"mod": len})  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_analyzer_of_several_workers_writes_one_set_of_files(
    tmp_path: Path, workers: int
) -> None:
    for worker in range(workers):
        analyzer = DataAnalyzer(
            VALUES, workers, worker, batch_size=8, save_path=tmp_path, **METRICS
        )  # type: ignore[arg-type]
        analyzer.run_map()
    analyzer.run_reduce()
    base = tmp_path / "mod" / "mod"
    assert (
        read_metric(f"{base}_index_to_sample", f"{base}_index_to_metric").of_each_sample().tolist()
        == VALUES
    )
    assert read_rows(f"{base}_sample_to_metric").values.tolist() == VALUES
    total = read_rows(tmp_path / "total" / "total_metric_value").row(0).tolist()
    assert total[0] == sum(VALUES) and (
        workers > 1 or total[1] == sum(max(VALUES[i : i + 8]) for i in range(0, 50, 8))
    )


def test_samples_have_the_numbers_that_a_batch_or_the_script_gives_them(tmp_path: Path) -> None:
    data = [
        {"index": torch.tensor([49 - i]), "value": torch.tensor(VALUES[49 - i])} for i in range(50)
    ]
    how: dict[str, Any] = {
        "metric_names": ["mod"],
        "metric_types": ["single_value_per_sample"],
        "batch_size": 7,
    }
    analyzer = DataAnalyzer(
        data, save_path=tmp_path / "one", metric_functions=[lambda batch: batch["value"]], **how
    )  # type: ignore[arg-type]
    analyzer.run_map_reduce()
    own = list(range(49, -1, -1))
    again = DataAnalyzer(
        VALUES[::-1],
        save_path=tmp_path / "two",
        sample_indices=own,
        metric_functions=[torch.as_tensor],
        **how,
    )  # type: ignore[arg-type]
    again.run_map_reduce()
    for folder in ("one", "two"):
        base = tmp_path / folder / "mod" / "mod"
        assert (
            read_metric(f"{base}_index_to_sample", f"{base}_index_to_metric")
            .of_each_sample()
            .tolist()
            == VALUES
        )
    with pytest.raises(ConfigError, match="custom functions must be left out"):
        DataAnalyzer(VALUES, custom_reduce=print)  # type: ignore[arg-type]
    for keys, message in (
        (
            {"metric_names": ["a"]},
            "for each metric, got metric_names 1, metric_functions 0, metric_types 0",
        ),
        ({"worker_id": 2, "num_workers": 2}, "worker_id must be of 0 … 1, got 2"),
        ({"dataset": []}, "the dataset must have samples"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataAnalyzer(**{"dataset": VALUES, **keys})  # type: ignore[arg-type]


def _analyzed(folder: Path) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    DistributedDataAnalyzer(
        VALUES, world, worker_id=rank, batch_size=8, save_path=folder, **METRICS
    ).run_map_reduce()  # type: ignore[arg-type]


def _analyzed_by_two(folder: Path) -> None:
    group = torch.distributed.new_group([0, 1])
    if torch.distributed.get_rank() < 2:  # the third rank does other things meanwhile
        how: dict[str, Any] = {"batch_size": 8, "save_path": folder, "comm_group": group, **METRICS}
        DistributedDataAnalyzer(VALUES, **how).run_map_reduce()  # type: ignore[arg-type]
        assert read_rows(folder / "mod" / "mod_sample_to_metric").values.tolist() == VALUES


def test_a_group_of_ranks_waits_for_its_own_alone(tmp_path: Path, ranks: RankPool) -> None:
    ranks(3, _analyzed_by_two, tmp_path)


@pytest.mark.long
def test_the_analyzer_of_all_ranks_writes_the_same_files(tmp_path: Path, ranks: RankPool) -> None:
    ranks(3, _analyzed, tmp_path)
    assert read_rows(tmp_path / "mod" / "mod_sample_to_metric").values.tolist() == VALUES


# --- batches by tokens ----------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 12), min_size=12, max_size=60),
    st.integers(12, 40),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["dataloader", "random", "seqlen"]),
)
def test_batches_hold_each_sample_at_most_once_within_their_tokens(
    lengths: list[int], most: int, num_parts: int, same_size: bool, order: Any
) -> None:
    try:
        batches = batches_by_tokens(
            lengths, most, num_parts=num_parts, same_size=same_size, order=order, seed=3
        )
    except ValueError:
        assert sum(lengths) <= num_parts * most  # too few for one batch
        return
    taken = [index for batch in batches for part in batch.parts for index in part]
    assert len(taken) == len({*taken}) and all(len(batch.parts) == num_parts for batch in batches)
    for batch in batches:
        assert all(sum(lengths[i] for i in part) <= most for part in batch.parts)
        assert not same_size or len({len(part) for part in batch.parts}) == 1
        assert batch.longest == max(lengths[i] for part in batch.parts for i in part)
    if num_parts == 1:
        assert sorted(taken) == list(range(len(lengths)))  # the last one, too


def test_what_no_batch_can_hold_is_said() -> None:
    with pytest.warns(UserWarning, match="1 of 3 samples are longer than max_tokens 4"):
        assert batches_by_tokens([9, 2, 2], 4)[0].parts == ((1, 2),)
    with pytest.raises(ValueError, match="micro-batches of min_size 2 must fit in max_tokens 4"):
        batches_by_tokens([1, 4, 3, 3], 4, min_size=2)
    with pytest.raises(ValueError, match="must fill a batch of 3 micro-batches, and fill 1"):
        batches_by_tokens([1, 2], 4, num_parts=3)
    with pytest.raises(ValueError, match="lr_scaling_method: must be"):
        scaled_rate(1, 2, 0.1, "cubic")


def test_an_engine_s_rates_follow_the_samples_of_its_batches(tmp_path: Path) -> None:
    block = {
        "enabled": True,
        "max_tokens": 10,
        "metrics_path": str(tmp_path),
        "lr_scaling_method": "sqrt",
    }
    efficiency = {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": block}}
    keys = {"optimizer": ADAM, "train_micro_batch_size_per_gpu": 1, "data_efficiency": efficiency}
    engine = fzero.initialize(model=make(Net), config={**keys, "gradient_accumulation_steps": 2})[0]
    make_both = variable.get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
    with pytest.raises(ConfigError, match="batch_seqlens_fn: is required"):
        make_both(Samples(), engine)
    collate: Any = torch.utils.data.default_collate
    how: dict[str, Any] = {
        "dataloader_collate_fn": collate,
        "batch_seqlens_fn": lambda batch: 1 + batch[1] % 5,
    }
    loader, engine.lr_scheduler, _ = make_both(Samples(), engine, **how)
    batches = batches_by_tokens([1 + i % 5 for i in range(SAMPLES)], 10, num_parts=2)
    stream = iter(loader)
    for batch in batches:
        drawn: list[int] = []
        for _ in range(2):
            x, index = next(stream)
            drawn += index.tolist()
            engine.backward(engine(x))
            assert engine.get_lr() == [
                pytest.approx(1e-2 * (batch.num_samples / 2) ** 0.5, rel=1e-12)
            ]
            engine.step()
        assert drawn == [i for part in batch.parts for i in part]
    assert np.isclose(float(engine.metrics.lr), 1e-2 * (batches[-1].num_samples / 2) ** 0.5)
    with pytest.raises(ConfigError, match="dynamic_batching: must be enabled"):
        make_both(Samples(), fzero.initialize(model=make(Net), config={"optimizer": ADAM})[0])


def test_deepspeed_s_sampler_draws_the_loader_s_samples() -> None:
    block = {"enabled": True, "data_sampling": {"enabled": True, "num_epochs": 2}}
    found = [DeepSpeedDataSampler(block, 20, 2, rank, 2, None, 2, rank) for rank in range(2)]
    drawn = [[index for micro in sampler for index in micro] for sampler in found]
    assert sorted(drawn[0] + drawn[1]) == sorted([*range(20), *range(20)])
    assert found[0].state_dict()["consumed_samples"] == 40 == len(found[0])
