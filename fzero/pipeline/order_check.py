"""The checker of pipeline orders: proves, without running anything, that an order
cannot hang and does what it declares.

`check_order` states its rules. `plan_order` makes an order: it calls the function, adds
sends and receives, and checks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from fzero.pipeline.orders import (
    COMPUTE,
    TRANSFERS,
    Events,
    Order,
    OrderError,
    PipeEvent,
    PipeOrder,
    named_order,
    needs,
    receive_of,
    sends,
    with_transfers,
)


def plan_order(order: Order | str, stages: int, micro_batches: int) -> PipeOrder:
    """The checked order of a pipeline, with sends and receives.

    Args:
        order: a name ("gpipe", "1f1b", "zero_bubble", "interleaved:2"), one of fzero's
            orders, or your own function of the numbers of stages and micro-batches. It
            returns the events of each stage: F, B, I and W alone, or sends and receives
            too. The stage whose events name a chunk holds it.
        stages: p.
        micro_batches: m, of one step on one data rank.

    Raises:
        OrderError: the order is wrong; the message names the stage, the event and the
            rule.

    >>> from fzero.pipeline.orders import B, F
    >>> def mine(stages, micro_batches):
    ...     return [[make(i, stage) for make in (F, B) for i in range(micro_batches)] for stage in range(stages)]
    >>> print(plan_order(mine, 2, 2))
    mine, 2 stages, 2 micro-batches
    stage 0, 2 in flight: F0 F1 B0 B1
    stage 1, 2 in flight: F0 F1 B0 B1
    >>> plan_order(lambda stages, micro_batches: [[F(0), B(0)], [F(0, 1)]], 2, 1)
    Traceback (most recent call last):
    fzero.pipeline.orders.OrderError: order '<lambda>', stage 0: backward 0 needs the gradient that chunk 1 makes of \
micro-batch 0, which stage 1 does not compute; give that stage its event
    """
    function = named_order(order) if isinstance(order, str) else order
    if not callable(function):
        raise OrderError(
            f"order: must be a name or a function (stages, micro_batches) -> events, got "
            f"{type(order).__name__}; "
            "pass the function, such as one_f_one_b"
        )
    made = function(stages, micro_batches)
    name = getattr(function, "__name__", type(function).__name__)
    planned = made if isinstance(made, PipeOrder) else order_of(name, micro_batches, made)
    if (planned.stages, planned.micro_batches) != (stages, micro_batches):
        raise OrderError(
            f"order {planned.name!r}: must have events for {stages} stages and {micro_batches} "
            f"micro-batches, as asked, got {planned.stages} and {planned.micro_batches}; use both "
            f"arguments of the function"
        )
    check_order(planned)
    return planned


def order_of(name: str, micro_batches: int, events: Events) -> PipeOrder:
    """The order of given events: chunks are where their events are; sends and receives
    are added, and in flight is counted.
    """
    for stage, own in enumerate(events):
        for event in own:
            if not isinstance(event, PipeEvent) or event.kind not in (*COMPUTE, *TRANSFERS):
                raise OrderError(
                    f"order {name!r}, stage {stage}: every event must be one of "
                    f"{', '.join((*COMPUTE, *TRANSFERS))}, got {event!r}; make them with F, B, I "
                    f"and W of fzero.pipeline"
                )
    holders = defaultdict[int, set[int]](set)
    for stage, own in enumerate(events):
        for event in own:
            holders[event.chunk].add(stage)
    for chunk in range(max(holders, default=-1) + 1):
        if len(holders[chunk]) != 1:
            raise OrderError(
                f"order {name!r}: every chunk must be on one stage, but chunk {chunk} is on "
                f"{sorted(holders[chunk]) or 'none'}; "
                "give each event the chunk that its stage holds, such as F(micro_batch, stage)"
            )
    stage_of = tuple(min(holders[chunk]) for chunk in range(len(holders)))
    counted = [_Stage(name, stage).count(own) for stage, own in enumerate(events)]
    in_flight, waiting = tuple(most for most, _ in counted), tuple(most for _, most in counted)
    return PipeOrder(
        name, micro_batches, stage_of, with_transfers(name, events, stage_of), in_flight, waiting
    )


def check_order(order: PipeOrder) -> None:
    """Raises unless an order can run and does what it declares.

    1. Every micro-batch meets every chunk once: one F, and one B, or one I and then one
      W, on the stage that holds the chunk.
    2. A stage has an input, or a gradient, before it uses it: made on the same stage
       before, or received once. It sends what it has made, once, to the stage that
       needs it.
    3. From each stage to each other one, messages are received in the order in which
      they are sent.
    4. The stages' events, in their order, depend on each other without a cycle: no
      stage waits for ever.
    5. Forwards in flight, and `I` without their `W`, stay within what the order
      declares.

    Args:
        order: with its sends and receives.

    Raises:
        OrderError: a rule is broken; the message names the order, the stage, the event
            and the rule.
    """
    for stage, events in enumerate(order.events):
        _check_micro_batches(order, stage, events)
        most, waiting = _Stage(order.name, stage, order.stage_of).count(events)
        for found, declared, what in (
            (most, order.in_flight[stage], "forwards in flight"),
            (waiting, order.waiting[stage], "backward_input without their backward_weight"),
        ):
            if order.has_backward and found > declared:
                raise OrderError(
                    f"{_at(order.name, stage)}: must have at most {declared} {what}, as declared, "
                    f"got {found}; declare {found}, or run backwards earlier"
                )
    _check_pairs(order)
    _check_progress(order)


def adds_in_order(order: PipeOrder) -> bool:
    """Whether each chunk adds its weights' gradients in the order of micro-batches:
    sums have the same bits in all such orders.

    >>> from fzero.pipeline.orders import gpipe
    >>> adds_in_order(gpipe(2, 3))
    True
    """
    added = defaultdict[int, list[int]](list)
    for stage in range(order.stages):
        for event in order.compute(stage):
            if event.kind in ("backward", "backward_weight"):
                added[event.chunk].append(event.micro_batch)
    return all(micro_batches == sorted(micro_batches) for micro_batches in added.values())


def _at(name: str, stage: int) -> str:
    return f"order {name!r}, stage {stage}"


def _check_micro_batches(order: PipeOrder, stage: int, events: Iterable[PipeEvent]) -> None:
    """Rule 1, without the order on the stage."""
    counts = Counter(event for event in events if event.kind in COMPUTE)
    pairs = [(i, chunk) for chunk in order.chunks_of(stage) for i in range(order.micro_batches)]
    expected = Counter[PipeEvent]()
    for i, chunk in pairs:
        expected[PipeEvent("forward", i, chunk)] = 1
        if order.has_backward:
            halves = [PipeEvent("backward_input", i, chunk), PipeEvent("backward_weight", i, chunk)]
            expected.update(
                halves if any(map(counts.get, halves)) else [PipeEvent("backward", i, chunk)]
            )
    for problem, events_ in (
        ("is missing", expected - counts),
        ("is one too many", counts - expected),
    ):
        if first := min(events_, default=None, key=lambda event: (event.micro_batch, event.chunk)):
            rule = (
                "every micro-batch must run forward once on each chunk of the stage"
                if first.kind == "forward"
                else (
                    "every forward must have one backward, or one backward_input and one "
                    "backward_weight"
                )
            )
            raise OrderError(f"{_at(order.name, stage)}: {rule}, but {first} {problem}")


@dataclass(slots=True)
class _Stage:
    """One stage while its events are followed: rule 2, if `stage_of` is given, and the
    counts of rule 5.
    """

    name: str
    stage: int
    stage_of: Sequence[int] | None = None
    done: set[PipeEvent] = field(default_factory=set)

    def count(self, events: Iterable[PipeEvent]) -> tuple[int, int]:
        """The most forwards in flight, and the most `I` without their `W`."""
        in_flight = waiting = most_in_flight = most_waiting = 0
        owed = list[PipeEvent]()
        for index, event in enumerate(events):
            if self.stage_of is not None:
                self.check(index, event, owed)
            self.done.add(event)
            in_flight += (event.kind == "forward") - (event.kind in ("backward", "backward_input"))
            waiting += (event.kind == "backward_input") - (event.kind == "backward_weight")
            most_in_flight, most_waiting = (
                max(most_in_flight, in_flight),
                max(most_waiting, waiting),
            )
        return most_in_flight, most_waiting

    def check(self, index: int, event: PipeEvent, owed: list[PipeEvent]) -> None:
        assert self.stage_of is not None
        kind, micro_batch, chunk = event
        where = f"{_at(self.name, self.stage)}, event {index} ({event})"
        if kind in TRANSFERS:
            if kind.startswith("send"):
                if event not in owed:
                    raise OrderError(
                        f"{where}: must send what the stage has made and another stage needs, got "
                        f"it before that"
                    )
                owed.remove(event)
            return
        first = {
            "backward": "forward",
            "backward_input": "forward",
            "backward_weight": "backward_input",
        }.get(kind)
        if first and PipeEvent(first, micro_batch, chunk) not in self.done:  # type: ignore[arg-type]
            raise OrderError(
                f"{where}: must be after {first} {micro_batch}, got it before; move it"
            )
        for needed in made_here(event, self.stage, self.stage_of):
            if not any(one in self.done for one in needed):
                raise OrderError(f"{where}: must be after {needed[0]}, got it before; move it")
        for receive, there in needs(event, self.stage, self.stage_of):
            if receive not in self.done:
                raise OrderError(
                    f"{where}: must be after {receive} from stage {there}, got it before, or no "
                    f"such event; add it"
                )
        owed.extend(sends(event, self.stage, self.stage_of))


def made_here(
    event: PipeEvent, stage: int, stage_of: Sequence[int]
) -> Iterable[tuple[PipeEvent, ...]]:
    """The events of a neighbouring chunk on the same stage that an event needs: one of
    each tuple.
    """
    kind, micro_batch, chunk = event
    if kind == "forward" and chunk > 0 and stage_of[chunk - 1] == stage:
        yield (PipeEvent("forward", micro_batch, chunk - 1),)
    if (
        kind in ("backward", "backward_input")
        and chunk + 1 < len(stage_of)
        and stage_of[chunk + 1] == stage
    ):
        yield (
            PipeEvent("backward", micro_batch, chunk + 1),
            PipeEvent("backward_input", micro_batch, chunk + 1),
        )


def _check_pairs(order: PipeOrder) -> None:
    """Rule 3."""
    sent, received = (defaultdict[tuple[int, int], list[PipeEvent]](list) for _ in range(2))
    for stage, events in enumerate(order.events):
        for event in events:
            if event.kind.startswith("send"):
                there, receive = receive_of(event, order.stage_of)
                sent[stage, there].append(receive)
            elif event.kind.startswith("receive"):
                received[order.peer(event), stage].append(event)
    for pair in sorted({*sent, *received}):
        for number, (one, two) in enumerate(zip_longest(sent[pair], received[pair])):
            if one != two:
                names = ["missing" if event is None else f"'{event}'" for event in (one, two)]
                raise OrderError(
                    f"order {order.name!r}: stage {pair[1]} must receive from stage {pair[0]} in "
                    f"the order in which that sends, but message {number} is {names[0]} as it is "
                    f"sent and {names[1]} as it is received; move the receive"
                )


def _check_progress(order: PipeOrder) -> None:
    """Rule 4: every stage runs until it must wait; if all wait, they wait for ever."""
    place, sent = [0] * order.stages, set[PipeEvent]()
    has_moved = True
    while has_moved:
        has_moved = False
        for stage, events in enumerate(order.events):
            while place[stage] < len(events):
                event = events[place[stage]]
                if event.kind.startswith("receive") and event not in sent:
                    break
                if event.kind.startswith("send"):
                    sent.add(receive_of(event, order.stage_of)[1])
                place[stage] += 1
                has_moved = True
    stuck = [
        f"stage {stage} at event {place[stage]} ({events[place[stage]]}, from stage "
        f"{order.peer(events[place[stage]])})"
        for stage, events in enumerate(order.events)
        if place[stage] < len(events)
    ]
    if stuck:
        raise OrderError(
            f"order {order.name!r}: stages must not wait for each other in a circle, but they do: "
            f"{'; '.join(stuck)}"
        )
