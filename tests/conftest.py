"""What every test may use: a pool of real ranks, and one thread for this process."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch
from ranks import RankPool

hypothesis.settings.register_profile("fzero", deadline=None, max_examples=50)
hypothesis.settings.load_profile("fzero")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
