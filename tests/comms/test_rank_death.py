"""The laws of the end of a job: when a rank dies, the others end by themselves and
report why; a normal end is silent.

The jobs run without torchrun, whose agent would kill the other ranks. Each rank runs
this file.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from training import Plain, config, make, part, vectors

import fzero

SECONDS = 90  # seconds in which a rank must notice the death of another one, on a busy machine
BAD_STEP = 2  # the first one negotiates its collectives, the others follow


# --- what a rank runs -----------------------------------------------------------------------------


def run_rank(scenario: str, stage: int, victim: int) -> None:
    torch.set_num_threads(1)
    scenario, _, num_nodes = scenario.partition(" of ")
    zero = {"mics_shard_size": 2} if num_nodes else {}

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y, index = batch
        strikes = index == BAD_STEP and step.rank == victim
        for number, block in enumerate(model.blocks):
            x = block(x)
            if strikes and number == 2 and scenario == "killed in the forward":
                os.kill(os.getpid(), signal.SIGKILL)
            if strikes and number == 2 and scenario == "killed in the backward":
                x.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            if strikes and number == 2 and scenario == "raises in the backward":
                x.register_hook(lambda grad: 1 / 0)
        return torch.nn.functional.mse_loss(x, y)

    step = fzero.make_train_step(make(Plain), config(stage, **zero), loss_fn=loss_of)
    state = step.init()
    for index in range(4):
        x, y = part(vectors(index), step.rank, step.world_size)
        state, _ = step(state, (x, y, index))
    if scenario == "ends with shutdown":
        fzero.shutdown()


# --- starting ranks -------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a rank ended; the code is that of `subprocess`, negative for a signal."""

    code: int
    errors: str


class Job:
    """The ranks of one job, in processes of their own, which run `file`."""

    def __init__(
        self, world_size: int, scenario: str, stage: int, victim: int = -1, *, file: str = __file__
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
        }
        command = [sys.executable, file, scenario, str(stage), str(victim)]
        self.ranks = [
            subprocess.Popen(
                command,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
                | shared
                | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def end_of(self, rank: int, timeout: float = 150) -> Ended:
        _, errors = self.ranks[rank].communicate(timeout=timeout)
        return Ended(self.ranks[rank].returncode, errors)


def assert_ends_with_collective_error(job: Job, rank: int, victim: int, how: str) -> None:
    """The error names the rank that is gone, and no other rank."""
    code, errors = job.end_of(rank, timeout=SECONDS)
    assert code == 1, errors
    assert "fzero.comms.axes.CollectiveError: " in errors
    assert "another rank died, left the job or did not arrive in time" in errors
    assert re.search(
        rf"rank {victim} \(.*, pid {job.ranks[victim].pid}\) has not come: {how}", errors
    ), errors
    assert set(re.findall(r"rank (\d+) (?:\(.*\) )?has not come", errors)) == {str(victim)}, errors


# --- the laws -------------------------------------------------------------------------------------


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("scenario", "stage", "victim"),
    [
        ("killed in the forward", 3, 2),
        ("killed in the backward", 1, 0),
        ("killed in the backward of two nodes", 3, 0),
        ("killed in the forward of two nodes", 1, 3),
    ],
)
def test_when_a_rank_is_killed_the_others_end_by_themselves_and_say_why(
    scenario: str, stage: int, victim: int
) -> None:
    ranks = range(4 if scenario.endswith("nodes") else 3)
    with Job(len(ranks), scenario, stage, victim) as job:
        assert job.end_of(victim).code == -signal.SIGKILL
        for rank in {*ranks} - {victim}:
            assert_ends_with_collective_error(
                job, rank, victim, "its process (has ended|was killed by SIGKILL)"
            )


@pytest.mark.long
def test_when_a_rank_raises_it_ends_with_its_own_error_and_the_others_with_theirs() -> None:
    with Job(2, "raises in the backward", 0, victim=1) as job:  # while reductions are under way
        code, errors = job.end_of(1)
        assert code == 1 and "ZeroDivisionError" in errors and "CollectiveError" not in errors
        assert_ends_with_collective_error(
            job, 0, 1, "it has left with ZeroDivisionError: division by zero"
        )


@pytest.mark.long
def test_a_normal_end_is_silent_every_time() -> None:
    jobs = [("ends", 0), ("ends", 3), ("ends", 3), ("ends with shutdown", 3)]
    with ExitStack() as stack:  # all at once: a busy machine shows races at the exit more often
        started = [stack.enter_context(Job(2, scenario, stage)) for scenario, stage in jobs]
        assert [job.end_of(rank) for job in started for rank in range(2)] == [Ended(0, "")] * 8


if __name__ == "__main__":
    run_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
