"""`CachedScheduler` answers as the scheduler does, whatever came before, and makes none
for requests that repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from training import Plain, config, make

import fzero
from fzero.plans.unit_orders import Event, early
from fzero.plans.unit_rules import UnitRules
from fzero.plans.unit_scheduler import UnitScheduler
from fzero.runtime import learned as findings, sequencer
from fzero.runtime.learned import CachedScheduler, Request, ScheduleCache

RULES = {stage: fzero.plan(make(Plain), config(stage), world_size=2).unit_rules for stage in (1, 3)}
UNITS = list(RULES[3].units)
windows = st.lists(st.sampled_from(UNITS), min_size=1, max_size=4).map(tuple)


def requests_of(
    rules: UnitRules, visits: Sequence[str], orders: Sequence[Any]
) -> Iterator[Request]:
    """The requests of a forward and a backward."""
    forward, backward = orders
    yield from ((UnitScheduler.begin, forward), (UnitScheduler.begin_forward, True))
    yield from ((UnitScheduler.enter, unit) for unit in visits)
    yield from ((UnitScheduler.boundary,), (UnitScheduler.begin, backward))
    yield (
        UnitScheduler.begin_backward,
        True,
        frozenset((unit, visits.count(unit)) for unit in visits),
    )
    for unit in reversed(visits):
        yield UnitScheduler.need, unit
        yield from ((UnitScheduler.collect, unit, grad.key) for grad in rules.units[unit].grads)
        yield UnitScheduler.end_visit, unit
    yield from ((UnitScheduler.end_backward,), (UnitScheduler.finish,))


def learned(rules: UnitRules, visits: Sequence[str]) -> list[Any]:
    """The orders that a first step of one rank learns."""
    scheduler, orders = UnitScheduler(rules, is_alone=True), []
    for method, *arguments in requests_of(rules, visits, (None, None)):
        method(scheduler, *arguments)
        if method == UnitScheduler.boundary:
            orders.append(tuple(scheduler.executed))
    return [*orders, early(scheduler.executed[len(orders[0]) :], rules.may_start_early)]


@pytest.mark.parametrize("stage", RULES)
@given(st.lists(windows, min_size=1, max_size=4), windows, st.integers(0, 12))
def test_a_cached_scheduler_answers_as_the_scheduler_does(
    stage: int, steps: list[tuple[str, ...]], first: tuple[str, ...], most: int
) -> None:
    rules, cache = RULES[stage], ScheduleCache()
    orders = learned(rules, first)
    with patch.object(findings, "MOST_ANSWERS", 10 * most):
        for visits in [*steps, *steps]:
            scheduler = UnitScheduler(rules, is_alone=True)
            one = CachedScheduler(partial(UnitScheduler, rules, is_alone=True), cache)
            for request in requests_of(rules, visits, orders):
                method, *arguments = request
                expected = method(scheduler, *arguments) or ()
                found = one.answer(request)
                assert found == expected
                if Event("leave_order") in expected:
                    assert one.scheduler.leave_order(scheduler.place) == scheduler.leave_order(
                        scheduler.place
                    )
    assert cache.num_answers <= 10 * most


@pytest.mark.parametrize("stage", [0, 3])
def test_steps_make_no_scheduler_once_their_requests_are_known(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Counted(UnitScheduler):
        def __init__(self, *args: Any, **how: Any) -> None:
            made[-1] += 1
            super().__init__(*args, **how)

    monkeypatch.setattr(sequencer, "UnitScheduler", Counted)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    step = fzero.make_train_step(
        model, config(stage), loss_fn=lambda m, x: m(x).square().mean(), units=["0", "1", "2"]
    )
    state = step.init()
    for _ in range(5):
        made.append(0)
        state, _ = step(state, torch.randn(8, 4))
    assert made[0] and not any(made[2:])
