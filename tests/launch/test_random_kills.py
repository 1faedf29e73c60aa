"""The laws of an elastic job: whatever dies and when, the numbers are those of a run
that was stopped at the same steps.

Real jobs of `fzero`, whose ranks and hosts are killed at random moments. Two agents on
this machine, each reported that it is another host, are two hosts without ssh.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import elastic_rank
import psutil
import pytest
import torch
from elastic_rank import EVERY, NUM_STEPS
from ranks import RankPool

SECONDS = 240  # for a job with its restarts, on a busy machine
RANK = Path(elastic_rank.__file__)


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fzero", *flags, "--max_restarts", "5", str(RANK), str(folder)]
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder: Path, job: subprocess.Popen[str], attempt: int, number: int) -> bool:
    """Waits until the ranks of a start have made so many steps; whether the job still
    runs then.
    """
    deadline = time.monotonic() + SECONDS
    while job.poll() is None:
        path = folder / "progress"
        if path.exists() and tuple(map(int, path.read_text().split())) >= (attempt, number):
            return True
        assert time.monotonic() < deadline, "the job does not get on"
        time.sleep(0.005)
    return False


def end_of(job: subprocess.Popen[str]) -> None:
    _, errors = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, errors


def segments(folder: Path) -> list[tuple[int, int]]:
    """Each start of the job: on how many ranks, and from which step."""
    return [
        tuple(map(int, line.split())) for line in (folder / "segments").read_text().splitlines()
    ]  # type: ignore[misc]


def undisturbed(folder: Path, stop: int) -> dict[str, torch.Tensor]:
    return elastic_rank.train(folder, stop)


def assert_as_if_stopped(folder: Path, ranks: RankPool) -> None:
    """The final weights are, bit for bit, those of a run that was stopped where this
    one was saved, and started again.
    """
    found, ran, other = torch.load(folder / "weights.pt"), segments(folder), folder / "other"
    other.mkdir()
    weights = {}
    for index, (world_size, _) in enumerate(ran):
        stop = ran[index + 1][1] if index + 1 < len(ran) else NUM_STEPS
        weights = ranks(world_size, undisturbed, other, stop)[0]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in found)


def kill_ranks(folder: Path, ranks: RankPool, seed: int, num_kills: int) -> None:
    draw = random.Random(seed)
    job = start(folder, "--num_procs", "3")
    try:
        for attempt in range(num_kills):
            if not wait_for_step(folder, job, attempt, draw.randrange(1, NUM_STEPS - 4)):
                break
            time.sleep(draw.uniform(0, 0.05))  # in a step or in a save
            psutil.Process(int((folder / f"rank.{draw.randrange(3)}").read_text())).kill()
        end_of(job)
    finally:
        job.kill()
    starts = segments(folder)
    assert len(starts) > 1 and all(
        world_size == 3 and number % EVERY == 0 for world_size, number in starts
    )
    assert_as_if_stopped(folder, ranks)


def kill_a_host(folder: Path, ranks: RankPool, seed: int) -> None:
    """Host 127.0.0.2 is killed with all that runs on it, and the other goes on alone
    with the same global batch.
    """
    draw = random.Random(seed)
    (folder / "hosts").write_text("127.0.0.1 slots=2\n127.0.0.2 slots=1\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        f"--hostfile={folder}/hosts",
        "--nnodes=1:2",
        f"--master_port={port}",
        "--no_ssh",
        "--wait_for_hosts=20",
    ]
    hosts = [start(folder, *flags, "--node_rank=0")]
    try:
        deadline = time.monotonic() + SECONDS
        while True:  # the first has the rendezvous, so it must be the first
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline and hosts[0].poll() is None
            time.sleep(0.1)
        hosts.append(start(folder, *flags, "--node_rank=1"))
        assert wait_for_step(folder, hosts[0], 0, draw.randrange(EVERY + 1, NUM_STEPS - 4))
        time.sleep(draw.uniform(0, 0.05))
        agent = psutil.Process(hosts[1].pid)
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()
        hosts[1].communicate()
        end_of(hosts[0])
    finally:
        for host in hosts:
            host.kill()
    (first, _), *_, (last, resumed) = segments(folder)
    assert (first, last) == (3, 2) and resumed >= EVERY
    assert_as_if_stopped(folder, ranks)


@pytest.mark.long
def test_a_job_whose_ranks_are_killed_ends_with_the_weights_of_one_that_was_stopped_there(
    tmp_path: Path, ranks: RankPool
) -> None:
    kill_ranks(tmp_path, ranks, seed=0, num_kills=1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 9))
def test_whenever_ranks_are_killed(tmp_path: Path, ranks: RankPool, seed: int) -> None:
    kill_ranks(tmp_path, ranks, seed, num_kills=1 + seed % 4)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_a_job_that_loses_a_host_goes_on_with_the_same_batch_on_fewer_ranks(
    tmp_path: Path, ranks: RankPool, seed: int
) -> None:
    kill_a_host(tmp_path, ranks, seed)
