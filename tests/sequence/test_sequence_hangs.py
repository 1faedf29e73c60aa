"""A rank that does not come to an exchange of tokens and heads: the others report which
one they wait for, and that rank's error.

The job runs without an agent. Each rank runs this file.
"""

from __future__ import annotations

import re
import sys
from datetime import timedelta

import pytest
import torch
from test_rank_death import Job

import fzero
from fzero.sequence import ulysses
from sharding import Mesh

VICTIM, BAD_BLOCK = 1, 1


def run_rank() -> None:
    import divided

    torch.set_num_threads(1)
    fzero.join(timeout=timedelta(seconds=60))

    def loss_fn(model: torch.nn.Module, batch: divided.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if step.rank == VICTIM and batch["input_ids"].shape[1] == 2:
            model.blocks[BAD_BLOCK].norm.register_forward_hook(_fail)  # type: ignore[index, union-attr]
        return divided.sum_and_count(model, batch)

    step = fzero.make_train_step(
        divided.in_fp64(divided.LM),
        divided.settings(0),
        mesh=Mesh.of(data=1, seq=2),
        transforms=[ulysses("seq")],
        loss_fn=loss_fn,
    )
    state = step.init()
    for number, length in enumerate((8, 4)):
        state, _ = step(state, divided.batch(number, length))


def _fail(*_: object) -> None:
    raise RuntimeError("the victim's own error")


@pytest.mark.long
def test_a_rank_that_leaves_before_an_exchange_is_named_with_the_exchange() -> None:
    with Job(2, "leaves", 0, file=__file__) as job:
        code, own = job.end_of(VICTIM)
        assert code == 1 and "the victim's own error" in own
        code, errors = job.end_of(0)
    assert code == 1
    errors = re.sub(r"^\[rank\d\]: ", "", errors, flags=re.MULTILINE)
    _, error, lines = errors.partition("fzero.comms.axes.CollectiveError: ")
    assert error, errors
    assert lines.startswith("exchange of tokens and heads"), lines
    assert "the victim's own error" in lines, lines


if __name__ == "__main__":
    assert sys.argv[1] == "leaves"
    run_rank()
