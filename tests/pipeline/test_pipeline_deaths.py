"""When a rank of a pipeline dies, the others end by themselves, and their error names
its stage, host and end.

The jobs run without torchrun, whose agent would kill the other ranks. Each rank runs
this file.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rank_death import SECONDS, Job
from torch import Tensor, nn

import fzero
from sharding import Mesh


class Fragile(nn.Linear):
    """A layer whose rank dies."""

    def __init__(self, scenario: str, is_victim: bool) -> None:
        super().__init__(4, 4)
        self.scenario, self.is_victim, self.calls = scenario, is_victim, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x)
        if self.is_victim and self.calls == 6:  # in the second step
            if self.scenario == "killed in the forward":
                die()
            elif self.scenario == "killed in the backward":
                out.register_hook(die)
        return out


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(scenario: str, num_stages: int, victim: int) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dies = rank == victim and scenario.startswith("killed")
    model = nn.Sequential(*(Fragile(scenario, dies) for _ in range(num_stages)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1},
    }
    sgd = fzero.optim.sgd(1e-3)

    def update(grad: Tensor, param: Tensor, own: Any) -> Any:
        if scenario == "killed in the update" and dies and index == 1:
            die()
        return sgd.update(grad, param, own)

    index = 0
    step = fzero.make_train_step(
        model, config, loss_fn=nn.functional.mse_loss, transform=sgd._replace(update=update),
        mesh=Mesh.of(pipe=num_stages, data=world_size // num_stages),
    )  # fmt: skip
    state = step.init()
    for index in range(3):
        if scenario == "raises between steps" and index == 1 and rank == victim:
            raise OSError("disk gone")
        state, _ = step(state, (torch.ones(4, 4), torch.ones(4, 4)))
        if scenario == "killed in a save":
            if dies and index == 1:
                os.fsync = die
            fzero.save(state, "checkpoints", step=step)


@pytest.mark.parametrize(
    ("scenario", "num_stages", "world_size", "victim"),
    [
        ("killed in the backward", 2, 2, 1),
        ("killed in the update", 2, 2, 0),
        ("killed in a save", 2, 2, 1),
        pytest.param("killed in the forward", 3, 3, 1, marks=pytest.mark.long),
        pytest.param("killed in the backward", 3, 3, 0, marks=pytest.mark.long),
        pytest.param("raises between steps", 2, 4, 2, marks=pytest.mark.long),
    ],
)
def test_the_error_of_all_other_ranks_names_the_stage_of_the_one_that_is_gone(
    scenario: str,
    num_stages: int,
    world_size: int,
    victim: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # for the checkpoints of ranks
    with Job(world_size, scenario, num_stages, victim, file=__file__) as job:
        how = "its process (has ended|was killed by SIGKILL)"
        if scenario.startswith("raises"):
            how = "it has left with OSError: disk gone"
        job.end_of(victim)
        stage, pid = victim * num_stages // world_size, job.ranks[victim].pid
        for rank in {*range(world_size)} - {victim}:
            code, errors = job.end_of(rank, timeout=SECONDS)
            assert code == 1 and "CollectiveError: " in errors, errors
            first = errors[errors.index("CollectiveError: ") :]
            gone: Any = re.findall(
                r"(rank \d+ of pipeline stage \d+) \((.*), pid (\d+)\) has not come: (.*)", first
            )
            assert gone and {name for name, *_ in gone} == {
                f"rank {victim} of pipeline stage {stage}"
            }, errors
            assert all(
                host and int(found) == pid and re.match(how, why) for _, host, found, why in gone
            ), errors


if __name__ == "__main__":
    run_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
