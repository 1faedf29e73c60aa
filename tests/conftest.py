"""What every test may use: a pool of real ranks, and one thread for this process.

Tests that try a law on many examples are marked `property`, which hypothesis' own get
here; the last line says how long they took. Of a test that is marked `covering(t)`,
`make test` takes so many cases that every combination of `t` parameters' values is
among them; of one that is marked `sample(n)`, `n` of its cases from the first to the
last. The others are `long`, of `make test-all`.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import devices
import profiles  # noqa: F401 - the profiles, before any test module
import pytest
import torch
from hypothesis import is_hypothesis_test
from ranks import RankPool

if TYPE_CHECKING:
    from test_deepspeed_checkpoints import DeepSpeed


collect_ignore = ["clients/client_jobs.py", "clients/sequence_job.py"] + [
    f"support/{name}.py"
    for name in (
        "deepspeed_data",
        "deepspeed_jobs",
        "deepspeed_server",
        "deepspeed_values",
        "launched_rank",
        "elastic_rank",
        "memcheck_job",
        "reached",
    )
]
"""Programs that tests start; `--doctest-modules` would import them."""

BUDGETS = {
    "attention": 120,
    "checkpoint": 300,
    "clients": 500,
    "comms": 400,
    "compression": 120,
    "config": 120,
    "data": 200,
    "deepspeed_layer": 600,
    "cli": 60,
    "curvature": 200,
    "digests": 300,
    "docs": 600,
    "estimation": 300,
    "examples": 450,
    "generation": 120,
    "graph": 900,
    "launch": 200,
    "laws": 1500,
    "model": 300,
    "optim": 300,
    "per_sample": 200,
    "pipeline": 300,
    "plans": 60,
    "profiling": 120,
    "resharding": 120,
    "runtime": 200,
    "sequence": 200,
    "step": 400,
    "storage": 260,
    "testing": 900,
    "tiling": 200,
    "transforms": 200,
    "tuning": 120,
}
"""Seconds that the long tests of a room are meant to take, on all workers together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    devices.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are found: a quarter of that time went into collections
    devices.configure(config)
    config.pluginmanager.register(Reports(config))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if devices.is_left_out(collection_path) else None


class Reports:
    """Hears of each test that has ended."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        devices.report(self.config, report)


def pytest_runtest_setup(item: pytest.Item) -> None:
    devices.begin(item)


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_function: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
        if item.get_closest_marker("covering") or item.get_closest_marker("sample"):
            of_function[item.nodeid.partition("[")[0]].append(item)
    for cases in of_function.values():
        if marker := cases[0].get_closest_marker("covering"):
            chosen = cover([case.callspec.params for case in cases], *marker.args)  # type: ignore[attr-defined]
        elif marker := cases[0].get_closest_marker("sample"):
            chosen = spread(len(cases), *marker.args)
        for case, takes_part in zip(cases, chosen, strict=True):
            if not takes_part:
                case.add_marker("long")
    devices.select(config, items)


POOLS: list[RankPool] = []
"""One, where a test needs it."""

LATE = ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx")
"""Modules that PyTorch imports when they are first used, in seconds."""
MANY = 50
"""Tests; of so many some use them."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Copies this process for the ranks. Collections of garbage no longer walk through
    what is loaded by now.
    """
    uses_ranks = (
        devices.where() != "cuda"
        and any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
        and not session.config.option.collectonly
    )
    if uses_ranks and len(session.items) > MANY:
        for name in LATE:  # once, where else each rank would import it
            import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    if uses_ranks:
        POOLS.append((RankPool if devices.where() == "cpu" else devices.PretendedRanks)("fork"))


def cover(cases: Sequence[dict[str, object]], strength: int) -> list[bool]:
    """Which of the cases are taken, one after the other, so that every combination of
    `strength` values is among them.

    >>> square = [{"a": a, "b": b} for a in range(3) for b in range(3)]
    >>> [(case["a"], case["b"]) for case, takes_part in zip(square, cover(square, 1)) if takes_part]
    [(0, 0), (1, 1), (2, 2)]
    """

    def of(case: dict[str, object]) -> set[tuple[tuple[str, str], ...]]:
        values = [(name, repr(value)) for name, value in case.items()]
        return set(combinations(values, min(strength, len(values))))

    left, taken = set().union(*map(of, cases)), [False] * len(cases)
    while left:
        best = max(range(len(cases)), key=lambda index: len(of(cases[index]) & left))
        taken[best], left = True, left - of(cases[best])
    return taken


def spread(length: int, number: int) -> list[bool]:
    """Which of the cases are taken, so that `number` of them lie evenly from the first
    to the last.

    >>> [index for index, takes_part in enumerate(spread(10, 4)) if takes_part]
    [0, 3, 6, 9]
    """
    taken = {round(part * (length - 1) / max(number - 1, 1)) for part in range(number)}
    return [index in taken for index in range(length)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())
    ]
    times = [report.duration for report in reports if "property" in report.keywords]
    terminalreporter.write_line(
        f"{len(times)} property tests took {sum(times):.0f} s of work and waiting"
    )
    for room, took in sorted(_of_long_tests(terminalreporter).items()):
        budget = BUDGETS[room]
        over = ": over" if took > budget else ""
        terminalreporter.write_line(
            f"long tests of {room} took {took:.0f} s of their budget of {budget} s{over}"
        )


def _of_long_tests(terminalreporter: pytest.TerminalReporter) -> dict[str, float]:
    """The seconds that each room's long tests took."""
    took: defaultdict[str, float] = defaultdict(float)
    every = [report for reports in terminalreporter.stats.values() for report in reports]
    for report in (report for report in every if isinstance(report, pytest.TestReport)):
        if "long" in report.keywords:
            took[report.nodeid.split("/")[1]] += report.duration
    return took


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where models and batches of tests are; `pytest --device` chooses it."""
    return devices.device_of_tests()


@pytest.fixture(autouse=True)
def autograds_threads() -> None:
    """An engine on a card switches them off for the thread of its script: here, of all
    tests.
    """
    torch.autograd.set_multithreading_enabled(True)


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with devices.on_the_device():
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool | devices.OneRank]:
    (pool,) = POOLS if devices.where() != "cuda" else (devices.OneRank(),)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepSpeed]:
    """The real one, in processes of its own."""
    from test_deepspeed_checkpoints import DeepSpeed  # not for every selection of tests

    made = DeepSpeed(tmp_path_factory.mktemp("deepspeed"))
    yield made
    made.close()
