"""A stage is a row: one that is new to fzero trains right in all runners, and sends
what its plan says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor
from training import Odd, config, make, part, tokens

import fzero
from fzero.config.stages import STAGES
from fzero.estimation.dry_run import dry_run
from fzero.profiling import plan_comm, trace_comm

ROWS = ("2.5", "3 once")
SGD = {"type": "SGD", "params": {"lr": 0.125}}
"""The update of it in a graph has the bits of the eager one, which a step runs that
gathers once.
"""
RUNNERS: dict[str, dict[str, Any]] = {
    "eager": {},
    "block": {"compile": "block", "compile_backend": "aot_eager"},
    "step": {"compile": "step", "compile_backend": "aot_eager"},
}


model = partial(Odd, num_blocks=2)


@contextmanager
def known_rows() -> Iterator[None]:
    """Inside, there is a stage between 2 and 3: it shards parameters, too, and gathers
    them once in a step.
    """
    STAGES["2.5"] = STAGES[3]._replace(gathers="once")
    try:
        yield
    finally:
        del STAGES["2.5"]


@pytest.fixture(autouse=True)
def _rows() -> Iterator[None]:
    with known_rows():
        yield


def cfg_of(stage: Any, num_micro_steps: int, **further: Any) -> dict[str, Any]:
    return config(stage) | {"gradient_accumulation_steps": num_micro_steps} | further


def trained(cfg: Any, **how: Any) -> tuple[list[str], dict[str, Tensor]]:
    """Losses and norms of three steps and the loss of another batch, and the weights at
    the end.
    """
    with known_rows():
        step = fzero.make_train_step(make(model), cfg, **how)
        state, found = step.init(), list[str]()
        for index in range(3):
            state, metrics = step(state, part(tokens(index, 36), step.rank, step.world_size))
            found.append(repr((metrics.loss.item(), metrics.grad_norm.item())))
        found.append(
            repr(step.evaluate(state, part(tokens(9, 36), step.rank, step.world_size)).item())
        )
        return found, step.gather(state)


def assert_same(
    one: tuple[list[str], dict[str, Tensor]], other: tuple[list[str], dict[str, Tensor]]
) -> None:
    assert one[0] == other[0]
    assert [name for name, x in one[1].items() if not torch.equal(x, other[1][name])] == []


@pytest.mark.parametrize(
    ("row", "runner", "num_micro_steps"),
    [
        pytest.param(
            row,
            runner,
            n,
            marks=[] if runner == "eager" or (row, n) == ("2.5", 3) else [pytest.mark.long],
        )
        for row in ROWS
        for runner in RUNNERS
        for n in (1, 3)
    ],
)
def test_a_new_row_trains_with_the_bits_of_the_stages_around_it(
    ranks: RankPool, row: str, runner: str, num_micro_steps: int
) -> None:
    """With its gradients, which are those of stage 1 or 2, and its updates, which are
    those of all.
    """
    like = STAGES[row].gathered
    (stage,) = (number for number in (1, 2) if STAGES[number] == like)
    how, further = RUNNERS[runner], {"optimizer": SGD} if runner == "step" else {}
    eager_sizes = {1: (1, 2), 3: (3, 4)}[num_micro_steps]
    for world_size in eager_sizes if runner == "eager" else (2,):
        found = ranks(world_size, trained, cfg_of(row, num_micro_steps, **further), **how)
        expected = ranks(world_size, trained, cfg_of(stage, num_micro_steps, **further), **how)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def _simulated(row: Any, by: str, **how: Any) -> tuple[list[str], dict[str, Tensor]]:
    ranks = fzero.simulate(fzero.make_train_step(make(model), cfg_of(row, 2)), 2, by=by, **how)  # type: ignore[call-overload]
    state, found = ranks.init(), list[str]()
    for index in range(3):
        state, metrics = ranks(state, tuple(x.unflatten(0, (2, -1)) for x in tokens(index, 36)))
        found.append(repr((metrics.loss.tolist(), metrics.grad_norm.tolist())))
    return found, ranks.gather(state)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "how",
    [{"by": "lockstep"}, {"by": "vmap"}, {"by": "vmap", "compile": "aot_eager"}],
    ids=lambda how: "-".join(how.values()),
)
@pytest.mark.parametrize("row", ROWS)
def test_a_new_row_trains_alike_on_simulated_ranks(row: str, how: dict[str, Any]) -> None:
    (stage,) = (number for number in (1, 2) if STAGES[number] == STAGES[row].gathered)
    assert_same(_simulated(row, **how), _simulated(stage, **how))


def _sent(row: str, **how: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of a step of three micro-batches by purpose, and those of its gathers
    and reductions that were planned.
    """
    with known_rows():
        step = fzero.make_train_step(make(model), cfg_of(row, 3), **how)
        sent = trace_comm(
            step, step.init(), part(tokens(0, 36), step.rank, step.world_size)
        ).by_purpose()
        planned = step.plan.sent_nbytes_per_step
        return sent, planned


@pytest.mark.covering(1)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("row", ROWS)
def test_a_step_sends_what_is_planned(ranks: RankPool, row: str, runner: str) -> None:
    for sent, planned in ranks(2, _sent, row, **RUNNERS[runner]):
        print(sent, planned)
        assert sent["gather"] == sum(
            n for name, n in planned.items() if name.startswith("all_gather in")
        )
        assert sent["reduce"] == planned["reduce_scatter of gradients"]


@pytest.mark.parametrize(("row", "num_micro_steps"), [("2.5", 3), ("3 once", 1)])
def test_a_step_is_drawn_as_it_is_planned(row: str, num_micro_steps: int) -> None:
    mesh = fzero.comms.AbstractAxis("data", 2)
    step = fzero.make_train_step(make(model), cfg_of(row, num_micro_steps), mesh=mesh)
    batch = part(tokens(0, 12 * num_micro_steps), 0, 2)
    sent, planned = plan_comm(step, batch).by_purpose(), step.plan.sent_nbytes_per_step
    assert sent["gather"] == sum(
        n for name, n in planned.items() if name.startswith("all_gather in")
    )
    assert sent["reduce"] == planned["reduce_scatter of gradients"]


@pytest.mark.parametrize("row", ROWS)
def test_the_parameters_of_a_step_are_gathered_once(row: str) -> None:
    mesh = fzero.comms.AbstractAxis("data", 4)
    one, many = (fzero.make_train_step(make(model), cfg_of(row, n), mesh=mesh).plan for n in (1, 5))
    for plan in (one, many):
        gathered = sum(buffer.padded_numel for buffer in plan.flat_buffers)
        sent = plan.sent_by_axis["data"]
        assert (
            sum(n for name, n in sent.items() if name.startswith("all_gather in"))
            == gathered * 3 // 4
        )
    held = sum(unit.gathered_numel for unit in one.units)
    assert dry_run(one).most("gathers") == dry_run(many).most("gathers") == 4 * held


def test_a_row_is_named_by_its_stage_in_the_configuration() -> None:
    assert [
        fzero.Config.load({"zero_optimization": {"stage": stage}}).zero_optimization.row
        for stage in STAGES
    ] == [*STAGES.values()]
    with pytest.raises(fzero.ConfigError, match="must be 0, 1, 2 or 3"):
        fzero.Config.load({"zero_optimization": {"stage": "2.7"}})
