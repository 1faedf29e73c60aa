"""A plugin of pytest: memory that PyTorch has not initialized holds NaN, or the largest integer, in the pool's ranks too.

`python -m pytest -p filled` fails where a result depends on such memory, which is zero by chance in most runs. `make memcheck`
uses it. PyTorch then also takes operators that add in a fixed order, where it has them.
"""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation.*")
