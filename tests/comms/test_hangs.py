"""The laws of hangs: when a rank does not come to a collective, all ranks report which
one, where it is and what it does.

The jobs run without an agent, which would end the rank that hangs. Each rank runs this
file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_rank_death import Job
from training import Plain, config, make, part, vectors

import fzero
from fzero.comms.hangs import failures
from fzero.comms.hangs.failures import timeout_of, timeout_of_group
from fzero.comms.hangs.progress import PROGRESS, Progress
from fzero.comms.hangs.thread_dumps import identity_of, stat_of
from fzero.comms.hangs.watchdog import Answer, Watchdog
from fzero.comms.process_group import group_of
from fzero.comms.records import Label

TIMEOUT = 25  # seconds for a collective, and for all ranks to import torch on a busy machine
VICTIM, BAD_STEP, BAD_BLOCK = 1, 2, 2
SCENARIOS = {"sleeps": "stands_in_python", "loops": "endless_loop", "skips": "skips_a_collective"}
"""Each with words of its test's name."""


# --- what a rank runs -----------------------------------------------------------------------------


def run_rank(scenario: str) -> None:
    torch.set_num_threads(1)
    fzero.join(timeout=timedelta(seconds=TIMEOUT))

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y, index = batch
        for number, block in enumerate(model.blocks):
            x = block(x)
            if index == BAD_STEP and step.rank == VICTIM and number == BAD_BLOCK:
                if scenario == "sleeps":
                    time.sleep(3600)
                elif scenario == "loops":
                    # 2^99 tries in C, which never releases the interpreter
                    re.match("(a|a)*b", "a" * 99)
        return torch.nn.functional.mse_loss(x, y)

    step = fzero.make_train_step(make(Plain), config(3), loss_fn=loss_of)
    state = step.init()
    for index in range(4):
        x, y = part(vectors(index), step.rank, step.world_size)
        state, _ = step(state, (x, y, index))
        if scenario == "skips" and index == BAD_STEP and step.rank != VICTIM:
            # `gather` itself would wait until all have come to it
            list(step.runtime.full_weights(state))


# --- the laws -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[dict[str, Job]]:
    """Those that the selected tests need."""
    names = " ".join(item.name for item in request.session.items)
    needed = [scenario for scenario, words in SCENARIOS.items() if words in names]
    with ExitStack() as stack:  # all at once, because they mostly wait
        yield {name: stack.enter_context(Job(2, name, 3, file=__file__)) for name in needed}


def output_of(job: Job, rank: int) -> tuple[str, str]:
    """The output of a rank before its traceback, and its last lines."""
    code, errors = job.end_of(rank)
    assert code == 1, errors
    errors = re.sub(r"^\[rank\d\]: ", "", errors, flags=re.MULTILINE)  # torch's prefix of each line
    stacks, error, lines = errors.partition("fzero.comms.axes.CollectiveError: ")
    assert error, errors
    return stacks.partition("Traceback (most recent call last)")[0], lines


def assert_blames(lines: str, job: Job, doing: str) -> None:
    """The error names the victim and its place, and the other rank and the unit that it
    waits for.
    """
    first, blamed, other, *_ = lines.splitlines()
    unit = r"gather blocks\.[34]/float32"  # depending on how much the victim had sent
    assert re.match(f"{unit}: the collective did not come back in time", first), lines
    assert re.fullmatch(
        rf"  rank 1 \(.*, pid {job.ranks[VICTIM].pid}\) has not come: {doing}", blamed
    ), lines
    assert re.fullmatch(
        rf"  rank 0: waiting for {unit} \(forward, collective \d of step 3\)", other
    ), lines


@pytest.mark.long
def test_a_rank_that_stands_in_python_is_named_with_its_unit_and_its_stack(
    jobs: dict[str, Job],
) -> None:
    job = jobs["sleeps"]
    stacks, lines = output_of(job, 0)
    at = (
        r"in no collective, the last was gather blocks.3/float32 \(forward, collective 4 of "
        r"step 3\)"
    )
    assert_blames(lines, job, at)
    _, waiting, sleeping = stacks.split("fzero: the stack of rank ")
    assert waiting.startswith("0:") and "in _gathered" in waiting
    assert sleeping.startswith("1:") and "time.sleep(3600)" in sleeping
    assert job.ranks[VICTIM].poll() is None, "the stuck rank has ended"


@pytest.mark.long
def test_a_rank_in_an_endless_loop_of_c_is_named_with_its_stack(jobs: dict[str, Job]) -> None:
    job = jobs["loops"]
    stacks, lines = output_of(job, 0)
    assert_blames(lines, job, "cannot answer, for code in C holds its interpreter")
    looping = stacks.split("fzero: the stack of rank ")[2]
    assert re.search(r"in match\n.*test_hangs.py\", line \d+ in loss_of", looping), looping
    assert job.ranks[VICTIM].poll() is None, "the signal has ended the rank"


@pytest.mark.long
def test_a_rank_that_skips_a_collective_is_named_with_what_both_wait_for(
    jobs: dict[str, Job],
) -> None:
    ends = [output_of(jobs["skips"], rank) for rank in range(2)]
    # printed by the first rank to ask
    assert sum("fzero: the stack of" in stacks for stacks, _ in ends) == 1
    (_, *here), (_, *there) = (lines.splitlines()[:3] for _, lines in ends)
    assert here == there, ends  # all ranks raise the same lines
    behind, later = here
    assert re.fullmatch(
        r"  rank 0 \(.*\) has not come: waiting for .* \(backward, collective \d+ of step 4\)",
        behind,
    ), here
    assert re.fullmatch(
        r"  rank 1: waiting for gradient norm \(update, collective \d+ of step 4\)", later
    ), here


def test_a_step_pays_less_than_a_microsecond_for_each_collective() -> None:
    """NCCL takes some 20 µs to start one. On CUDA the step does nothing else for the
    watchdog.
    """
    progress, label = Progress(), Label("gather", "x", "forward")
    began = time.thread_time()  # what other processes take does not count
    for _ in range(10_000):
        progress.number, progress.label = progress.number + 1, label
        progress.waits[1] = label
        progress.waits.pop(1)
    assert (time.thread_time() - began) / 10_000 < 5e-6  # measured 0.5 µs on a busy core


def test_one_rank_alone_has_no_watchdog() -> None:
    fzero.join()
    assert not failures._WATCHES and not PROGRESS.waits


def test_the_groups_of_a_mesh_wait_no_longer_than_the_job(ranks: Any) -> None:
    assert ranks(2, limits) == [[120.0, 120.0]] * 2


def limits() -> list[float]:
    from torch.distributed import group

    axis = fzero.join()
    assert group.WORLD is not None
    part = group_of(None, (0, 1), "a part")
    return [timeout_of_group(g).total_seconds() for g in (axis.group or group.WORLD, part)]


@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan"])
def test_a_timeout_that_is_not_positive_is_refused(value: str) -> None:
    with pytest.raises(
        ValueError, match=f"FZERO_TIMEOUT: must be a positive number of seconds, got '{value}'"
    ):
        timeout_of(os.environ | {"FZERO_TIMEOUT": value})


# --- who has gone, without a job ------------------------------------------------------------------


class Process:
    """A process that stands for a rank in the watchdog of another one."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                "print(1, flush=True); import time; time.sleep(600)",
            ],
            stdout=subprocess.PIPE,
        )
        assert self.popen.stdout is not None
        self.popen.stdout.read(1)
        here = identity_of(None)
        self.identity = here | {"pid": self.popen.pid, "since": stat_of(self.popen.pid)[19]}

    def wait_until(self, state: str) -> None:
        while stat_of(self.popen.pid)[0] != state:
            time.sleep(0.01)

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="the state of processes is read in /proc"
)
@pytest.mark.parametrize(
    ("number", "is_reaped", "fate"),
    [
        (signal.SIGSTOP, False, r"its process is stopped; `kill -CONT \d+` on .* lets it go on"),
        (signal.SIGKILL, False, "its process was killed by SIGKILL"),
        (signal.SIGKILL, True, "its process has ended"),
    ],
)
def test_a_rank_that_is_stopped_or_gone_is_named_and_no_other(number, is_reaped, fate):
    """Rank 1 is gone. Rank 0 asks; rank 2 waits for an earlier collective than rank 0."""
    store, process = dist.HashStore(), Process()
    watch = Watchdog(store, 0, 3)
    try:
        store.set("who/1", json.dumps(process.identity))
        store.set("who/2", json.dumps(identity_of(None)))
        behind = Answer(2, "a", 9, (-1, 0), "waiting for gather x", True, "")
        store.set("answer/2", json.dumps(asdict(behind)))
        store.add("heard", 1)  # rank 2 reports it
        process.popen.send_signal(number)
        process.wait_until("T" if number == signal.SIGSTOP else "Z")
        if is_reaped:
            process.popen.wait()
        (first, *others) = watch.ask(is_late=False)
        assert re.fullmatch(
            rf"rank 1 \(.*, pid {process.popen.pid}\) has not come: {fate}", first
        ), first
        assert not [line for line in others if "has not come" in line], others
        # all other ranks raise with it
        assert store.get("summary").decode().splitlines() == [first, *others]
    finally:
        watch.stop()
        process.end()


def test_a_rank_that_leaves_with_an_error_says_which():
    store = dist.HashStore()
    watches = [Watchdog(store, rank, 2) for rank in range(2)]
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError:
        watches[1].stop()
    (line, *_) = watches[0].ask(is_late=False)
    watches[0].stop()
    assert line.startswith("rank 1 (") and line.endswith(
        "it has left with ZeroDivisionError: division by zero"
    ), line


def test_without_the_job_s_store_the_rank_that_kept_it_is_named():
    class Ended(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Broken pipe")

    process, store = Process(), Ended()
    store.set("who/0", json.dumps(process.identity))
    watch = Watchdog(store, 1, 2)
    try:
        while watch._keeper is None:
            time.sleep(0.05)
        process.popen.kill()
        process.wait_until("Z")
        (line,) = watch.ask(is_late=False)
        assert re.fullmatch(
            r"rank 0 \(.*\) has not come: its process was killed by SIGKILL \(it keeps the job's "
            r"store\)",
            line,
        )
    finally:
        watch.stop()
        process.end()


if __name__ == "__main__":
    run_rank(sys.argv[1])
