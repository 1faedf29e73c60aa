"""The law of lone calls: if only one rank makes a call of all ranks, it gets an error
that names the call; nothing hangs.
"""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPool
from test_rank_death import Job
from training import Plain, config, make, part, vectors

import fzero
from fzero.comms.hangs import meeting, watchdog as hangs
from fzero.resharding.parameters import weight_of
from fzero.runtime import weights

READ_ALONE = (
    "reading 'blocks.0/float32' in full (GatheredParameters, safe_get_full_fp32_param, "
    "Engine.gathered)"
)
CALLS = {
    "fzero.save": lambda step, state, folder: fzero.save(state, folder, step=step),
    "fzero.start_save": lambda step, state, folder: fzero.start_save(state, folder, step=step),
    "fzero.load": lambda step, state, folder: fzero.load(folder, step=step),
    "fzero.load_weights": lambda step, state, folder: fzero.load_weights(folder, step=step),
    "TrainStep.evaluate": lambda step, state, folder: step.evaluate(state, part(vectors(0), 0, 2)),
    "TrainStep.inspect": lambda step, state, folder: step.inspect(state, lambda: None),
    "TrainStep.gather": lambda step, state, folder: step.gather(state),
    "TrainStep.init": lambda step, state, folder: step.init(),
    "TrainStep.first_overflow": lambda step, state, folder: step.first_overflow(state),
    "fzero.reshard": lambda step, state, folder: fzero.reshard(state, step, step),
    READ_ALONE: lambda step, state, folder: weight_of(step, state, "blocks.0.weight"),
}
OTHERS = {
    "in a step": "waits for",
    "at a barrier": "waits for torch.distributed.barrier",
    "in another call": "",
}


def call_alone(calls: list[tuple[str, str, int]], folder: str) -> list[str]:
    """The error of each call on the rank that makes it alone. Then both ranks take a
    step without errors.
    """
    step = fzero.make_train_step(make(Plain), config(3), loss_fn=loss_of)
    state, messages = step.init(), []
    state, _ = step(state, part(vectors(0), step.rank, 2))
    with patch.object(hangs, "TICK", 0.02), patch.object(meeting, "MOMENT", 0.05):
        for name, place, alone in calls:
            if step.rank == alone:
                try:
                    CALLS[name](step, state, folder)
                except fzero.CollectiveError as error:
                    messages.append(str(error))
            elif place == "in another call":
                other = "fzero.load" if name == "fzero.save" else "fzero.save"
                with pytest.raises(
                    fzero.CollectiveError,
                    match=f"{other}: every rank must call it, but rank {alone} ",
                ):
                    CALLS[other](step, state, folder)
            if place == "at a barrier":
                dist.barrier()
            state, metrics = step(state, part(vectors(1), step.rank, 2))
        assert torch.isfinite(metrics.loss)
        fzero.save(state, folder, step=step)
    return messages


def test_a_rank_that_comes_a_little_later_is_asked_nothing() -> None:
    store = dist.HashStore()
    early, late = (meeting.Meeting(store, rank, lambda rank: False) for rank in range(2))
    waiting = Thread(target=early, args=("a call", "all", range(2), 30.0))
    waiting.start()
    time.sleep(0.1 * meeting.MOMENT)
    late("a call", "all", range(2), 30.0)
    waiting.join()
    assert not store.check(["asks"])


def other_weights_alone() -> None:
    """Where masters are shards and parameters are whole, other weights are gathered."""
    step = fzero.make_train_step(
        make(Plain), config(1) | {"bf16": {"enabled": True}}, loss_fn=loss_of
    )
    state, _ = step(step.init(), [x.bfloat16() for x in part(vectors(0), step.rank, 2)])
    with patch.object(hangs, "TICK", 0.02), patch.object(meeting, "MOMENT", 0.05):
        if step.rank == 0:
            with pytest.raises(
                fzero.CollectiveError,
                match=r"TrainStep\.with_weights: every rank must call it, but rank 1 ",
            ):
                step.with_weights(state, step.weights(state))
        state, _ = step(state, [x.bfloat16() for x in part(vectors(1), step.rank, 2)])
    with patch.object(weights, "store_barrier", wraps=weights.store_barrier) as met:
        assert step.with_weights(state, step.weights(state)).master.keys() == state.master.keys()
    assert len(state.master) > met.call_count == 1  # once for all flat buffers


def test_other_weights_of_one_rank_alone_are_an_error(ranks: RankPool) -> None:
    ranks(2, other_weights_alone)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    for block in model.blocks:
        x = block(x)
    return torch.nn.functional.mse_loss(x, y)


def train_alone() -> None:
    step = fzero.make_train_step(make(Plain), config(3), loss_fn=loss_of)
    state = step.init()
    for index in range(3):
        state, _ = step(state, vectors(index))


def test_a_call_of_one_rank_alone_is_an_error_that_names_it_and_training_continues(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks(1, train_alone)  # so that rank 0 has taken more steps than rank 1
    calls = [(name, "in a step", number % 2) for number, name in enumerate(CALLS)]
    calls += [
        ("fzero.save", "at a barrier", 0),
        ("fzero.save", "in another call", 0),
        ("TrainStep.evaluate", "in another call", 1),
    ]
    found = ranks(2, call_alone, calls, str(tmp_path / "saved"))
    for alone in range(2):
        own = [(name, place) for name, place, rank in calls if rank == alone]
        for (name, place), message in zip(own, found[alone], strict=True):
            assert message.startswith(
                f"{name}: every rank must call it, but rank {1 - alone} {OTHERS[place]}"
            ), message
            assert "\n" not in message and "not under `if rank == 0:`" in message


def save_alone_and_give_up(folder: str) -> None:
    step = fzero.make_train_step(make(Plain), config(1), loss_fn=loss_of)
    state = step.init()
    with patch.object(hangs, "TICK", 0.02), patch.object(meeting, "MOMENT", 0.05):
        if step.rank == 0:
            fzero.save(state, folder, step=step)
        step(state, part(vectors(1), step.rank, 2))


@pytest.mark.long
def test_the_other_rank_gets_the_error_too(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as raised:
        ranks(2, save_alone_and_give_up, str(tmp_path))
    alone, other = map(str, raised.value.errors)
    assert alone.startswith("fzero.save: every rank must call it, but rank 1 waits for")
    # Rank 0 left its group, which closes the connections.
    assert alone in other and "Connection closed by peer" in other
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    with Job(2, str(tmp_path), 1, file=__file__) as job:
        assert job.end_of(1).code == 0
        code, errors = job.end_of(0, timeout=60)
    assert (
        code == 1 and "fzero.save: every rank must call it, but rank 1 has left the job" in errors
    )


if __name__ == "__main__":
    import sys

    trained = fzero.make_train_step(make(Plain), config(1), loss_fn=loss_of)
    begun = trained.init()
    if trained.rank == 0:
        fzero.save(begun, sys.argv[1], step=trained)
