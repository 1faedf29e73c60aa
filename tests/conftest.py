"""What every test may use: a pool of real ranks, and one thread for this process.

Tests that try a law on many examples are marked `property`, which hypothesis' own get here; the last line says how long
they took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import laws  # noqa: F401 - the profiles, before any test module
import pytest
import torch
from hypothesis import is_hypothesis_test
from ranks import RankPool

if TYPE_CHECKING:
    from test_deepspeed_checkpoints import DeepSpeed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
        for marker in item.iter_markers("long"):
            item.user_properties.append(("budget", marker.kwargs["budget"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    times = [report.duration for report in reports if "property" in report.keywords]
    terminalreporter.write_line(f"{len(times)} property tests took {sum(times):.0f} s of work and waiting")
    for (part, budget), took in sorted(_of_long_parts(terminalreporter).items()):
        over = ": over" if took > budget else ""
        terminalreporter.write_line(f"{part} took {took:.0f} s of its budget of {budget:.0f} s{over}")


def _of_long_parts(terminalreporter: pytest.TerminalReporter) -> dict[tuple[str, float], float]:
    """The seconds that each file of long tests took, by its name and its budget."""
    took: dict[tuple[str, float], float] = defaultdict(float)
    every = [report for reports in terminalreporter.stats.values() for report in reports]
    for report in (report for report in every if isinstance(report, pytest.TestReport)):
        for key, budget in report.user_properties:
            if key == "budget":
                took[report.nodeid.partition("::")[0], budget] += report.duration
    return took


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepSpeed]:
    """The real one, in processes of its own."""
    from test_deepspeed_checkpoints import DeepSpeed  # not for every selection of tests

    made = DeepSpeed(tmp_path_factory.mktemp("deepspeed"))
    yield made
    made.close()
