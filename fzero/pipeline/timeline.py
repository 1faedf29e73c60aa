"""The predicted course of a step in a pipeline: when each stage computes, how long it
waits, and what it stores.

An order says what follows what; costs say how long it takes. A stage starts an event
when it has ended the one before and has what the event needs. A message starts when it
is made and the link to that stage is free. Nothing else takes time: no overhead per
event, and sends do not slow down compute. Seconds and bytes only; no tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fzero.common.text_tables import scale_of
from fzero.common.timelines import Event, Timeline
from fzero.pipeline.orders import COMPUTE, PipeEvent, PipeOrder, receive_of, short
from fzero.pipeline.partition import LayerCost


class EventSpan(NamedTuple):
    """An event, from `start` to `stop` seconds after the beginning of the step."""

    event: PipeEvent
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """When what happens in a step, as predicted.

    Args:
        order: whose events these are.
        costs: by chunk.
        spans: by stage, the events that compute.
        messages: by stage, its sends, while they are under way.
        stored: by stage, the most bytes that forwards have stored for backwards at one
            time.
        state: by stage, the bytes of its parameters, gradients and optimizer state.
        working: by stage, the most bytes that one forward or backward holds while it
            runs.
        sent: by stage, the bytes that it sends to other stages.
    """

    order: PipeOrder
    costs: tuple[LayerCost, ...]
    spans: tuple[tuple[EventSpan, ...], ...]
    messages: tuple[tuple[EventSpan, ...], ...]
    stored: tuple[int, ...]
    state: tuple[int, ...]
    working: tuple[int, ...]
    sent: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """From the first event to the end of the last one."""
        return max((spans[-1].stop for spans in self.spans if spans), default=0.0)

    def busy(self, stage: int) -> float:
        """The seconds in which a stage computes."""
        return sum(span.stop - span.start for span in self.spans[stage])

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait."""
        total = self.order.stages * self.seconds
        return 1 - sum(map(self.busy, range(self.order.stages))) / total if total else 0.0

    @property
    def nbytes(self) -> tuple[int, ...]:
        """By stage, the peak: its state, the most that it stores, and what it holds
        while it computes.
        """
        return tuple(map(sum, zip(self.state, self.stored, self.working, strict=True)))


def chunk_costs(costs: Sequence[LayerCost], bounds: Sequence[int]) -> tuple[LayerCost, ...]:
    """The costs of chunks from those of layers; an empty chunk costs nothing, and
    passes on what it gets.

    >>> [
    ...     cost.forward
    ...     for cost in chunk_costs([LayerCost(1, 2), LayerCost(3, 4), LayerCost(5, 6)], (0, 2, 3))
    ... ]
    [4, 5]
    """
    found = list[LayerCost]()
    for start, stop in pairwise(bounds):
        own = costs[start:stop]
        backward = sum(cost.backward for cost in own)
        weights = sum(cost.backward * cost.weight_share for cost in own)
        found.append(
            LayerCost(
                sum(cost.forward for cost in own),
                backward,
                sum(cost.state_nbytes for cost in own),
                sum(cost.stored_nbytes for cost in own),
                own[-1].output_nbytes if own else (found[-1].output_nbytes if found else 0),
                weights / backward if backward else 0.5,
                max((cost.working_nbytes for cost in own), default=0),
            )
        )
    return tuple(found)


def predict(
    order: PipeOrder,
    costs: Sequence[LayerCost],
    *,
    bandwidth: float = math.inf,
    latency: float = 0.0,
) -> PipelineTimeline:
    """The timeline of an order.

    Args:
        order: checked (`plan_order`).
        costs: by chunk, of one micro-batch.
        bandwidth: the bandwidth of the link from one stage to another, bytes per second
            in each direction.
        latency: seconds that each message takes besides.

    >>> from fzero.pipeline.orders import one_f_one_b
    >>> timeline = predict(one_f_one_b(4, 12), [LayerCost(1.0, 2.0, stored_nbytes=10)] * 4)
    >>> timeline.seconds, round(timeline.bubble, 3), timeline.stored
    (45.0, 0.2, (40, 30, 20, 10))
    """
    if len(costs) != order.num_chunks:
        raise ValueError(
            f"predict: costs must be one for each of the {order.num_chunks} chunks of the order, "
            f"got {len(costs)}; "
            "make them from those of layers with chunk_costs"
        )
    stages = [_Stage(order, stage, costs) for stage in range(order.stages)]
    arrived = dict[PipeEvent, float]()
    free = defaultdict[tuple[int, int], float](float)  # per link: the time when it is free
    has_moved = True
    while has_moved:
        has_moved = False
        for stage in stages:
            while (event := stage.next) is not None and not (
                event.kind.startswith("receive") and event not in arrived
            ):
                has_moved = True
                stage.place += 1
                if event.kind in COMPUTE:
                    stage.compute(event)
                elif event.kind.startswith("receive"):
                    stage.now = max(stage.now, arrived[event])
                else:
                    there, receive = receive_of(event, order.stage_of)
                    start = max(stage.now, free[stage.stage, there])
                    nbytes = costs[
                        event.chunk if event.kind == "send_output" else event.chunk - 1
                    ].output_nbytes
                    stop = free[stage.stage, there] = arrived[receive] = (
                        start + latency + nbytes / bandwidth
                    )
                    stage.messages.append(EventSpan(event, start, stop))
                    stage.sent += nbytes
    assert all(stage.next is None for stage in stages), "check_order accepts no order that stops"
    return PipelineTimeline(
        order,
        tuple(costs),
        tuple(tuple(stage.spans) for stage in stages),
        tuple(tuple(stage.messages) for stage in stages),
        tuple(stage.most_stored for stage in stages),
        tuple(
            sum(costs[chunk].state_nbytes for chunk in order.chunks_of(stage))
            for stage in range(order.stages)
        ),
        tuple(
            max(costs[chunk].working_nbytes for chunk in order.chunks_of(stage))
            for stage in range(order.stages)
        ),
        tuple(stage.sent for stage in stages),
    )


def stored_over_time(timeline: PipelineTimeline, stage: int) -> Iterator[tuple[float, int]]:
    """The bytes that a stage stores, and since when: from the beginning of each forward
    to the end of its backward.

    >>> from fzero.pipeline.orders import one_f_one_b
    >>> timeline = predict(one_f_one_b(1, 2), [LayerCost(1, 2, stored_nbytes=5)])
    >>> list(stored_over_time(timeline, 0))
    [(0.0, 0), (0.0, 5), (3.0, 0), (3.0, 5), (6.0, 0)]
    """
    stored = 0
    yield 0.0, 0
    for event, start, stop in timeline.spans[stage] if timeline.order.has_backward else ():
        if (more := _stores(event, timeline.costs[event.chunk])) != 0:
            stored += more
            yield (start if more > 0 else stop), stored


COLORS = {
    "F": "#5b7fa6",
    "B": "#c98b5b",
    "I: B of the input": "#c98b5b",
    "W: B of the weights": "#7fb08a",
    "reduce of gradients": "0.75",
}
_KINDS = dict(zip(COMPUTE, COLORS))


def drawn(timeline: PipelineTimeline, after: Sequence[float] = ()) -> Timeline:
    """Stages by time, a bar for each event with its micro-batch; gaps are the bubble.

    In an interleaved order, later chunks are darker. A curve in each lane shows the
    bytes that the stage stores; its full height is the most of all stages.

    Args:
        timeline: the timeline of one step.
        after: by stage, the seconds in which it reduces gradients after its last
            backward.
    """
    order, events, ends = timeline.order, list[Event](), [0.0]
    most = max(timeline.stored, default=0)
    scale, unit = scale_of(most or 1)
    for stage, reduces in enumerate(after or [0.0] * order.stages):
        chunks, spans = order.chunks_of(stage), timeline.spans[stage]
        for event, start, stop in spans:
            opacity = 1 - 0.55 * (len(chunks) - 1 - chunks.index(event.chunk)) / len(chunks)
            bar = Event(str(stage), _KINDS[event.kind], start, stop, short(event)[1:], 1.0, opacity)
            events.append(bar)
        end = spans[-1].stop if spans else 0.0
        ends.append(end + reduces)
        if any(after):
            events.append(Event(str(stage), "reduce of gradients", end, end + reduces))
    second, unit_of_time = (1e3, "ms") if max(ends) < 1 else (1.0, "s")
    return Timeline(
        end=max(ends),
        lanes={
            str(stage): f"stage {stage}\n{stored / scale:.3g} {unit}"
            for stage, stored in enumerate(timeline.stored)
        },
        events=events,
        colors=COLORS,
        curves={
            str(stage): [(time, held / most) for time, held in stored_over_time(timeline, stage)]
            for stage in range(order.stages if most else 0)
        },
        title=f"{order.name}, {order.micro_batches} micro-batches: "
        f"{max(ends) * second:.3g} {unit_of_time}, bubble {timeline.bubble:.1%}",
    )


class _Stage:
    """One stage on its way through its events."""

    def __init__(self, order: PipeOrder, stage: int, costs: Sequence[LayerCost]) -> None:
        self.stage, self.events, self.costs, self.trains = (
            stage,
            order.events[stage],
            costs,
            order.has_backward,
        )
        self.place, self.now = 0, 0.0
        self.stored = self.most_stored = self.sent = 0
        self.spans, self.messages = list[EventSpan](), list[EventSpan]()

    @property
    def next(self) -> PipeEvent | None:
        return self.events[self.place] if self.place < len(self.events) else None

    def compute(self, event: PipeEvent) -> None:
        cost = self.costs[event.chunk]
        seconds = {
            "forward": cost.forward,
            "backward": cost.backward,
            "backward_input": cost.backward * (1 - cost.weight_share),
            "backward_weight": cost.backward * cost.weight_share,
        }[event.kind]
        self.spans.append(EventSpan(event, self.now, self.now + seconds))
        self.now += seconds
        self.stored += _stores(event, cost) if self.trains else 0
        self.most_stored = max(self.most_stored, self.stored)


def _stores(event: PipeEvent, cost: LayerCost) -> int:
    """The bytes that an event stores, or releases; `W` needs what the forward stored."""
    return cost.stored_nbytes * (
        (event.kind == "forward") - (event.kind in ("backward", "backward_weight"))
    )
