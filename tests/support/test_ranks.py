"""The pool of ranks that tests use: a rank that ends or hangs fails its own test alone."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import ranks as pools
import torch
import torch.distributed as dist
from ranks import RankError, RankPool


def rank_of() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def end_or_hang(ends: bool) -> None:
    if dist.get_rank() == 1:
        os._exit(3) if ends else time.sleep(1000)
    dist.barrier()


def test_after_a_rank_that_ends_is_killed_or_hangs_there_are_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "MOST_RANKS", 2)
    pool = RankPool()
    try:
        assert pool(2, rank_of) == [1, 1]
        with pytest.raises(RankError, match=r"end_or_hang: ended: ranks .* exit codes .*3"):
            pool(2, end_or_hang, True)
        assert pool(2, rank_of) == [1, 1]
        pool.processes[1].kill()  # between two tests
        pool.processes[1].join()
        with pytest.raises(RankError, match="rank_of: ended: ranks"):
            pool(2, rank_of)
        assert pool(2, rank_of) == [1, 1]
        monkeypatch.setattr(pools, "TIMEOUT", timedelta(seconds=1))
        monkeypatch.setattr(pools, "GRACE", timedelta(0))
        with pytest.raises(RankError, match="end_or_hang: hang: ranks"):
            pool(2, end_or_hang, False)
        monkeypatch.undo()
        assert pool(2, rank_of) == [1, 1]
    finally:
        pool.close()
