"""The laws of donation: a state that a step took raises wherever it is used again,
whatever runs the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from training import Plain, config, make, vectors

import fzero
from fzero.resharding.place import copied
from fzero.storage.state_memory import is_donated

TAKEN = (
    r"state: must not be used again once a step took it \(donate=True\).*the state that the "
    r"step returned.*donate=False"
)
BATCH = functools.partial(vectors, 0)
WORLD_SIZE = 2


def _alone(stage: int = 2, num_blocks: int = 3, **options: Any) -> tuple[Any, Any]:
    model = make(functools.partial(Plain, num_blocks=num_blocks))
    return fzero.make_train_step(model, config(stage, clip=0.0), **options), BATCH()


def _simulated(stage: int = 2, *, by: Any, **options: Any) -> tuple[Any, Any]:
    batch = tuple(x.unflatten(0, (WORLD_SIZE, -1)) for x in BATCH())
    return fzero.simulate(_alone(stage, **options)[0], WORLD_SIZE, by=by), batch


RUNNERS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "alone, stage 0": functools.partial(_alone, 0),
    "alone, stage 3": functools.partial(_alone, 3),
    "captured": functools.partial(
        _alone, num_blocks=1, compile="step", compile_backend="aot_eager"
    ),
    "in lockstep": functools.partial(_simulated, by="lockstep"),
    "by vmap": functools.partial(_simulated, by="vmap"),
}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_state_that_a_step_took_raises_wherever_it_is_used_again(
    runner: str, tmp_path: Path
) -> None:
    step, batch = RUNNERS[runner]()
    first = step.init()
    alike = optree.tree_map(lambda x: x, first)
    second, _ = step(first, batch)
    weights = step.gather(second)
    uses: dict[str, Callable[[Any], object]] = {
        "a step": lambda state: step(state, batch),
        "evaluate": lambda state: step.evaluate(state, batch),
        "gather": step.gather,
        "first_overflow": step.first_overflow,
        "save": lambda state: fzero.save(state, tmp_path / "all", step=step),
        "save_16bit_model": lambda state: fzero.checkpoint.save_16bit_model(
            state, tmp_path / "weights", step=step
        ),
        "reshard": lambda state: fzero.reshard(state, step, step),
        "place": lambda state: fzero.place(state, step),
        "a copy": lambda state: copied(state, step),
        "another optimizer state": lambda state: step(
            state._replace(optimizer=second.optimizer), batch
        ),
        "a clone": lambda state: step(optree.tree_map(torch.clone, state), batch),
        "the same tensors in another tree": lambda state: step(alike, batch),
    }
    for use in uses.values():
        with pytest.raises(ValueError, match=TAKEN):
            use(first)
    assert all(torch.equal(weight, weights[name]) for name, weight in step.gather(second).items())
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("manifest*"))
    third, _ = step(second, batch)
    assert step.gather(third).keys() == weights.keys() and is_donated(second)


@pytest.mark.parametrize("runner", ["alone, stage 3", "in lockstep", "by vmap"])
def test_a_state_that_is_not_donated_gives_the_same_step_twice(runner: str) -> None:
    step, batch = RUNNERS[runner](donate=False)
    state = step.init()
    (one, first), (other, second) = step(state, batch), step(state, batch)
    assert first.loss == second.loss and not is_donated(state)
    assert all(map(torch.equal, step.gather(one).values(), step.gather(other).values()))


@pytest.mark.parametrize("by", ["alone", "lockstep", "vmap"])
def test_a_step_that_raises_before_its_update_takes_nothing_and_one_that_raises_in_it_does(
    by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, batch = _alone() if by == "alone" else _simulated(by=by)
    state = step.init()
    with pytest.raises(FloatingPointError):
        step(state, tuple(x * float("nan") for x in batch))
    expected, _ = step(copied(state, step), batch)
    state, _ = step(state, batch)
    assert all(map(torch.equal, step.gather(state).values(), step.gather(expected).values()))
    if by == "vmap":
        return  # it has one update for all ranks, and writes when nothing can fail any more

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("half of the update is made")

    with monkeypatch.context() as patched:
        patched.setattr("fzero.runtime.update._start_joins", fails)
        with pytest.raises(RuntimeError, match="half of the update"):
            step(state, batch)
    with pytest.raises(ValueError, match=TAKEN):
        step(state, batch)
