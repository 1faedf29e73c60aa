"""The laws of the order of collectives, as pure functions: what moves early, who is
served, what is zeroed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from training import Odd, config, make

import fzero
from fzero.config.stages import STAGES
from fzero.optim.precision import Dtypes
from fzero.plans import Event
from fzero.plans.dataflow import BufferDataflow
from fzero.plans.plan import FlatParamPlan
from fzero.plans.unit_orders import AGREED, BOUNDARY, early, serve
from fzero.runtime.reductions import zero_gaps
from fzero.storage.shard_transfer import own_shard
from sharding import FlatLayout, Mesh
from sharding.testing import layouts
from sharding.views import take_shard, unflatten

# --- early ----------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> list[Event]:
    """Gathers, a turn, then gathers and reductions in any order; every event is another
    one.
    """
    forward = draw(st.integers(0, 4))
    backward = draw(st.lists(st.sampled_from(["gather", "reduce"]), max_size=10))
    kinds = ["gather"] * forward + ["boundary"] + backward
    return [
        BOUNDARY if kind == "boundary" else Event(kind, f"unit {index}")
        for index, kind in enumerate(kinds)
    ]  # type: ignore[arg-type]


@st.composite
def permissions(draw: st.DrawFn) -> set[tuple[str, str]]:
    """Pairs of units of which the second may be gathered while the first is in use."""
    units = st.sampled_from([f"unit {index}" for index in range(15)])
    return draw(st.sets(st.tuples(units, units), max_size=60))


either = st.one_of(st.none(), permissions())


@given(schedules(), either)
def test_early_is_a_permutation(
    schedule: list[Event], allowed: set[tuple[str, str]] | None
) -> None:
    found = early(schedule, lambda *pair: allowed is None or pair in allowed)
    assert sorted(found) == sorted(schedule)


@given(schedules(), either)
def test_early_keeps_the_order_of_gathers_and_that_of_reductions(
    schedule: list[Event], allowed: set[tuple[str, str]] | None
) -> None:
    found = early(schedule, lambda *pair: allowed is None or pair in allowed)
    for kind in ("gather", "reduce"):
        assert [event for event in found if event.kind == kind] == [
            event for event in schedule if event.kind == kind
        ]


@given(schedules(), either)
def test_nothing_moves_across_the_turn(
    schedule: list[Event], allowed: set[tuple[str, str]] | None
) -> None:
    found = early(schedule, lambda *pair: allowed is None or pair in allowed)
    assert found.index(BOUNDARY) == schedule.index(BOUNDARY)
    assert list(found[: found.index(BOUNDARY)]) == schedule[: schedule.index(BOUNDARY)]


@given(schedules(), either)
def test_a_gather_moves_one_place_earlier_or_not_at_all(
    schedule: list[Event], allowed: set[tuple[str, str]] | None
) -> None:
    found = early(schedule, lambda *pair: allowed is None or pair in allowed)
    for index, event in enumerate(schedule):
        if event.kind == "gather":
            assert found.index(event) in (index - 1, index)


@given(schedules())
def test_every_gather_moves_that_follows_a_reduction_and_may_start(schedule: list[Event]) -> None:
    found = early(schedule, lambda present, following: True)
    for before, event in pairwise(schedule):
        if (before.kind, event.kind) == ("reduce", "gather"):
            assert found.index(event) < found.index(before)


@given(schedules())
def test_nothing_moves_that_may_not_start(schedule: list[Event]) -> None:
    assert early(schedule, lambda present, following: False) == tuple(schedule)


def test_early_asks_about_the_unit_in_use_and_the_one_that_follows() -> None:
    asked = []
    events = [
        BOUNDARY,
        Event("reduce", "c"),
        Event("gather", "b"),
        Event("reduce", "b"),
        Event("gather", "a"),
    ]
    found = early(
        events,
        lambda present, following: bool(asked.append((present, following))) or following == "a",
    )
    assert asked == [("c", "b"), ("b", "a")]
    assert list(map(str, found)) == ["boundary", "reduce c", "gather b", "gather a", "reduce b"]


# --- who is served --------------------------------------------------------------------------------

GATHER, REDUCE, BOUNDARIES = (AGREED.index(kind) for kind in ("gather", "reduce", "boundary"))
NOTHING = [-1, -1]


@pytest.mark.parametrize(
    ("rows", "forward", "backward"),
    [
        ([NOTHING, NOTHING], None, None),
        ([[GATHER, 2], [GATHER, 1]], [GATHER, 1], [GATHER, 2]),
        ([NOTHING, [REDUCE, 1]], [REDUCE, 1], [REDUCE, 1]),
        ([[REDUCE, 3], [GATHER, 1], [GATHER, 2]], [GATHER, 1], [REDUCE, 3]),
        ([[REDUCE, 1], [REDUCE, 2], [GATHER, 2]], [GATHER, 2], [GATHER, 2]),
        ([[BOUNDARIES, -1], [GATHER, 1]], [GATHER, 1], [GATHER, 1]),
        ([[BOUNDARIES, -1], [BOUNDARIES, -1]], [BOUNDARIES, -1], [BOUNDARIES, -1]),
    ],
)
def test_the_unit_declared_first_is_served_and_in_the_backward_the_last_one(
    rows: list[list[int]], forward: list[int] | None, backward: list[int] | None
) -> None:
    assert serve(rows, in_forward=True) == serve(rows[::-1], in_forward=True) == forward
    assert serve(rows, in_forward=False) == serve(rows[::-1], in_forward=False) == backward


@st.composite
def wishes_of_a_rank(draw: st.DrawFn) -> list[list[int]]:
    """What one rank needs in a pass, in its order: gathers, the boundary, gathers and
    reductions.
    """
    units = st.integers(0, 4)
    forward = [[GATHER, unit] for unit in draw(st.lists(units, max_size=5))]
    backward = [
        [kind, unit]
        for kind, unit in draw(st.lists(st.tuples(st.sampled_from([GATHER, REDUCE]), units)))
    ]
    return [*forward, [BOUNDARIES, -1], *backward]


@st.composite
def ranks_that_skip_units(draw: st.DrawFn, num_units: int = 5) -> list[list[list[int]]]:
    """What ranks need in a pass when each runs some of the units, and some rank runs
    each of them.
    """
    on_ranks = draw(st.lists(st.sets(st.integers(0, num_units - 1)), min_size=1, max_size=4))
    on_ranks[0] |= set(range(num_units)) - set().union(*on_ranks)
    return [_pass_over(sorted(units), num_units) for units in on_ranks]


def _pass_over(units: list[int], num_units: int) -> list[list[int]]:
    """The pass of a rank that runs `units`, and after them one unit that stays for the
    backward.
    """
    last = num_units
    backward = [wish for unit in reversed(units) for wish in ([GATHER, unit], [REDUCE, unit])]
    return [
        *([GATHER, unit] for unit in [*units, last]),
        [BOUNDARIES, -1],
        [REDUCE, last],
        *backward,
    ]


@given(ranks_that_skip_units())
def test_the_order_negotiated_by_ranks_that_skip_units_is_one_for_a_rank_that_runs_them_all(
    wishes: list[list[list[int]]],
) -> None:
    assert negotiate(wishes) == _pass_over(list(range(5)), 5)


def negotiate(wishes: list[list[list[int]]]) -> list[list[int]]:
    """The events that ranks with these wishes agree on, as `Pass` asks for them."""
    places = [0] * len(wishes)
    events: list[list[int]] = []
    while True:
        rows = [
            mine[at] if at < len(mine) else NOTHING for mine, at in zip(wishes, places, strict=True)
        ]
        served = serve(rows, in_forward=[BOUNDARIES, -1] not in events)
        if served is None:
            assert places == [len(mine) for mine in wishes]
            return events
        events.append(served)
        places = [at + (row == served) for at, row in zip(places, rows, strict=True)]
        assert len(events) <= sum(map(len, wishes)), "somebody waits for ever"


@given(st.lists(wishes_of_a_rank(), min_size=1, max_size=4))
def test_every_wish_of_every_rank_is_served_in_its_order_with_one_turn(
    wishes: list[list[list[int]]],
) -> None:
    events = negotiate(wishes)
    assert events.count([BOUNDARIES, -1]) == 1
    for mine in wishes:
        remaining = iter(events)
        assert all(wish in remaining for wish in mine), (
            "a rank's wishes are no subsequence of the schedule"
        )


# --- small helpers of a pass ----------------------------------------------------------------------


def buffer_of(layout: FlatLayout) -> FlatParamPlan:
    dtypes, mesh = Dtypes(*["float32"] * 5), Mesh.of(data=layout.world_size)
    flow = BufferDataflow.of(STAGES[0], dtypes, layout.partition, mesh, ("data",))
    return FlatParamPlan("unit/float32", layout, dtypes, trainable=True, row=STAGES[0], flow=flow)


@given(layouts(), st.data())
def test_what_no_gradient_was_written_to_is_zeroed_and_the_rest_kept(
    layout: FlatLayout, data: st.DataObject
) -> None:
    written = data.draw(st.sets(st.sampled_from(layout.names)))
    before = torch.arange(1.0, layout.partition.padded_numel + 1)
    after = before.clone()
    zero_gaps(after, buffer_of(layout), written)
    assert not after[layout.numel :].any()
    for name, leaf in unflatten(after, layout).items():
        expected = unflatten(before, layout)[name]
        assert torch.equal(leaf, expected if name in written else torch.zeros_like(expected))


@given(layouts())
def test_a_ranks_own_shard_is_a_view_of_a_whole_buffer_or_the_shard_itself(
    layout: FlatLayout,
) -> None:
    whole = torch.arange(layout.partition.padded_numel)
    for rank in range(layout.world_size):
        shard = own_shard(whole, buffer_of(layout), rank)
        assert torch.equal(shard, take_shard(whole, layout.partition, rank))
        assert shard.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert own_shard(shard, buffer_of(layout), rank) is shard


def test_a_gather_may_start_early_while_both_units_fit_into_the_most_live_elements() -> None:
    plan = fzero.plan(make(Odd), config(3), world_size=2)
    first, second = plan.units[:2]
    both = first.gathered_numel + second.gathered_numel
    for max_live, may in ((both, True), (both - 1, False)):
        assert (
            replace(plan, max_live=max_live).unit_rules.may_start_early(first.name, second.name)
            is may
        )
    assert not replace(plan, prefetch=0).unit_rules.may_start_early(first.name, second.name)


def test_no_gather_starts_early_with_a_prefetch_bucket_of_zero() -> None:
    for sizes, may in (
        ({"stage3_prefetch_bucket_size": 0}, False),
        ({"stage3_prefetch_bucket_size": 1}, True),
        ({}, True),
    ):
        plan = fzero.plan(make(Odd), config(3, **sizes), world_size=2)
        first, second = plan.units[:2]
        assert plan.unit_rules.may_start_early(first.name, second.name) is may
