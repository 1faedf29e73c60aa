"""What every test may use: a pool of real ranks, one thread for this process, and how many examples hypothesis tries.

`HYPOTHESIS_PROFILE=nightly` tries ten times as many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from ranks import RankPool

hypothesis.settings.register_profile("fzero", deadline=None, max_examples=50)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=500, print_blob=True)
# Before a test module makes settings of its own, which take from the profile what they leave out.
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fzero"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
