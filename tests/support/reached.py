"""A plugin of pytest that records which lines of fzero and sharding each test reaches,
also in the pool's ranks.

`python -m pytest -p reached` writes a file of coverage.py for each process, and the
tests' seconds, into the folder that the environment variable `REACHED` names.
`tests/support/mutants.py` reads them.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import coverage
import pytest
from ranks import RankPool

FOLDER = Path(os.environ["REACHED"])
ROOT = Path(__file__).parents[2]
SECONDS: defaultdict[str, float] = defaultdict(float)
"""How long each test took in this process."""

_started: list[coverage.Coverage] = []  # one, once it records


def record(test: str) -> None:
    """From now on lines that this process reaches count for a test."""
    if not _started:
        recorder = coverage.Coverage(
            data_file=str(FOLDER / "lines"), data_suffix=True, config_file=False,
            include=[f"{ROOT}/fzero/*", f"{ROOT}/sharding/*"],
        )  # fmt: skip
        recorder.start()
        _started.append(recorder)
    _started[0].switch_context(test)


def save() -> None:
    if _started:
        _started[0].stop()
        _started[0].save()


def on_a_rank(test: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the function on a rank of the pool; its lines count for the test."""
    if not _started:
        Finalize(None, save, exitpriority=0)  # processes of multiprocessing run no exit handlers
    record(test)
    return function(*args, **kwargs)


def _call(
    self: RankPool, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[Any]:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return CALL(self, world_size, on_a_rank, test, function, *args, **kwargs)


CALL = RankPool.__call__


def pytest_configure() -> None:
    RankPool.__call__ = _call  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    record(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid] += report.duration


def pytest_unconfigure() -> None:
    save()
    (FOLDER / f"seconds-{os.getpid()}.json").write_text(json.dumps(SECONDS))
