"""The laws of the unit scheduler: the checker accepts what it makes for any model, and
nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, example, given, strategies as st

from fzero.plans.schedule_check import CHECKS, check_schedules
from fzero.plans.unit_orders import AGREED, BOUNDARY, END, Event, Orders, Run, ScheduleError, serve
from fzero.plans.unit_rules import FlatGrad, UnitRule, UnitRules
from fzero.plans.unit_scheduler import UnitScheduler
from sharding import DEVICE, Placement

PLACEMENTS = (DEVICE, Placement("host"), Placement("nvme", path="files"))

Visits = Sequence[str]
"""The units that a forward visits, one after the other."""

# --- models and plans -----------------------------------------------------------------------------


@st.composite
def unit_rules(draw: st.DrawFn, world_size: int | None = None) -> UnitRules:
    """Some of them gathered, with none to two flat gradients each; and the limits of a
    plan.
    """
    sizes = draw(st.lists(st.sampled_from([0, 8, 16, 24, 100]), min_size=1, max_size=5))
    is_full, remembers = draw(st.booleans()), draw(st.booleans())
    units = {}
    for index, size in enumerate(sizes):
        name = f"blocks.{index}"
        grads = tuple(
            FlatGrad(f"{name}/{kind}", numel, is_full, draw(st.sampled_from(PLACEMENTS)))
            for kind, numel in enumerate(draw(st.lists(st.sampled_from([0, 8, 32]), max_size=2)))
        )
        units[name] = UnitRule(size, draw(st.integers(0, 1)), grads, remembers)
    num_ranks = draw(st.integers(1, 3)) if world_size is None else world_size
    return UnitRules(
        units,
        world_size=num_ranks,
        num_shards=num_ranks,
        prefetches=draw(st.booleans()),
        max_live=draw(st.sampled_from([max(sizes), max(sizes) + 10, 1000])),
        max_reducing=draw(st.sampled_from([8, 64, 1000])),
        max_staged=draw(st.sampled_from([None, 1, 2])),
    )


@st.composite
def models(draw: st.DrawFn, rules: UnitRules) -> Visits:
    """Visits of a forward: with repeats, shared units and units that are never used."""
    return draw(st.lists(st.sampled_from(sorted(rules.units)), min_size=1, max_size=8))


@st.composite
def steps(draw: st.DrawFn, world_size: int | None = None) -> tuple[UnitRules, Visits]:
    """A plan with a model of its units."""
    rules = draw(unit_rules(world_size))
    return rules, draw(models(rules))


# --- a step without tensors -----------------------------------------------------------------------

devices = st.sampled_from(["cuda", "cpu"])


@dataclass
class Rank:
    """One rank that runs a model under its scheduler; `record` is for the checker."""

    rules: UnitRules
    scheduler: UnitScheduler
    record: list[Event]
    # whether the backward runs each visit again, with the first unit, and completes both
    is_reentrant: bool = False

    def request(self, events: Sequence[Event]) -> Iterator[None]:
        """Records events, and waits while the scheduler has a wish."""
        self.record += events
        while self.scheduler.needed is not None:
            yield

    def forward(
        self, order: Sequence[Event] | None, visits: Visits, *, is_first: bool = True
    ) -> Iterator[None]:
        self.scheduler.begin(order)
        yield from self.request(self.scheduler.begin_forward(is_first=is_first))
        for unit in visits:
            yield from self.request(self.scheduler.enter(unit))
            self.record.append(Event("use", unit))
        yield from self.request(self.scheduler.boundary())

    def backward(
        self, order: Sequence[Event] | None, visits: Visits, *, is_last: bool = True
    ) -> Iterator[None]:
        """Unpacks each visit's unit twice, around the first of its gradients."""
        scheduler = self.scheduler
        scheduler.begin(order)
        scheduler.begin_backward(
            is_last=is_last, visits=Counter(() if self.is_reentrant else visits)
        )
        shared = next(iter(self.rules.units))
        for unit in reversed(visits):
            if self.is_reentrant:
                for used in (unit, shared):
                    yield from self.request(scheduler.enter(used))
                    self.record.append(Event("use", used))
                yield from self.gradients(shared)
            yield from self.gradients(unit)
        yield from self.request(scheduler.end_backward())
        self.record += scheduler.finish()

    def gradients(self, unit: str) -> Iterator[None]:
        """The gradients of a visit."""
        scheduler = self.scheduler
        yield from self.request(scheduler.need(unit))
        self.record.append(Event("use", unit))
        for grad in self.rules.units[unit].grads:
            yield from self.request(scheduler.collect(unit, grad.key))
            yield from self.request(scheduler.need(unit))
            self.record.append(Event("use", unit))
        if self.rules.units[unit].grads:
            self.record.append(Event("grad", unit))
            yield from self.request(scheduler.end_visit(unit))

    def beside(
        self, order: Sequence[Event] | None, visits: Visits, outside: tuple[Visits, Visits]
    ) -> Iterator[None]:
        """A forward, or none, and a backward with gradients from outside of it, before
        and after those of the visits.
        """
        if visits:
            yield from self.forward((BOUNDARY,), visits)
        scheduler, trained = (
            self.scheduler,
            [name for name, unit in self.rules.units.items() if unit.grads],
        )
        early, late = ([unit for unit in units if unit in trained] for units in outside)
        scheduler.begin(order)
        scheduler.begin_backward(is_last=True, visits=Counter(visits))
        scheduler.expect([*early, *late])
        for unit in (*early, *(unit for unit in reversed(visits) if unit in trained), *late):
            for grad in self.rules.units[unit].grads:
                yield from self.request(scheduler.collect(unit, grad.key))
            self.record.append(Event("grad", unit))
            yield from self.request(scheduler.end_visit(unit))
        yield from self.request(scheduler.end_backward())
        self.record += scheduler.finish()


def run_together(
    ranks: Sequence[Rank], programs: Sequence[Iterator[None]], orders: Orders, run: Run
) -> None:
    """Runs all ranks until the run ends; agrees on an event whenever all of them have a
    wish.
    """
    names = list(ranks[0].rules.units)
    going = dict(enumerate(programs))
    while going:
        for rank, program in list(going.items()):
            if next(program, END) is END:
                del going[rank]
        if not going:
            return
        assert len(going) == len(ranks), "some ranks have ended while others wait for ever"
        schedulers = [rank.scheduler for rank in ranks]
        departing = [rank.record[-1] == Event("leave_order") for rank in ranks]
        if any(departing):
            if not all(departing):
                raise ScheduleError("one rank departs alone")
            place = max(scheduler.place for scheduler in schedulers)
            for rank in ranks:
                rank.record += rank.scheduler.leave_order(place)
            orders.give_up(run)
            continue
        wishes = [scheduler.needed or END for scheduler in schedulers]
        rows = [
            [AGREED.index(w.kind), names.index(w.unit) if w.unit else -1] if w != END else [-1, -1]
            for w in wishes
        ]
        in_forward = schedulers[0].in_forward
        served = serve(rows, in_forward=in_forward)
        orders.differ |= in_forward and any(row != served for row in rows)
        event = (
            END
            if served is None
            else Event(AGREED[served[0]], names[served[1]] if served[1] >= 0 else "")
        )
        for rank in ranks:
            rank.record += rank.scheduler.agreed(event)


def train(
    rules: UnitRules,
    visits_by_rank: Sequence[Visits],
    orders: Orders,
    *,
    num_micro_steps: int = 1,
    device: str = "cuda",
    is_reentrant: bool = False,
) -> list[list[Event]]:
    """One step of all ranks; returns their records. Learns orders, or follows them."""
    alone = len(visits_by_rank) == 1
    ranks = [
        Rank(rules, UnitScheduler(rules, device=device, is_alone=alone), [], is_reentrant)
        for _ in visits_by_rank
    ]
    for micro_step in range(num_micro_steps):
        for kind in ("forward", "backward"):
            run: Run = (kind, 0)
            known = orders.learned.get(run)
            is_last = micro_step == num_micro_steps - 1
            programs = [
                rank.forward(known, visits)
                if kind == "forward"
                else rank.backward(known, visits, is_last=is_last)
                for rank, visits in zip(ranks, visits_by_rank, strict=True)
            ]
            run_together(ranks, programs, orders, run)
            if known is None:
                found = [rank.scheduler.recorded(run, differ=orders.differ) for rank in ranks]
                assert all(one == found[0] for one in found), "ranks learn different orders"
                orders.learn(run, found[0][0], is_whole=found[0][1])
    return [rank.record for rank in ranks]


def whole(rules: UnitRules, visits: Visits) -> Orders:
    """The orders that ranks learn when all of them run the same model, whatever it
    skips.
    """
    orders = Orders()
    for _ in range(16):
        train(rules, [visits] * rules.world_size, orders)
    return orders


# --- laws -----------------------------------------------------------------------------------------


@given(steps(), devices, st.integers(1, 3))
def test_the_checker_accepts_every_schedule_of_ranks_that_run_the_same_model(
    step: tuple[UnitRules, Visits], device: str, num_micro_steps: int
) -> None:
    rules, visits = step
    for orders in (Orders(), whole(rules, visits)):
        records = train(
            rules,
            [visits] * rules.world_size,
            orders,
            num_micro_steps=num_micro_steps,
            device=device,
        )
        peak = check_schedules(records, rules)
        used = [rules.units[unit].gathered_numel for unit in visits]
        assert max(used) <= peak <= rules.most_gathered()


@given(steps(), st.integers(1, 2), devices)
def test_ranks_whose_backward_completes_each_visit_for_itself_learn_its_order(
    step: tuple[UnitRules, Visits], num_micro_steps: int, device: str
) -> None:
    """Reentrant checkpoints: a unit that several use is reduced after each."""
    rules, visits = step
    orders = Orders()
    for _ in range(17):
        records = train(
            rules, [visits] * rules.world_size, orders,
            num_micro_steps=num_micro_steps, device=device, is_reentrant=True,
        )  # fmt: skip
        check_schedules(records, rules)
    assert not orders.varying and not any(
        event.kind in ("negotiate", "leave_order") for event in records[0]
    )


@given(st.data(), devices)
def test_the_checker_accepts_what_ranks_negotiate_that_skip_visits(
    data: st.DataObject, device: str
) -> None:
    rules, visits = data.draw(steps())
    skipping = [data.draw(subsequences(visits)) for _ in range(rules.world_size)]
    records = train(rules, skipping, Orders(), device=device)
    assert check_schedules(records, rules) <= rules.most_gathered(alike=False)


@given(st.data(), devices)
def test_the_checker_accepts_what_ranks_do_that_skip_visits_of_a_learned_order(
    data: st.DataObject, device: str
) -> None:
    rules, visits = data.draw(steps())
    orders = whole(rules, visits)
    skipping = [data.draw(subsequences(visits)) for _ in range(rules.world_size)]
    records = train(rules, skipping, orders, device=device)
    assert check_schedules(records, rules) <= rules.most_gathered(alike=False)


@st.composite
def subsequences(draw: st.DrawFn, visits: Visits) -> Visits:
    """Some of the visits, in their order."""
    return [unit for unit in visits if draw(st.booleans())]


@given(st.data(), devices)
def test_the_checker_accepts_what_ranks_do_that_all_depart_from_a_learned_order(
    data: st.DataObject, device: str
) -> None:
    rules, visits = data.draw(steps())
    orders, others = whole(rules, visits), data.draw(models(rules))
    for _ in range(2):
        records = train(rules, [others] * rules.world_size, orders, device=device)
        assert check_schedules(records, rules) <= rules.most_gathered(alike=False)
        found = Counter(event for event in records[0] if event.kind in ("boundary", "reduce"))
        trained = [name for name, unit in rules.units.items() if unit.grads]
        assert found == Counter([BOUNDARY, *(Event("reduce", name) for name in trained)]), (
            "each comes once"
        )


@given(st.data(), devices)
def test_the_checker_accepts_gradients_from_outside_of_the_forwards_that_differ_by_rank(
    data: st.DataObject, device: str
) -> None:
    drawn = data.draw(unit_rules())
    rules = replace(
        drawn, units={name: replace(unit, gathered_numel=0) for name, unit in drawn.units.items()}
    )
    some, order = st.lists(st.sampled_from(sorted(rules.units)), max_size=4, unique=True), None
    for _ in range(3):
        ranks = [
            Rank(rules, UnitScheduler(rules, device=device, is_alone=rules.world_size == 1), [])
            for _ in range(rules.world_size)
        ]
        programs = [
            rank.beside(order, data.draw(some), (data.draw(some), data.draw(some)))
            for rank in ranks
        ]
        run_together(ranks, programs, Orders(), ("backward",))
        check_schedules(
            [[event for event in rank.record if event != BOUNDARY] for rank in ranks], rules
        )
        for rank in ranks:
            found = Counter(event.unit for event in rank.record if event.kind == "reduce")
            assert found.keys() == {name for name, unit in rules.units.items() if unit.grads}
            followed = (
                Counter(event.unit for event in order if event.kind == "reduce") if order else found
            )
            assert found == followed, "a learned order holds, whichever units the ranks use"
        order = order or ranks[0].scheduler.recorded(("backward",), differ=False)[0]


BETWEEN = UnitRules(
    {
        name: UnitRule(size, 0, (), False)
        for name, size in {"a": 8, "kept": 0, "b": 8, "c": 8}.items()
    },
    world_size=2,
    num_shards=2,
    prefetches=True,
    max_live=16,
    max_reducing=8,
    max_staged=None,
)
"""A unit that is not gathered is used between two that are."""


@given(steps())
@example((BETWEEN, ["a", "kept", "b", "c"]))
def test_a_learned_order_gathers_each_unit_once_for_each_separate_visit(
    step: tuple[UnitRules, Visits],
) -> None:
    rules, visits = step
    (record, *_) = train(rules, [visits] * rules.world_size, whole(rules, visits))
    turn = record.index(BOUNDARY)
    gathered = [event.unit for event in record[:turn] if event.kind == "gather"]
    entered = [unit for unit, _ in groupby(visits)]
    assert gathered == [unit for unit in entered if rules.units[unit].gathered_numel]
    assert {event.kind for event in record}.isdisjoint(("drop_gather", "negotiate", "leave_order"))


@given(steps(world_size=2))
def test_a_gather_starts_while_the_gathered_unit_before_it_is_in_use_exactly_where_both_have_room(
    step: tuple[UnitRules, Visits],
) -> None:
    rules, visits = step
    (record, *_) = train(rules, [visits] * 2, whole(rules, visits))
    live = before = ""
    for event in record[: record.index(BOUNDARY)]:
        if event.kind == "gather":
            assert not before or (live == before) is rules.may_start_early(before, event.unit)
            before = event.unit
        live = (
            event.unit if event.kind == "wait_gather" else "" if event.kind == "release" else live
        )


# --- mutations ------------------------------------------------------------------------------------

OWN = sorted({*CHECKS} - {"use", "grad", "boundary"})


@given(steps(), devices, st.integers(1, 2), st.data())
def test_a_schedule_that_lacks_any_event_is_rejected(
    step: tuple[UnitRules, Visits], device: str, num_micro_steps: int, data: st.DataObject
) -> None:
    """A missing release, gather, wait, reduction, flat gradient: on one rank, or on all
    of them.
    """
    rules, visits = step
    records = train(
        rules, [visits] * rules.world_size, Orders(), num_micro_steps=num_micro_steps, device=device
    )
    places = [index for index, event in enumerate(records[0]) if event.kind in OWN]
    assume(places)
    place = data.draw(st.sampled_from(places))
    first, last = data.draw(
        st.sampled_from([(0, 1), (rules.world_size - 1, rules.world_size), (0, rules.world_size)])
    )
    for record in records[first:last]:
        del record[place]
    with pytest.raises(ScheduleError, match="check_schedules"):
        check_schedules(records, rules)


@given(steps(), devices, st.data())
def test_a_schedule_with_any_event_twice_is_rejected(
    step: tuple[UnitRules, Visits], device: str, data: st.DataObject
) -> None:
    rules, visits = step
    records = train(rules, [visits] * rules.world_size, Orders(), device=device)
    places = [index for index, event in enumerate(records[0]) if event.kind in OWN]
    assume(places)
    place = data.draw(st.sampled_from(places))
    for record in records:
        record.insert(place, record[place])
    with pytest.raises(ScheduleError, match="check_schedules"):
        check_schedules(records, rules)


@given(steps(), devices)
def test_a_unit_that_is_gathered_again_before_its_release_is_rejected(
    step: tuple[UnitRules, Visits], device: str
) -> None:
    rules, visits = step
    records = train(rules, [visits] * rules.world_size, Orders(), device=device)
    place = next(
        (index for index, event in enumerate(records[0]) if event.kind == "wait_gather"), None
    )
    assume(place is not None)
    for record in records:
        unit = record[place].unit
        record[place + 1 : place + 1] = [Event("gather", unit), Event("wait_gather", unit)]
    with pytest.raises(ScheduleError, match="check_schedules"):
        # there is room for both
        check_schedules(records, replace(rules, prefetches=True, max_live=10**9))


@given(steps(world_size=2), st.data())
def test_collectives_that_are_swapped_on_one_rank_are_rejected(
    step: tuple[UnitRules, Visits], data: st.DataObject
) -> None:
    rules, visits = step
    records = train(rules, [visits] * 2, Orders())
    places = [index for index, event in enumerate(records[1]) if event.kind in AGREED]
    pairs = [(a, b) for a, b in pairwise(places) if records[1][a] != records[1][b]]
    assume(pairs)
    one, other = data.draw(st.sampled_from(pairs))
    records[1][one], records[1][other] = records[1][other], records[1][one]
    with pytest.raises(
        ScheduleError, match="all ranks must issue the same collectives in the same order"
    ):
        check_schedules(records, rules)


@given(steps(), st.data())
def test_a_reduction_before_the_last_gradient_of_its_unit_is_rejected(
    step: tuple[UnitRules, Visits], data: st.DataObject
) -> None:
    rules, visits = step
    records = train(rules, [visits] * rules.world_size, Orders())
    reductions = [
        event
        for event in records[0]
        if event.kind == "reduce" and Event("grad", event.unit) in records[0]
    ]
    assume(reductions)
    event = data.draw(st.sampled_from(reductions))
    for record in records:
        record.remove(event)
        grad = max(index for index, one in enumerate(record) if one == Event("grad", event.unit))
        record.insert(grad, event)
    with pytest.raises(ScheduleError, match="check_schedules"):
        check_schedules(records, rules)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=5))
def test_gathers_beyond_the_bound_are_rejected(sizes: list[int]) -> None:
    units = {f"blocks.{index}": UnitRule(size, 0, (), False) for index, size in enumerate(sizes)}
    rules = UnitRules(units, 2, 2, True, 1000, 8, None)
    records = train(rules, [list(units)] * 2, whole(rules, list(units)))
    peak = check_schedules(records, rules)
    assert peak == max(one + other for one, other in pairwise(sizes)) <= rules.most_gathered()
    assert rules.most_gathered(alike=False) == 2 * max(sizes), (
        "a rank takes part in one gather while it uses a unit"
    )
    for less in (replace(rules, max_live=peak - 1), replace(rules, prefetches=False)):
        with pytest.raises(ScheduleError, match="elements are gathered"):
            check_schedules(records, less)


@given(steps())
def test_reductions_beyond_the_bound_are_rejected(step: tuple[UnitRules, Visits]) -> None:
    rules, visits = step
    here = {
        name: replace(unit, grads=tuple(grad._replace(placement=DEVICE) for grad in unit.grads))
        for name, unit in rules.units.items()
    }
    rules = replace(rules, units=here, max_reducing=10**6)
    records = train(rules, [visits] * rules.world_size, Orders())
    trained = [unit.reduced_numel for unit in rules.units.values() if unit.grads]
    assume(len(trained) > 1)
    check_schedules(records, rules)
    with pytest.raises(ScheduleError, match="elements are reduced at once"):
        check_schedules(records, replace(rules, max_reducing=sum(trained) - 1))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_after_the_reduction_of_their_unit_are_reduced_once_more(num_ranks: int) -> None:
    """The order was learned of a loss without the reentrant checkpoint that this
    backward runs at its end.
    """
    rules, run = (
        replace(rules_of(a=8, b=8), world_size=num_ranks, num_shards=num_ranks),
        ("backward",),
    )
    orders = Orders(learned={run: (Event("reduce", "b"), Event("reduce", "a"))})
    ranks = [
        Rank(rules, UnitScheduler(rules, is_alone=num_ranks == 1), []) for _ in range(num_ranks)
    ]

    def backward(rank: Rank) -> Iterator[None]:
        rank.scheduler.begin(orders.learned[run])
        rank.scheduler.begin_backward(is_last=True, visits={"a": 1, "b": 1})
        for unit in ("b", "a", "b"):
            yield from rank.request(rank.scheduler.collect(unit, f"{unit}/f"))
            yield from rank.request(rank.scheduler.end_visit(unit))
        yield from rank.request(rank.scheduler.end_backward())
        rank.record += rank.scheduler.finish()

    run_together(ranks, [backward(rank) for rank in ranks], orders, run)
    for rank in ranks:
        assert [event.unit for event in rank.record if event.kind == "reduce"] == ["b", "a", "b"]
    assert (run in orders.varying) == (num_ranks > 1)


def rules_of(**numels: int) -> UnitRules:
    """Two ranks, and units of one flat buffer each, whose comm hooks keep a state."""
    units = {
        n: UnitRule(size, 0, (FlatGrad(f"{n}/f", size, False, DEVICE),), True)
        for n, size in numels.items()
    }
    return UnitRules(units, 2, 2, True, max_live=1000, max_reducing=1000, max_staged=None)


def test_gradients_that_come_after_an_agreed_reduction_are_reduced_once_that_has_ended() -> None:
    """The last declared unit is served first: rank 0 needs its reduction while rank 1
    visits it once more.
    """
    rules = rules_of(first=8, last=8)
    records = train(rules, [["last"], ["last", "first", "last"]], Orders())
    check_schedules(records, rules)
    ends = [
        str(event)
        for event in records[1]
        if event.kind in ("reduce", "end_reduce") and event.unit == "last"
    ]
    assert ends == ["reduce last", "end_reduce last"] * 2


def test_a_rank_that_stops_before_a_reduction_goes_on_with_the_gather_that_others_have_issued() -> (
    None
):
    rules = rules_of(x=8, y=8)
    scheduler = UnitScheduler(rules)
    scheduler.begin([Event("gather", "x"), BOUNDARY])
    scheduler.enter("x")
    scheduler.boundary()
    scheduler.begin([Event("reduce", "x"), Event("gather", "y")])
    scheduler.begin_backward(is_last=True, visits={"x": 1})
    assert [str(event) for event in scheduler.need("y")] == ["release x", "leave_order"]
    events = [str(event) for event in scheduler.leave_order(2)]
    assert (
        events == ["collect x/f", "reduce x", "gather y", "wait_gather y"]
        and scheduler.needed is None
    )


def test_a_unit_that_is_in_use_costs_no_event() -> None:
    """Every saved view that is unpacked asks for its unit."""
    rules = UnitRules(
        {"a": UnitRule(8, 0, (), False), "b": UnitRule(8, 0, (), False)}, 2, 2, True, 16, 8, None
    )
    scheduler = UnitScheduler(rules)
    scheduler.begin([Event("gather", "a"), Event("gather", "b"), BOUNDARY])
    kinds = [event.kind for event in scheduler.enter("a")]
    assert kinds == ["gather", "prefetch_shards", "wait_gather", "gather"]
    assert scheduler.need("a") == scheduler.enter("a") == ()
