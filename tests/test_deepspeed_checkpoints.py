"""The laws of DeepSpeed's checkpoints: what the real DeepSpeed wrote fzero goes on from, and DeepSpeed from what fzero wrote."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed_jobs import DECAY_FREE, batch, config, make
from ranks import RankPool
from test_reshard import assert_same
from torch import nn

import fzero
from fzero import deepspeed_checkpoint
from fzero.__main__ import main
from fzero.deepspeed_checkpoint_source import DeepSpeedFiles

BEFORE, AFTER = 4, 4
"""Updates before a checkpoint and after it."""


class Job(NamedTuple):
    """A training with DeepSpeed that was saved."""

    stage: int
    precision: str
    world_size: int
    groups: bool = False

    @property
    def config(self) -> dict[str, Any]:
        clip = {"gradient_clipping": 0.0} if self.stage == 0 else {}  # DeepSpeed cannot clip 0-d gradients there
        return config(self.stage, self.precision, **clip)


JOBS = (
    *(Job(1, "fp32", 1, True), Job(2, "bf16", 1), Job(3, "fp32", 1)),
    *(Job(1, "bf16", 2, True), Job(2, "fp32", 2), Job(3, "bf16", 2, True), Job(1, "fp16", 2), Job(3, "fp16", 2)),
    *(Job(1, "bf16", 3), Job(2, "fp32", 3, True), Job(3, "fp32", 3, True)),
)
NIGHTLY = tuple(
    job
    for stage in (1, 2, 3)
    for precision in ("fp32", "bf16", "fp16")
    for world_size in (1, 2, 3)
    for groups in (False, True)
    if (job := Job(stage, precision, world_size, groups)) not in JOBS
)


class DeepSpeed:
    """Runs jobs of the real DeepSpeed in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        server = Path(__file__).with_name("deepspeed_server.py")
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(server)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._written: dict[Job, dict[str, Any]] = {}

    def run(self, world_size: int, jobs: list[dict[str, Any]]) -> list[Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"world_size": world_size, "jobs": jobs}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"DeepSpeed ended: {Path(self._log.name).read_text()[-3000:]}"
        answers = json.loads(line)
        assert not isinstance(answers, str), answers
        return answers

    def written(self, job: Job) -> dict[str, Any]:
        """What DeepSpeed told of a job; its checkpoint is in `path(job)`. Jobs of one size run together."""
        if job not in self._written:
            jobs = [other for other in JOBS if other.world_size == job.world_size] if job in JOBS else [job]
            told = self.run(job.world_size, [request_of(job, self.path(job)) for job in jobs])
            self._written |= dict(zip(jobs, told, strict=True))
        return self._written[job]

    def path(self, job: Job) -> Path:
        return self.folder / "-".join(map(str, job))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


def request_of(job: Job, path: Path) -> dict[str, Any]:
    return {"config": job.config, "groups": job.groups, "before": BEFORE, "after": AFTER, "save": str(path)}


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepSpeed]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed; `make env` installs it")
    made = DeepSpeed(tmp_path_factory.mktemp("deepspeed"))
    yield made
    made.close()


def ranks_of(job: Job, world_size: int | None = None, **changes: Any) -> fzero.LockstepRanks:
    """The same training with fzero, from other weights, on ranks in lockstep."""
    groups = [{"params": DECAY_FREE, "weight_decay": 0.0}] if job.groups else ()
    step = fzero.make_train_step(make(seed=7), job.config | changes, param_groups=groups)
    return fzero.simulate(step, world_size or job.world_size, by="lockstep")


def batches(number: int, world_size: int) -> Any:
    return tuple(torch.stack(x) for x in zip(*(batch(number, rank, world_size) for rank in range(world_size))))


def run(ranks: fzero.LockstepRanks, state: Any, start: int, stop: int) -> tuple[Any, list[float]]:
    losses = []
    for number in range(start, stop):
        state, metrics = ranks(state, batches(number, ranks.world_size))
        losses.append(metrics.loss.item())
    return state, losses


def assert_close(ours: list[float], theirs: list[float], precision: str) -> None:
    """The first loss is of the same weights: it differs by the order in which the losses of ranks are added up. Those after it by
    the order in which gradients are: by an fp32 rounding, or by one of 16 bits, of 2**-8, in some of them."""
    rounding = 1e-6 if precision == "fp32" else 2e-3
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours == pytest.approx(theirs, rel=rounding)


# --- from DeepSpeed ----------------------------------------------------------------------------------------------


def check_goes_on(deepspeed: DeepSpeed, job: Job) -> None:
    theirs, ranks = deepspeed.written(job), ranks_of(job)
    state, client, path = fzero.import_deepspeed(deepspeed.path(job), step=ranks)
    assert path == deepspeed.path(job) / f"global_step{BEFORE}"
    assert {key: client[key] for key in ("next", "words")} == {"next": BEFORE, "words": ["a", "b"]}
    assert client["deepspeed"]["global_steps"] == BEFORE
    state, losses = run(ranks, state, BEFORE, BEFORE + AFTER)
    assert_close(losses, theirs["losses"], job.precision)
    assert int(state.step[0]) == BEFORE + AFTER - theirs["skipped"]
    assert float(state.loss_scale.scale[0]) == theirs["scale"]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_training_goes_on_with_the_losses_that_deepspeed_has_itself(deepspeed: DeepSpeed, job: Job) -> None:
    check_goes_on(deepspeed, job)


@pytest.mark.nightly
@pytest.mark.parametrize("job", NIGHTLY, ids=str)
def test_training_goes_on_with_the_losses_that_deepspeed_has_itself_in_all_cases(
    deepspeed: DeepSpeed, job: Job
) -> None:
    check_goes_on(deepspeed, job)
