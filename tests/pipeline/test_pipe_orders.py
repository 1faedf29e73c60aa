"""Orders of pipelines: what they are, that the checker accepts all that can run and
nothing else, and their predicted course.
"""

from __future__ import annotations

import importlib.util
import itertools
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fzero.deepspeed.runtime.pipe import schedule
from fzero.pipeline import (
    B,
    F,
    I,
    LayerCost,
    OrderError,
    PipeEvent,
    PipeOrder,
    W,
    check_order,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    plan_order,
    predict,
    zero_bubble,
)
from fzero.pipeline.order_check import adds_in_order
from fzero.pipeline.orders import Order, tick

BUILT_IN: dict[str, Order] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero_bubble": zero_bubble,
    "interleaved:2": interleaved(2),
    "interleaved:3": interleaved(3),
    "forward_only": forward_only,
}

sizes = st.tuples(st.integers(1, 6), st.integers(1, 9))
"""Numbers of stages and micro-batches, also fewer micro-batches than stages."""


@st.composite
def planned(draw: st.DrawFn) -> PipeOrder:
    """A checked order with at least two stages."""
    name = draw(st.sampled_from(sorted(BUILT_IN)))
    return plan_order(BUILT_IN[name], draw(st.integers(2, 4)), draw(st.integers(1, 5)))


@st.composite
def sequential_runs(draw: st.DrawFn) -> list[list[PipeEvent]]:
    """The events of stages that come from running one event after the other, in any
    order that their data allows.
    """
    stages, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stage_of = draw(
        st.permutations([*range(stages), *draw(st.lists(st.integers(0, stages - 1), max_size=2))])
    )
    pairs = [(i, chunk) for i in range(micro_batches) for chunk in range(len(stage_of))]
    back = {pair: (I if draw(st.booleans()) else B)(*pair) for pair in pairs}
    sorter: TopologicalSorter[PipeEvent] = TopologicalSorter()
    for i, chunk in pairs:
        sorter.add(F(i, chunk), *([F(i, chunk - 1)] if chunk else []))
        sorter.add(
            back[i, chunk], F(i, chunk), *([back[i, chunk + 1]] if (i, chunk + 1) in back else [])
        )
        if back[i, chunk].kind == "backward_input":
            sorter.add(W(i, chunk), back[i, chunk])
    sorter.prepare()
    events, ready = [list[PipeEvent]() for _ in range(stages)], list[PipeEvent]()
    while sorter.is_active():
        ready += sorted(sorter.get_ready())
        event = ready.pop(draw(st.integers(0, len(ready) - 1)))
        sorter.done(event)
        events[stage_of[event.chunk]].append(event)
    return events


def depends(order: PipeOrder) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Another statement of rules 2 to 4: the events, as (stage, index), with those
    before them; KeyError if one is missing.
    """
    place = {
        (stage, event): index
        for stage, events in enumerate(order.events)
        for index, event in enumerate(events)
    }
    after = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    last = order.num_chunks - 1
    for stage, events in enumerate(order.events):
        for index, event in enumerate(events):
            kind, i, chunk = event
            after[stage, index] += [(stage, index - 1)] if index else []

            def needs(
                *others: PipeEvent, here: int = stage, stage: int = stage, index: int = index
            ) -> None:
                found = [(here, place[here, other]) for other in others if (here, other) in place]
                if not found:
                    raise KeyError(others)
                after[stage, index].extend(found)

            up = chunk < last and order.stage_of[chunk + 1] == stage
            down = chunk > 0 and order.stage_of[chunk - 1] == stage
            if kind == "forward" and chunk:
                needs(F(i, chunk - 1) if down else PipeEvent("receive_input", i, chunk))
            if kind in ("backward", "backward_input"):
                needs(F(i, chunk))
                if chunk < last:
                    needs(
                        *(
                            [B(i, chunk + 1), I(i, chunk + 1)]
                            if up
                            else [PipeEvent("receive_gradient", i, chunk)]
                        )
                    )
            if kind == "backward_weight":
                needs(I(i, chunk))
            if kind == "send_output":
                needs(F(i, chunk))
            if kind == "send_gradient":
                needs(B(i, chunk), I(i, chunk))
            if kind == "receive_input":
                needs(PipeEvent("send_output", i, chunk - 1), here=order.stage_of[chunk - 1])
            if kind == "receive_gradient":
                needs(PipeEvent("send_gradient", i, chunk + 1), here=order.stage_of[chunk + 1])
    return after


def messages(order: PipeOrder, kinds: str) -> dict[tuple[int, int], list[tuple[bool, int, int]]]:
    """By (from, to), the messages as one side has them: (whether an output,
    micro-batch, chunk that made it).
    """
    found = defaultdict[tuple[int, int], list[tuple[bool, int, int]]](list)
    for stage, events in enumerate(order.events):
        for event in (event for event in events if event.kind.startswith(kinds)):
            is_output, is_send = event.kind in ("send_output", "receive_input"), kinds == "send"
            maker = event.chunk if is_send else event.chunk + (-1 if is_output else 1)
            pair = (stage, order.peer(event)) if is_send else (order.peer(event), stage)
            found[pair].append((is_output, event.micro_batch, maker))
    return found


def can_run(order: PipeOrder) -> bool:
    """Whether the stages of an order, which has each event once, come to the end; the
    statement that the checker is held to.
    """
    try:
        TopologicalSorter(depends(order)).prepare()
    except (CycleError, KeyError):
        return False
    return messages(order, "send") == messages(order, "receive")


@given(sizes, st.sampled_from(sorted(BUILT_IN)))
def test_every_order_of_fzeros_is_accepted_and_adds_gradients_in_order(
    size: tuple[int, int], name: str
) -> None:
    order = plan_order(BUILT_IN[name], *size)
    assert can_run(order)
    assert adds_in_order(order)
    assert (order.stages, order.micro_batches) == size


@given(sizes)
def test_what_orders_declare_is_what_they_have_in_flight(size: tuple[int, int]) -> None:
    stages, micro_batches = size
    for name, order in BUILT_IN.items():
        planned = order(stages, micro_batches)
        assert isinstance(planned, PipeOrder)
        if name != "forward_only":
            counted = plan_order(
                lambda *_, of=planned: [of.compute(stage) for stage in range(of.stages)], *size
            )
            assert counted.in_flight == planned.in_flight, name
            assert counted.waiting == planned.waiting, name
    assert gpipe(*size).in_flight == (micro_batches,) * stages
    assert one_f_one_b(*size).in_flight == tuple(
        min(stages - stage, micro_batches) for stage in range(stages)
    )
    assert zero_bubble(*size).in_flight == one_f_one_b(*size).in_flight


@given(sequential_runs())
def test_what_runs_one_after_the_other_is_an_order(events: list[list[PipeEvent]]) -> None:
    micro_batches = 1 + max(event.micro_batch for stage in events for event in stage)
    assert can_run(plan_order(lambda *_: events, len(events), micro_batches))


@given(planned(), st.data())
def test_the_checker_accepts_a_permutation_of_a_stage_if_and_only_if_it_can_run(
    order: PipeOrder, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, order.stages - 1))
    events = list(order.events[stage])
    for _ in range(data.draw(st.integers(1, 3))):
        one, two = (data.draw(st.integers(0, len(events) - 1)) for _ in range(2))
        events.insert(two, events.pop(one))
    number = len(events)
    changed = replace(
        order,
        events=(*order.events[:stage], tuple(events), *order.events[stage + 1 :]),
        in_flight=(number,) * order.stages,
        waiting=(number,) * order.stages,
    )
    try:
        check_order(changed)
    except OrderError:
        assert not can_run(changed)
    else:
        assert can_run(changed)


@given(planned(), st.data())
def test_an_order_without_an_event_or_with_one_twice_is_rejected(
    order: PipeOrder, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, order.stages - 1))
    events = order.events[stage]
    index = data.draw(st.integers(0, len(events) - 1))
    twice = data.draw(st.integers(0, len(events)))
    for changed in (
        events[:index] + events[index + 1 :],
        (*events[:twice], events[index], *events[twice:]),
    ):
        with pytest.raises(OrderError):
            check_order(
                replace(order, events=(*order.events[:stage], changed, *order.events[stage + 1 :]))
            )


@given(planned(), st.data())
def test_an_order_with_more_in_flight_than_it_declares_is_rejected(
    order: PipeOrder, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, order.stages - 1))
    for name in ("in_flight", "waiting"):
        declared = getattr(order, name)
        if declared[stage]:
            less = (*declared[:stage], declared[stage] - 1, *declared[stage + 1 :])
            with pytest.raises(OrderError, match="as declared"):
                check_order(replace(order, **{name: less}))


def test_stages_that_wait_for_each_other_are_named() -> None:
    events = [
        [PipeEvent("receive_gradient", 0, 0), F(0), PipeEvent("send_output", 0, 0), B(0)],
        [PipeEvent("receive_input", 0, 1), F(0, 1), B(0, 1), PipeEvent("send_gradient", 0, 1)],
    ]
    with pytest.raises(
        OrderError,
        match=r"in a circle.*stage 0 at event 0 \(receive_gradient 0, from stage 1\); stage 1 ",
    ):
        plan_order(lambda *_: events, 2, 1)


def test_a_receive_out_of_turn_is_named() -> None:
    order = gpipe(2, 2)
    # receives micro-batch 1 first
    second = [order.events[1][2], *order.events[1][:2], *order.events[1][3:]]
    with pytest.raises(
        OrderError,
        match="stage 1 must receive from stage 0 in the order in which that sends, but message 0",
    ):
        check_order(replace(order, events=(order.events[0], tuple(second))))


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([[F(0), B(0)], [F(0), B(0)]], "chunk 0 is on \\[0, 1\\]"),
        ([[F(0), B(0)], [F(0, 2), B(0, 2)]], "chunk 1 is on none"),
        ([[F(0), B(0)], [("F", 0)]], "every event must be one of forward, backward"),
        (
            [[F(0), B(0)]],
            "must have events for 2 stages and 1 micro-batches, as asked, got 1 and 1",
        ),
        (
            [[F(0), B(0), F(1), B(1)], [F(0, 1), B(0, 1), F(1, 1), B(1, 1)]],
            "but forward 1 is one too many",
        ),
    ],
)
def test_events_that_are_no_order_are_refused_in_words(events: Any, words: str) -> None:
    with pytest.raises(OrderError, match=words):
        plan_order(lambda *_: events, 2, 1)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([[B(0), F(0)]], "event 0 \\(backward 0\\): must be after forward 0"),
        ([[F(0), W(0), I(0)]], "event 1 \\(backward_weight 0\\): must be after backward_input 0"),
        (
            [[F(0, 1), F(0), B(0, 1), B(0)]],
            "event 0 \\(forward 0 of chunk 1\\): must be after forward 0, got",
        ),
        (
            [[F(0), F(0, 1), B(0), B(0, 1)]],
            "event 2 \\(backward 0\\): must be after backward 0 of chunk 1",
        ),
        ([[F(0), F(0, 1), I(0, 1), W(0, 1), W(0), I(0)]], "must be after backward_input 0, got"),
    ],
)
def test_events_of_one_stage_in_a_wrong_order_are_refused(
    events: list[list[PipeEvent]], words: str
) -> None:
    with pytest.raises(OrderError, match=words):
        plan_order(lambda *_: events, 1, 1)


def test_names_of_orders_are_known() -> None:
    assert plan_order("1F1B", 2, 3) == one_f_one_b(2, 3)
    assert plan_order("zero-bubble", 2, 3) == zero_bubble(2, 3)
    assert plan_order("interleaved:3", 2, 3) == interleaved(3)(2, 3)
    for wrong in ("pipedream", "interleaved:0", "interleaved"):
        with pytest.raises(
            OrderError, match="must be one of 'gpipe', '1f1b', 'zero_bubble', 'interleaved:2'"
        ):
            plan_order(wrong, 2, 3)


# --- other people's orders ------------------------------------------------------------------------


def upstream_schedule() -> types.ModuleType:
    """DeepSpeed's module of schedules, without the rest of DeepSpeed, which changes
    what imports it.
    """
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        pytest.skip("needs DeepSpeed")
    source = Path(found.origin).with_name("runtime").joinpath("pipe", "schedule.py").read_text()
    module = types.ModuleType("upstream_schedule")
    exec(source.replace("from ..utils import call_to_str", "call_to_str = repr"), vars(module))
    return module


def test_one_f_one_b_has_the_ticks_of_upstreams_schedule() -> None:
    """Golden: stage 1 of 4 with 3 micro-batches, by tick; then all sizes, if DeepSpeed
    is installed.
    """
    events = one_f_one_b(4, 3).compute(1)
    assert [(tick(event, 4), event.kind[0], event.micro_batch) for event in events] == [
        (1, "f", 0), (3, "f", 1), (5, "f", 2), (6, "b", 0), (8, "b", 1), (10, "b", 2)
    ]  # fmt: skip
    upstream = upstream_schedule()
    for stages in range(1, 9):
        for micro_batches in range(1, 17):
            order = one_f_one_b(stages, micro_batches)
            for stage in range(stages):
                theirs = upstream.TrainSchedule(micro_batches, stages, stage)
                expected = {
                    (number, type(command).__name__)
                    for number, commands in enumerate(theirs)
                    for command in commands
                    if type(command).__name__ in ("ForwardPass", "BackwardPass")
                }
                kinds = {"forward": "ForwardPass", "backward": "BackwardPass"}
                assert {
                    (tick(event, stages), kinds[event.kind]) for event in order.compute(stage)
                } == expected
                assert max(2, order.in_flight[stage]) == theirs.num_pipe_buffers()


def commands(schedule: Any) -> list[list[tuple[str, int | None]]]:
    return [
        [(type(one).__name__, getattr(one, "buffer_id", None)) for one in tick] for tick in schedule
    ]


@pytest.mark.parametrize("name", ["TrainSchedule", "InferenceSchedule", "DataParallelSchedule"])
def test_schedules_under_deepspeeds_names_have_its_instructions(name: str) -> None:
    ours, theirs = (getattr(module, name) for module in (schedule, upstream_schedule()))
    for stages, micro_batches in itertools.product(range(1, 7), range(1, 10)):
        for stage in range(stages):
            one, two = (make(micro_batches, stages, stage) for make in (ours, theirs))
            assert commands(one) == commands(two)
            assert commands(one) == commands(one), "it can be read again"
            assert one.num_pipe_buffers() == two.num_pipe_buffers()


def torch_orders(
    name: str, stages: int, micro_batches: int, per_rank: int
) -> list[list[PipeEvent]]:
    """The events of one of torch's schedules, which reads only a few numbers of its
    stages.
    """
    from torch.distributed.pipelining import schedules

    made = [
        types.SimpleNamespace(
            num_stages=stages * per_rank,
            group_size=stages,
            group_rank=0,
            stage_index=chunk,
            is_first=chunk == 0,
            is_last=chunk == stages * per_rank - 1,
            submod=None,
            has_backward=True,
            device="cpu",
            stage_index_to_group_rank={},
            group=None,
        )
        for chunk in range(per_rank)
    ]
    cls: Callable[..., Any] = getattr(schedules, name)
    is_single = name == "ScheduleGPipe"
    made_order = cls(
        made[0] if is_single else made, micro_batches, loss_fn=lambda *_: None
    ).pipeline_order
    kinds = {"FORWARD": F, "FULL_BACKWARD": B, "BACKWARD_INPUT": I, "BACKWARD_WEIGHT": W}
    events = []
    for rank in range(stages):
        actions = [action for action in made_order[rank] if action is not None]
        flat = [part for action in actions for part in (action.sub_actions or [action])]
        events.append(
            [
                kinds[action.computation_type.name](action.microbatch_index, action.stage_index)
                for action in flat
                if action.computation_type.name in kinds
            ]
        )
    return events


@pytest.mark.long
@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 8), (4, 6), (3, 9)]
)
def test_orders_agree_with_those_of_torch_where_it_has_them(
    stages: int, micro_batches: int
) -> None:
    assert torch_orders("ScheduleGPipe", stages, micro_batches, 1) == [
        list(gpipe(stages, micro_batches).compute(stage)) for stage in range(stages)
    ]
    if micro_batches % max(1, micro_batches // stages) == 0:
        for chunks in (2, 3):
            theirs = torch_orders("ScheduleInterleaved1F1B", stages, micro_batches, chunks)
            order = interleaved(chunks)(stages, micro_batches)
            assert theirs == [list(order.compute(stage)) for stage in range(stages)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
        ("ScheduleLoopedBFS", 2),
    ],
)
def test_the_checker_accepts_the_other_orders_of_torch(name: str, chunks: int) -> None:
    for stages, micro_batches in ((2, 4), (4, 8)):
        assert can_run(
            plan_order(lambda p, m: torch_orders(name, p, m, chunks), stages, micro_batches)
        )


# --- the predicted course -------------------------------------------------------------------------


@given(sizes, st.integers(1, 8), st.integers(1, 8))
def test_equal_stages_take_the_time_of_the_formulas(
    size: tuple[int, int], forward: int, backward: int
) -> None:
    stages, micro_batches = size
    costs = [LayerCost(forward, backward, stored_nbytes=3, state_nbytes=5)] * stages
    for order in (gpipe, one_f_one_b):
        timeline = predict(order(*size), costs)
        assert timeline.seconds == (micro_batches + stages - 1) * (forward + backward)
        # float division
        assert timeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        assert timeline.stored == tuple(3 * held for held in order(*size).in_flight)
        assert timeline.nbytes == tuple(5 + stored for stored in timeline.stored)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4))
def test_an_interleaved_orders_bubble_is_that_of_the_formula(
    stages: int, rounds: int, chunks: int
) -> None:
    micro_batches = stages * rounds
    timeline = predict(
        interleaved(chunks)(stages, micro_batches), [LayerCost(1, 2)] * stages * chunks
    )
    assert timeline.bubble == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))


@given(st.integers(1, 8), st.integers(0, 16))
def test_zero_bubble_waits_a_third_of_the_time_of_one_f_one_b(stages: int, more: int) -> None:
    """ZB-H1, with equal times of F, I and W and enough micro-batches: (p - 1)(F + I -
    W) against (p - 1)(F + I + W).
    """
    micro_batches = max(2 * stages - 1, 1) + more
    costs = [LayerCost(1, 2, stored_nbytes=1)] * stages
    ours, theirs = (
        predict(order(stages, micro_batches), costs) for order in (zero_bubble, one_f_one_b)
    )
    assert ours.seconds - 3 * micro_batches == (stages - 1)
    assert theirs.seconds - 3 * micro_batches == 3 * (stages - 1)
    assert max(ours.stored) == max(theirs.stored)


def test_messages_take_their_time_on_each_link_one_after_the_other() -> None:
    """By hand: F 1 s, then 2 s for 20 bytes at 10 bytes/s; the second message waits for
    the first one.
    """
    timeline = predict(
        forward_only(2, 2), [LayerCost(1, 0, output_nbytes=20), LayerCost(1, 0)], bandwidth=10
    )
    assert [(span.start, span.stop) for span in timeline.messages[0]] == [(1, 3), (3, 5)]
    assert [(span.start, span.stop) for span in timeline.spans[1]] == [(3, 4), (5, 6)]
    assert timeline.sent == (40, 0)


def test_costs_that_are_not_one_for_each_chunk_are_refused() -> None:
    with pytest.raises(
        ValueError, match="costs must be one for each of the 4 chunks of the order, got 2"
    ):
        predict(interleaved(2)(2, 2), [LayerCost(1, 2)] * 2)
