"""`notebook_launch`: functions that no pickle could send run as ranks of a job;
failures name the rank; no process is left.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.launch import notebook_launch


def test_a_closure_over_a_local_class_trains_on_real_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)

    class Model(nn.Linear):  # as one of a cell: it cannot be imported
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    model, rows = Model(4, 4), torch.randn(6, 4)
    cfg = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}

    def train(num_steps: int) -> dict[str, Any]:
        step = fzero.make_train_step(model, cfg)
        state = step.init()
        for _ in range(num_steps):
            state, metrics = step(state, rows.chunk(step.world_size)[step.rank])
        print(f"rank {step.rank} of {step.world_size}: {torch.get_num_threads()} thread")
        return {"pid": os.getpid(), "loss": metrics.loss, "weights": step.gather(state)}

    found = notebook_launch(train, 3, num_procs=2)
    assert len({one["pid"] for one in found} | {os.getpid()}) == 3
    alone = train(3)
    for one in found:
        assert torch.allclose(one["loss"], alone["loss"])
        for name, value in alone["weights"].items():
            assert torch.allclose(one["weights"][name], value, atol=1e-6)
    lines = capsys.readouterr().out.splitlines()
    assert {line for line in lines if "thread" in line} >= {
        f"[rank {n}] rank {n} of 2: 1 thread" for n in range(2)
    }


def _waits(value: Any = None) -> None:
    fzero.join()
    if int(os.environ["RANK"]) == 1:
        if callable(value):
            value()
        raise ZeroDivisionError("of rank 1")
    axis = fzero.join()
    fzero.gather(torch.ones(1), fzero.specs_of(torch.ones(2), fzero_sharded()), axis)


def fzero_sharded() -> Any:
    from sharding import Sharded

    return Sharded("data")


def test_a_rank_that_fails_is_named_and_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(.|\n)*ZeroDivisionError: of rank 1"):
        notebook_launch(_waits)
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9 and returned nothing"):
        notebook_launch(_waits, lambda: os.kill(os.getpid(), 9))
    assert not [
        process for process in multiprocessing.active_children() if process.name.startswith("rank ")
    ]


def test_what_cannot_be_sent_back_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"what fn returned cannot be sent back \((.|\n)*return numbers, tensors"
    ):
        notebook_launch(lambda: lambda: 1, num_procs=1)


def test_a_large_result_and_many_lines_come_back_whole(capsys: pytest.CaptureFixture[str]) -> None:
    def prints() -> torch.Tensor:
        for number in range(5000):
            print(f"line {number}")
        print("no end of line", end="")
        return torch.arange(1 << 20)

    (found,) = notebook_launch(prints, num_procs=1)
    assert torch.equal(found, torch.arange(1 << 20))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank 0] line {number}" for number in range(5000)] + [
        "[rank 0] no end of line"
    ]


def test_a_place_where_a_fork_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(ValueError, match=r"CUDA is initialized.*restart the kernel"):
            notebook_launch(os.getpid)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        with pytest.raises(ValueError, match="a rank of a job itself"):
            notebook_launch(os.getpid)
    with pytest.raises(ValueError, match="fn: must be a function that each rank calls, got 3"):
        notebook_launch(3)  # type: ignore[arg-type]


def test_a_notebook_that_has_computed_with_threads_can_still_launch() -> None:
    """OpenMP's threads of the parent do not exist in a fork, which would wait for them
    for ever.
    """
    program = """
import torch, fzero
torch.set_num_threads(2)
a = torch.randn(600, 600, requires_grad=True)
(a @ a).sum().backward()
torch.nn.Conv2d(8, 8, 3)(torch.randn(4, 8, 64, 64)).sum().backward()

def work():
    torch.nn.Conv2d(8, 8, 3)(torch.randn(4, 8, 64, 64)).sum().backward()
    return (a @ a).sum().item() == (a @ a).sum().item() and fzero.join().size

print(fzero.notebook_launch(work, num_procs=2))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "[2, 2]\n"
