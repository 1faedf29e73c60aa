"""The device of the tests: the processor, a card (`pytest --device cuda`), or the
pretended one (`--device pretended`).

Tests make models and batches by `training.make`, `tokens` and `vectors`, which put them
on the device, or take the fixture `device`. On a device only the tests of `ON_A_DEVICE`
run: the first case of every function in this order, then the second cases, and so on,
so that each law is tried before the time is over. A card has one real rank, for NCCL
takes one for each card; the pretended one has as many as are asked for, with
collectives of a pretended NCCL. Tests that have not begun by `--until` are reported as
not reached, and `--lines` gets a line of JSON for each test when it ends.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch
from ranks import RankPool

ON_A_DEVICE: tuple[tuple[str, str], ...] = (
    ("laws/test_host_waits.py", ""),
    ("laws/test_stages.py", ""),
    ("runtime/test_precision.py", ""),
    ("runtime/test_accumulation.py", ""),
    ("optim/test_loss_scaling.py", ""),
    ("storage/test_offload_params.py", ""),
    ("storage/test_offload.py", ""),
    ("generation/test_generating.py", ""),
    ("checkpoint/test_checkpoint.py", ""),
    ("data/test_token_dropping.py", ""),
    ("resharding/test_reshard.py", ""),
    ("compression/test_training.py", ""),
    ("attention/test_modules.py", ""),
    ("model/test_checkpointing.py", ""),
)
"""File of tests, and a part of the names of functions (all, if it is empty), by worth.
"""

ROUNDS = (
    "the processor's AdamW rounds otherwise than the card's; `make gpu ARGS=--laws` compares "
    "them to rounding"
)
ASSERTS = "on a device an error of the loss is an assertion there, which ends the process"
ON_THE_CPU = "its state or its oracle, of another package, is on the CPU"
NOT_ON_A_DEVICE: dict[str, dict[str, str]] = {
    "cuda": {
        "the_bits_of_the_device": ROUNDS,
        "test_the_processor_updates_what_lives_in_host_memory": ROUNDS,
        "test_on_several_axes_too": ROUNDS,
        "test_files_of_a_step_with_other_streaming_are_refused": ROUNDS,
        "test_a_state_may_move_between_two_steps": ROUNDS,
        "test_stage_world_size_and_placement_may_change_at_once": ROUNDS,
        "test_a_view_that_ends_while_its_unit_is_released": ROUNDS,
    },
    "pretended": {
        "vmap": "torch.vmap makes tensors in C++, which are the processor's there",
        "stacked": "torch.vmap makes tensors in C++, which are the processor's there",
        "graph": "a capture makes tensors in C++, which are the processor's there",
        "test_on_other_processes_the_state_is_the_one_made_of_all_old_states": (
            "its states go to other processes, where they are the processor's"
        ),
        "-step]": "a capture makes tensors in C++, which are the processor's there",
    },
    "any": {
        "test_a_bad_weight_is_reported": ASSERTS,
        "test_bf16_skips_gradients_that_are_not_finite_in_every_stage_or_raises": ASSERTS,
        "test_ranks_with_other_numbers_of_backwards_are_reported": (
            "on a device a rank does not read what others are doing, for it would wait; their "
            "collectives fail or hang"
        ),
        "test_a_step_that_overflows_changes_only_the_loss_scale": (
            "on a device the random state of a skipped step goes on, for the host does not wait to "
            "know that it is skipped"
        ),
        "fsdp2": ON_THE_CPU,
        "_dcp_": ON_THE_CPU,
    },
}
"""Parts of names of tests within these files that cannot run on a card, on the
pretended one, or on any, and why.
"""

Where = Literal["cpu", "cuda", "pretended"]
T = TypeVar("T")
VARIABLE = "FZERO_TEST_DEVICE"
"""Names the device for processes that tests start."""


def where() -> Where:
    return os.environ.get(VARIABLE, "cpu")  # type: ignore[return-value]


def device_of_tests() -> torch.device:
    return torch.device("cpu") if where() == "cpu" else torch.device("cuda", 0)


def here(tree: T) -> T:
    """A module, a tensor, or a tuple of tensors, on the device of the tests."""
    if where() == "cpu":
        return tree
    if isinstance(tree, tuple):
        return tuple(map(here, tree))  # type: ignore[return-value]
    return tree.to(device_of_tests())  # type: ignore[attr-defined,no-any-return]


class OneRank:
    """In place of `RankPool`, on a device: this process is the one rank."""

    def __call__(
        self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        if world_size > 1:
            pytest.skip("needs several real ranks, and NCCL takes one for each card; here is one")
        with group_of_one():
            return [function(*args, **kwargs)]

    def close(self) -> None:
        pass


class PretendedRanks(RankPool):
    """Ranks of which each has a pretended card."""

    def __call__(
        self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        return super().__call__(world_size, on_a_pretended_rank, function, *args, **kwargs)


def on_a_pretended_rank(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    from pretended_nccl import pretended_nccl

    with pretended(), pretended_nccl(CARDS[-1]):
        return function(*args, **kwargs)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of NCCL with one rank, on a card."""
    import torch.distributed as dist

    if where() == "cuda" and not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield


@contextmanager
def waits_of_the_host() -> Iterator[list[str]]:
    """Gets, at its end, each wait of the host for the device inside: the operator, or
    the place of a program on a card.
    """
    found: list[str] = []
    if where() == "cuda":
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # PyTorch also warns, once in a process, that this mode does not see every wait.
        found += [
            f"{x.filename}:{x.lineno}" for x in seen if "called a synchronizing" in str(x.message)
        ]
        return
    (card,) = CARDS
    before = card.waits + card.drains
    yield found
    found += sorted((card.waits + card.drains - before).elements())


# --- hooks of pytest, which tests/conftest.py takes -----------------------------------------------


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["cpu", "cuda", "pretended"],
        default=where(),
        help="where models and batches are",
    )
    parser.addoption(
        "--until", type=float, help="the time (in seconds since 1970) after which no test begins"
    )
    parser.addoption("--lines", type=Path, help="a file that gets one line of JSON for each test")


def configure(config: pytest.Config) -> None:
    os.environ[VARIABLE] = config.getoption("--device")
    if where() == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            "--device cuda: torch sees no card here; --device pretended runs them without one"
        )


def is_left_out(path: Path) -> bool:
    """Whether a file has no test for the device; then it is not imported, for packages
    may be missing there.
    """
    if where() == "cpu" or path.suffix != ".py":
        return False
    return not any(path == Path(__file__).parents[1] / file for file, _ in ON_A_DEVICE)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a device: the tests of the table, short ones first, and of those the first
    case of each function.
    """
    if where() == "cpu":
        return
    root, rank, num_cases = (
        Path(__file__).parents[1],
        dict[str, tuple[bool, int, int]](),
        Counter[tuple[str, bool]](),
    )
    for item in items:
        file, function = item.path.relative_to(root).as_posix(), item.nodeid.partition("::")[2]
        places = [n for n, (of, name) in enumerate(ON_A_DEVICE) if of == file and name in function]
        if places and not item.get_closest_marker("nightly"):
            cases, is_long = (
                item.nodeid.partition("[")[0],
                item.get_closest_marker("long") is not None,
            )
            rank[item.nodeid] = is_long, num_cases[cases, is_long], min(places)
            num_cases[cases, is_long] += 1
    taken = sorted(
        (item for item in items if item.nodeid in rank), key=lambda item: rank[item.nodeid]
    )
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in rank])
    for item in taken:
        for part, why in (NOT_ON_A_DEVICE["any"] | NOT_ON_A_DEVICE[where()]).items():
            if part in item.nodeid.partition("::")[2]:
                item.add_marker(pytest.mark.skip(why))
    items[:] = taken


NOT_REACHED = "not reached: no time was left"


def begin(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(NOT_REACHED)


def report(config: pytest.Config, report: pytest.TestReport) -> None:
    """Writes the line of a test: when its call has ended, or what came before or after
    has failed or skipped it.
    """
    path = config.getoption("--lines")
    if path is None or hasattr(config, "workerinput") or (report.when != "call" and report.passed):
        return
    outcome, said = report.outcome, ""
    if report.failed:
        said = report.longreprtext[-1500:]
    elif report.skipped:
        said = (
            report.longrepr[2].removeprefix("Skipped: ")
            if isinstance(report.longrepr, tuple)
            else str(report.longrepr)
        )
        outcome = "not reached" if said == NOT_REACHED else "skipped"  # type: ignore[assignment]
    line = {
        "name": report.nodeid,
        "outcome": outcome,
        "seconds": round(report.duration, 2),
        "said": said,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def on_the_device() -> Iterator[None]:
    """Around each test. A pretended card has what it is asked on one thread only."""
    if where() == "pretended":
        with pretended():
            yield
    else:
        yield


CARDS: list[Any] = []
"""The pretended card that is entered."""


@contextmanager
def pretended() -> Iterator[None]:
    from pretended_cuda import PretendedCuda

    with PretendedCuda() as card:
        CARDS.append(card)
        try:
            yield
        finally:
            CARDS.pop()


@contextmanager
def on_any_card() -> Iterator[None]:
    """Inside, the device of the tests is a card: the pretended one, if it is the
    processor otherwise.
    """
    if where() != "cpu":
        yield
        return
    os.environ[VARIABLE] = "pretended"
    try:
        with pretended():
            yield
    finally:
        os.environ[VARIABLE] = "cpu"
