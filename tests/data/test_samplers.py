"""Samplers: admission, equal use, resumption on any number of ranks; and the files of
metrics.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import Dataset

from fzero.data import (
    Admission,
    CurriculumLoader,
    CurriculumSampler,
    Metric,
    fixed_discrete,
    fixed_linear,
    read_metric,
    write_metric,
)
from fzero.data.index_files import read_rows, write_rows
from fzero.data.permutations import permuted

SCHEDULE = fixed_linear(2, 8, steps=6, multiple=2)


def lengths(num: int = 40) -> np.ndarray:
    return np.array([1 + (7 * index) % 9 for index in range(num)])


class Numbers(Dataset[Any]):
    def __init__(self, num: int = 40) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index])


def sampler(*, two: bool = False, seed: int = 1234) -> CurriculumSampler:
    admissions = {"length": Admission(SCHEDULE, Metric.of(lengths()))}
    if two:
        rarity = Metric.of(np.arange(40)[::-1])
        admissions["rarity"] = Admission(lambda g: min(4, 1 + g // 3), rarity, "percentile", 4)
    return CurriculumSampler(40, admissions, seed)


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 3))
def test_permutations_are_bijections(num: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(np.arange(num), num, seed, epoch).tolist()) == list(range(num))


def test_permutations_of_one_size_are_all_about_equally_likely() -> None:
    """24 permutations of 4 elements, 4,800 keys: 200 each, within five standard
    deviations.
    """
    counts = Counter(tuple(permuted(np.arange(4), 4, seed, 0).tolist()) for seed in range(4800))
    assert len(counts) == 24 and all(abs(count - 200) < 5 * 200**0.5 for count in counts.values())


@given(st.lists(st.integers(-5, 30), min_size=1, max_size=50), st.integers(-6, 31))
def test_a_difficulty_admits_exactly_the_samples_whose_value_is_not_above_it(
    values: list[int], difficulty: int
) -> None:
    metric = Metric.of(values)
    admitted = metric.order[: metric.up_to(difficulty)]
    assert sorted(admitted.tolist()) == [i for i, value in enumerate(values) if value <= difficulty]
    assert metric.of_each_sample().tolist() == values


def test_percentiles_admit_their_share_and_the_last_one_all() -> None:
    metric = Metric.of(np.arange(41)[::-1])
    assert [metric.percentile(share, of=4) for share in range(5)] == [0, 10, 20, 30, 41]


@pytest.mark.parametrize("two", [False, True])
def test_each_admitted_sample_is_taken_equally_often_within_an_epoch_of_a_level(two: bool) -> None:
    chosen, size, levels = sampler(two=two), 6, {}
    for batch in range(60):
        levels.setdefault(tuple(chosen.difficulties(batch).values()), []).extend(
            chosen(batch, size=size).tolist()
        )
    assert len(levels) > 3
    for difficulties, taken in levels.items():
        admitted = {i for i, length in enumerate(lengths()) if length <= difficulties[0]}
        if two:
            admitted &= {39 - i for i in range(10 * difficulties[1])}
        for start in range(0, len(taken) - len(admitted) + 1, len(admitted)):
            assert sorted(taken[start : start + len(admitted)]) == sorted(admitted)
        assert {*taken} <= admitted
    last = levels[tuple(chosen.difficulties(59).values())]
    # each epoch has an order of its own
    assert last[: len(admitted)] != last[len(admitted) : 2 * len(admitted)]


def test_batches_are_a_function_of_their_number() -> None:
    walked = [sampler(two=True)(batch, size=6).tolist() for batch in range(40)]
    again = sampler(two=True)
    for batch in (39, 0, 17, 18, 3, 25):
        assert (
            again(batch, size=6).tolist()
            == walked[batch]
            == sampler(two=True)(batch, size=6).tolist()
        )
    assert [sampler(two=True, seed=1)(batch, size=6).tolist() for batch in range(40)] != walked


def test_a_difficulty_that_falls_and_comes_back_begins_a_level_of_its_own() -> None:
    easy_again = Admission(fixed_discrete([40, 8, 40], [30, 40]), Metric.of(np.arange(40)))
    whole = CurriculumSampler(40, {"length": easy_again})
    walked = [whole(batch, size=4).tolist() for batch in range(90)]
    for batch in (0, 35, 40, 60, 75, 89):  # as a resumed job draws them
        assert (
            CurriculumSampler(40, {"length": easy_again})(batch, size=4).tolist() == walked[batch]
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank must be of 0 … 1, got 2"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (
            {"batch_size": 41},
            "must fill a batch of 41 samples on all ranks, and has 40 in 1 epochs",
        ),
        (
            {"sampler": CurriculumSampler(3)},
            "sampler must be of the dataset's 40 samples, got one of 3",
        ),
    ],
)
def test_a_loader_of_wrong_numbers_says_which(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CurriculumLoader(Numbers(), **{"sampler": sampler(), "batch_size": 2, **keys})


def loader(world_size: int, rank: int, num_micro: int, **how: Any) -> CurriculumLoader:
    micro = 12 // (world_size * num_micro)
    place: dict[str, Any] = {"rank": rank, "world_size": world_size}
    return CurriculumLoader(
        Numbers(), sampler(), batch_size=micro, num_micro=num_micro, num_epochs=6, **place, **how
    )


def batches(loaders: list[CurriculumLoader], num: int) -> list[list[int]]:
    """The samples of the next `num` batches of all ranks."""
    streams = [iter(one) for one in loaders]
    found = []
    for _ in range(num):
        parts = [
            [next(s)[:, 0].tolist() for _ in range(one.num_micro)]
            for s, one in zip(streams, loaders, strict=True)
        ]
        found.append([index for rank in parts for micro in rank for index in micro])
    return found


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_loader_resumed_on_another_number_of_ranks_gives_the_indices_of_the_unbroken_run(
    workers: int,
) -> None:
    (whole,) = ([batches([loader(1, 0, 1)], 16)],)
    two = [loader(2, rank, 3, num_workers=workers) for rank in range(2)]
    first = batches(two, 5)
    assert (
        two[0].state_dict()
        == two[1].state_dict()
        == {"batch": 5, "micro": 0, "size": 12, "num_micro": 3}
    )
    four = [loader(4, rank, 1) for rank in range(4)]
    for one in four:
        one.load_state_dict(two[0].state_dict())
    assert first + batches(four, 11) == whole[0]
    assert len(loader(1, 0, 1)) == 20 and len(list(loader(1, 0, 1))) == 20


def test_a_loader_says_what_it_cannot_resume() -> None:
    two = loader(2, 0, 3)
    next(iter(two))
    with pytest.raises(ValueError, match="was saved after 1 of 3; save after an update"):
        loader(4, 0, 1).load_state_dict(two.state_dict())
    again = loader(2, 0, 3)
    again.load_state_dict(two.state_dict())
    assert again.num_given == 1
    with pytest.raises(ValueError, match="keep train_batch_size"):
        CurriculumLoader(Numbers(), sampler(), batch_size=5).load_state_dict(two.state_dict())


def test_a_sampler_without_metrics_takes_all_samples_and_one_that_admits_none_raises() -> None:
    plain = CurriculumSampler(10)
    assert sorted(np.concatenate([plain(batch, size=5) for batch in range(2)]).tolist()) == list(
        range(10)
    )
    empty = CurriculumSampler(3, {"length": Admission(lambda g: 1, Metric.of([2, 3, 4]))})
    with pytest.raises(ValueError, match="none is admitted by length 1; raise min_difficulty"):
        empty(0, size=2)
    with pytest.raises(ValueError, match="must be of the dataset's 4 samples, got one of 3"):
        CurriculumSampler(4, {"length": Admission(lambda g: 1, Metric.of([2, 3, 4]))})


def test_a_post_process_function_sees_the_difficulties_of_its_batch() -> None:
    def cut(batch: torch.Tensor, state: dict[str, Any]) -> tuple[torch.Tensor, int, int]:
        return batch, state["current_difficulties"]["length"], state["curriculum_step"]

    seen = list(loader(1, 0, 3, post_process=cut))[:12]
    assert [(length, step) for _, length, step in seen] == [
        (SCHEDULE(1 + i // 3), 1 + i // 3) for i in range(12)
    ]


# --- files ----------------------------------------------------------------------------------------


def test_metrics_survive_their_files(tmp_path: Path) -> None:
    values = np.array([5, 300, 5, 7, 7, 7, 0])
    base = write_metric(tmp_path, "seqlen", Metric.of(values))
    found = read_metric(f"{base}_index_to_sample", f"{base}_index_to_metric")
    assert found.of_each_sample().tolist() == values.tolist() and found.order.dtype == np.uint8
    assert found.stops.tolist() == Metric.of(values).stops.tolist()
    assert read_metric(f"{base}_index_to_sample_percentile_merged").percentile(1, of=2) == 3


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must exist, and one does not"):
        read_rows(tmp_path / "none")
    write_rows(tmp_path / "rows", np.arange(5), [2, 3], np.int32)
    assert read_rows(tmp_path / "rows").row(1).tolist() == [2, 3, 4]
    (tmp_path / "rows.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match="must hold 5 numbers of int32, and is shorter"):
        read_rows(tmp_path / "rows")
    (tmp_path / "rows.idx").write_bytes((tmp_path / "rows.idx").read_bytes()[:-1])
    with pytest.raises(ValueError, match="must be whole"):
        read_rows(tmp_path / "rows")
    (tmp_path / "rows.idx").write_bytes(b"TNTIDX")
    with pytest.raises(ValueError, match="must begin with the mark"):
        read_rows(tmp_path / "rows")
