"""A job that is killed at any moment of a save leaves the checkpoint before, or the new
one, whole.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from ranks import server
from training import Plain, config, make

import fzero

WORLD_SIZE = 2
CALLS = ("fsync", "rename", "unlink", "mkdir", "rmdir")
"""Of the operating system, which a save consists of, but for writing."""


def numbered(state: Any, number: int) -> Any:
    """The state after so many updates, in which every number tells it."""
    return optree.tree_map(lambda x: torch.full_like(x, number), state)._replace(rng=state.rng)


def number_of(folder: Path) -> int:
    """The number in all of the latest checkpoint."""
    step = fzero.make_train_step(make(lambda: Plain(4, 2)), config(3))
    loaded = fzero.load(folder, step=step)
    number = int(loaded.state.step)
    parts = loaded.state._replace(
        grads={}, rng={}, loss_scale=loaded.state.loss_scale._replace(scale=loaded.state.step)
    )
    for x in optree.tree_leaves((parts.params, parts.optimizer, parts.step)):
        filled = x[x != 0]  # padding is zero
        assert (filled == number).all()
    assert sum(int((x != 0).sum()) for x in parts.params.values()) == sum(
        p.numel() for p in Plain(4, 2).parameters()
    )
    assert loaded.client == {"number": number}
    return number


def dying(calls_left: int) -> None:
    """Kills this process at one of the calls to come."""

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return inner

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def save_for_ever(
    rank: int, folder: Path, trial: int, first: int, calls_left: int | None, path: list[str]
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{trial}"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    step = fzero.make_train_step(make(lambda: Plain(4, 2)), config(2))
    state = step.init()
    (folder / f"ready-{trial}-{rank}").touch()
    if calls_left is not None:
        dying(calls_left)
    for number in count(first):
        kept = fzero.save(
            numbered(state, number), folder / "saved", step=step, client={"number": number}, keep=2
        )
        if rank == 0:
            (folder / "done").write_text(kept.name)


def save_here(folder: Path, number: int) -> None:
    step = fzero.make_train_step(make(lambda: Plain(4, 2)), config(1))
    fzero.save(numbered(step.init(), number), folder, step=step, client={"number": number}, keep=2)


def killed_job(
    folder: Path, trial: int, first: int, victim: int, calls_left: int | None, seconds: float
) -> None:
    """Runs a job that saves one checkpoint after the other, until one of its ranks is
    killed, and then the others.
    """
    context, processes = server(), []
    for rank in range(WORLD_SIZE):
        arguments = (rank, folder, trial, first, calls_left if rank == victim else None, sys.path)
        processes.append(context.Process(target=save_for_ever, args=arguments, daemon=True))
        processes[-1].start()
    if calls_left is None:
        deadline = time.monotonic() + 60
        while not (folder / f"ready-{trial}-{victim}").exists():
            assert time.monotonic() < deadline and processes[victim].is_alive()
            time.sleep(0.002)
        time.sleep(seconds)
        processes[victim].kill()
    processes[victim].join(60)
    assert processes[victim].exitcode == -signal.SIGKILL
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("num_kills", [4, pytest.param(20, marks=pytest.mark.long)])
def test_a_job_that_is_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, num_kills: int
) -> None:
    """After a random time, or so many calls of the operating system, of which rank 0
    makes about 22 in a save.
    """
    draw, saved = random.Random(0), tmp_path / "saved"
    save_here(saved, 1)
    (saved / ".job.json").unlink()  # this process goes on, and is no other job
    (tmp_path / "done").write_text("step-1")
    found, seen = 1, set()
    for trial in range(num_kills):
        victim = trial % WORLD_SIZE
        calls_left = None if trial % 4 >= 2 else draw.randrange(30 if victim == 0 else 8)
        killed_job(tmp_path, trial, found + 1, victim, calls_left, draw.uniform(0, 0.2))
        done = int((tmp_path / "done").read_text().split("-")[1])
        seen |= {path.name[:8] for path in saved.iterdir() if path.name.startswith(".")}
        found = number_of(saved)
        assert found >= done
    assert ".saving-" in seen, "no kill came in the middle of a save"
    save_here(saved, found + 1)
    # The job's name, latest and two whole ones: nothing is left of the others.
    assert len(list(saved.iterdir())) == 4
