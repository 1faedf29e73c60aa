"""Orders of a pipeline as values: which micro-batch each stage computes when, and what
it sends and receives in between.

Layers are cut into chunks; a stage (a coordinate on the mesh axis `pipe`) holds one
chunk, or several if the order is interleaved. An order is a tuple of `PipeEvent`s for
each stage:

| kind | short | what happens to a micro-batch |
| --- | --- | --- |
| forward | F | the chunk's forward; its activations are stored |
| backward | B | the gradients of the chunk's input and of its weights; the activations are released |
| backward_input | I | the first half of B: the gradients of the input, which the stage before waits for |
| backward_weight | W | the second half of B: the gradients of the weights, for which no stage waits |
| send_output | | the chunk's output starts on its way to the stage of the next chunk |
| receive_input | | the chunk's input is waited for, from the stage of the chunk before |
| send_gradient | | the gradient of the chunk's input starts on its way to the stage of the chunk before |
| receive_gradient | | the gradient of the chunk's output is waited for, from the stage of the next chunk |

Between these events a stage gathers and reduces its units, whose events are of another
type (`fzero.plans.unit_orders`). A send does not wait for its receive. From one stage
to another, messages are received in the order in which they are sent; so they need no
tags. Two neighbours on one stage send each other nothing.

1. An order is a function of the numbers of stages and micro-batches. It returns a
  `PipeOrder`, or F, B, I and W of each stage.
2. `plan_order` calls the function, adds the sends and receives, and proves the result
  (`fzero.pipeline.order_check`).
3. The runtime executes the value; `fzero.pipeline.timeline` predicts its seconds and
  its memory.

GPipe: arXiv:1811.06965; 1F1B: PipeDream-Flush, arXiv:2006.09503; interleaved:
arXiv:2104.04473, section 2.2; zero bubble: ZB-H1 of arXiv:2401.10241. p is the number
of stages, s a stage, m the number of micro-batches, v the chunks of each stage.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from sharding.checks import check_at_least

COMPUTE = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
"""The kinds of events that compute, with their short names."""

TRANSFERS = ("send_output", "receive_input", "send_gradient", "receive_gradient")


class PipeEvent(NamedTuple):
    """Something that happens to a micro-batch on a chunk of layers; the module has a
    table of the kinds.

    >>> print(PipeEvent("send_output", 3), PipeEvent("backward", 3, chunk=1), sep=", ")
    send_output 3, backward 3 of chunk 1
    """

    kind: Literal[
        "forward", "backward", "backward_input", "backward_weight",
        "send_output", "receive_input", "send_gradient", "receive_gradient",
    ]  # fmt: skip
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.micro_batch}" + (f" of chunk {self.chunk}" if self.chunk else "")


class OrderError(ValueError):
    """An order of a pipeline that cannot run, or does not do what it declares."""


def F(micro_batch: int, chunk: int = 0) -> PipeEvent:
    """The forward of a micro-batch.

    >>> print(F(2), B(2), I(2, 1), W(2, 1), sep=", ")
    forward 2, backward 2, backward_input 2 of chunk 1, backward_weight 2 of chunk 1
    """
    return PipeEvent("forward", micro_batch, chunk)


def B(micro_batch: int, chunk: int = 0) -> PipeEvent:
    """The whole backward of a micro-batch."""
    return PipeEvent("backward", micro_batch, chunk)


def I(micro_batch: int, chunk: int = 0) -> PipeEvent:  # noqa: E743
    """The backward of a micro-batch to the input of the chunk; `W` is the rest."""
    return PipeEvent("backward_input", micro_batch, chunk)


def W(micro_batch: int, chunk: int = 0) -> PipeEvent:
    """The backward of a micro-batch to the weights of the chunk, after `I`."""
    return PipeEvent("backward_weight", micro_batch, chunk)


@dataclass(frozen=True, slots=True)
class PipeOrder:
    """The events of every stage, and what the order declares; `check_order` proves it.

    Args:
        name: for messages and pictures.
        micro_batches: m.
        stage_of: the stage that holds each chunk, by chunk.
        events: by stage, in the order of execution.
        in_flight: by stage, the most forwards whose backward (or `I`) has not run: so
            many activations are stored.
        waiting: by stage, the most `I` whose `W` has not run; zeros unless backwards
            are cut.

    >>> print(one_f_one_b(2, 3))
    1F1B, 2 stages, 3 micro-batches
    stage 0, 2 in flight: F0 F1 B0 F2 B1 B2
    stage 1, 1 in flight: F0 B0 F1 B1 F2 B2
    """

    name: str
    micro_batches: int
    stage_of: tuple[int, ...]
    events: tuple[tuple[PipeEvent, ...], ...]
    in_flight: tuple[int, ...]
    waiting: tuple[int, ...] = field(default=())
    has_backward: bool = field(init=False, repr=False, compare=False)
    """Whether the order trains, or only evaluates."""

    def __post_init__(self) -> None:
        has_backward = any(event.kind.startswith("backward") for event in self.events[0])
        object.__setattr__(self, "has_backward", has_backward)
        if not self.waiting:
            object.__setattr__(self, "waiting", (0,) * self.stages)

    @property
    def stages(self) -> int:
        """The number of stages p."""
        return len(self.events)

    @property
    def num_chunks(self) -> int:
        """The number of chunks that layers are cut into."""
        return len(self.stage_of)

    @property
    def is_cut(self) -> bool:
        """Whether any backward is cut into `I` and `W`."""
        return any(event.kind == "backward_weight" for events in self.events for event in events)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that a stage holds.

        >>> interleaved(2)(2, 4).chunks_of(1)
        (1, 3)
        """
        return tuple(chunk for chunk, holder in enumerate(self.stage_of) if holder == stage)

    def compute(self, stage: int) -> tuple[PipeEvent, ...]:
        """The events of a stage without its sends and receives."""
        return tuple(event for event in self.events[stage] if event.kind in COMPUTE)

    def peer(self, event: PipeEvent) -> int:
        """The stage at the other end of a send or receive."""
        is_upward = event.kind in ("send_output", "receive_gradient")
        return self.stage_of[event.chunk + (1 if is_upward else -1)]

    def __str__(self) -> str:
        lines = [
            f"{self.name}, {_count(self.stages, 'stage')}, "
            f"{_count(self.micro_batches, 'micro-batch')}"
        ]
        for stage, most in enumerate(self.in_flight):
            words = " ".join(
                short(event, of_chunk=self.num_chunks > self.stages)
                for event in self.compute(stage)
            )
            lines.append(f"stage {stage}, {most} in flight: {words}")
        return "\n".join(lines)


Events: TypeAlias = Sequence[Sequence[PipeEvent]]

Order: TypeAlias = Callable[[int, int], "PipeOrder | Events"]
"""A function of the numbers of stages and micro-batches; see `plan_order`."""


def short(event: PipeEvent, *, of_chunk: bool = False) -> str:
    """The short name of an event that computes: `F3`, or `F3.1` with its chunk."""
    return f"{COMPUTE[event.kind]}{event.micro_batch}" + (f".{event.chunk}" if of_chunk else "")


def gpipe(stages: int, micro_batches: int) -> PipeOrder:
    """All forwards, then all backwards: m activations in flight on every stage.

    >>> print(gpipe(2, 2))
    GPipe, 2 stages, 2 micro-batches
    stage 0, 2 in flight: F0 F1 B0 B1
    stage 1, 2 in flight: F0 F1 B0 B1
    """
    _check(stages, micro_batches)
    events = [
        [make(i, stage) for make in (F, B) for i in range(micro_batches)] for stage in range(stages)
    ]
    return _order("GPipe", micro_batches, events, in_flight=[micro_batches] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> PipeOrder:
    """One forward, one backward: stage s has at most min(p - s, m) activations in
    flight. The default, and DeepSpeed's order.

    At equal ticks, F of micro-batch i is at tick s + 2i and its B at tick 2p - 1 - s +
    2i, which fzero sorts (`tick`).

    >>> print(one_f_one_b(4, 2))
    1F1B, 4 stages, 2 micro-batches
    stage 0, 2 in flight: F0 F1 B0 B1
    stage 1, 2 in flight: F0 F1 B0 B1
    stage 2, 2 in flight: F0 F1 B0 B1
    stage 3, 1 in flight: F0 B0 F1 B1
    """
    _check(stages, micro_batches)
    events = [
        sorted(
            (make(i, stage) for i in range(micro_batches) for make in (F, B)),
            key=lambda event: tick(event, stages),
        )
        for stage in range(stages)
    ]
    return _order(
        "1F1B",
        micro_batches,
        events,
        in_flight=[min(stages - s, micro_batches) for s in range(stages)],
    )


def tick(event: PipeEvent, stages: int) -> int:
    """The tick at which DeepSpeed's training schedule has an F or B; there are 2(m +
    p - 1) ticks.

    >>> [tick(event, 4) for event in (F(0, 1), B(0, 1), F(3, 1))]
    [1, 6, 7]
    """
    start = event.chunk if event.kind == "forward" else 2 * stages - 1 - event.chunk
    return start + 2 * event.micro_batch


def interleaved(num_chunks: int) -> Callable[[int, int], PipeOrder]:
    """Each stage holds v chunks: chunk c is on stage c mod p. The bubble is 1/v of
    1F1B's, for v times the messages.

    Micro-batches go in max(1, m // p) rounds of about equal size, and a round goes
    through all chunks of a stage in turn. Stage s begins with 2(p - s - 1) + (v - 1) ·
    (first round) forwards, then alternates.

    Args:
        num_chunks: v, the chunks of each stage; with one it is `one_f_one_b`.

    >>> print(interleaved(2)(2, 2))
    interleaved by 2, 2 stages, 2 micro-batches
    stage 0, 4 in flight: F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0
    stage 1, 3 in flight: F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1
    """
    check_at_least("interleaved", "num_chunks", num_chunks, 1)
    if num_chunks == 1:
        return one_f_one_b

    def order(stages: int, micro_batches: int) -> PipeOrder:
        _check(stages, micro_batches)
        rounds = _rounds(micro_batches, max(1, micro_batches // stages))
        events, in_flight = [], []
        for stage in range(stages):
            chunks = range(stage, stages * num_chunks, stages)
            forwards = [F(i, chunk) for part in rounds for chunk in chunks for i in part]
            backwards = [B(i, chunk) for part in rounds for chunk in reversed(chunks) for i in part]
            ahead = min(
                2 * (stages - stage - 1) + (num_chunks - 1) * len(rounds[0]) + 1, len(forwards)
            )
            events.append(_merge(forwards, [(backward,) for backward in backwards], ahead))
            in_flight.append(ahead)
        return _order(f"interleaved by {num_chunks}", micro_batches, events, in_flight=in_flight)

    return order


def zero_bubble(stages: int, micro_batches: int) -> PipeOrder:
    """1F1B with cut backwards, ZB-H1: `W` fills the time in which a stage would wait.
    As many activations in flight as 1F1B.

    Stage s runs `W` s micro-batches behind `I`, so it keeps what at most s + 1 `W`
    need. At equal times of F, I and W, the bubble is a third of 1F1B's.

    >>> print(zero_bubble(2, 3))
    zero bubble, 2 stages, 3 micro-batches
    stage 0, 2 in flight: F0 F1 I0 W0 F2 I1 W1 I2 W2
    stage 1, 1 in flight: F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    _check(stages, micro_batches)
    events = []
    for stage in range(stages):
        backwards = [
            (I(i, stage), *((W(i - stage, stage),) if i >= stage else ()))
            for i in range(micro_batches)
        ]
        rest = range(max(0, micro_batches - stage), micro_batches)
        forwards = [F(i, stage) for i in range(micro_batches)]
        merged = _merge(forwards, backwards, min(stages - stage, micro_batches))
        events.append([*merged, *(W(i, stage) for i in rest)])
    return _order(
        "zero bubble",
        micro_batches,
        events,
        in_flight=[min(stages - s, micro_batches) for s in range(stages)],
        waiting=[min(s + 1, micro_batches) for s in range(stages)],
    )


def forward_only(stages: int, micro_batches: int) -> PipeOrder:
    """The order of an evaluation: forwards, of which none is stored.

    >>> print(forward_only(2, 2))
    forward only, 2 stages, 2 micro-batches
    stage 0, 0 in flight: F0 F1
    stage 1, 0 in flight: F0 F1
    """
    _check(stages, micro_batches)
    events = [[F(i, stage) for i in range(micro_batches)] for stage in range(stages)]
    return _order("forward only", micro_batches, events, in_flight=[0] * stages)


ORDERS: dict[str, Order] = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}
"""The orders by name; `named_order` also knows `interleaved:v`."""


def named_order(name: str) -> Order:
    """The order of a name.

    >>> named_order("interleaved:2")(1, 1).name
    'interleaved by 2'
    """
    known = name.lower().replace("-", "_")
    if known in ORDERS:
        return ORDERS[known]
    kind, _, number = known.partition(":")
    if kind == "interleaved" and number.isdigit() and int(number):
        return interleaved(int(number))
    names = ", ".join(map(repr, ORDERS))
    raise OrderError(
        f"order: must be one of {names}, 'interleaved:2' (or more) or a function, got {name!r}; "
        f"pass one of these"
    )


# --- sends and receives ---------------------------------------------------------------------------


def with_transfers(
    name: str, events: Events, stage_of: Sequence[int]
) -> tuple[tuple[PipeEvent, ...], ...]:
    """The events of stages with the sends and receives that they need, if they have
    none.

    A send follows the event that makes its message. A receive stands right before the
    first event that needs its message or one that the same stage sends later.

    >>> for stage in with_transfers("mine", [[F(0), B(0)], [F(0, 1), B(0, 1)]], (0, 1)):
    ...     print(*stage, sep=", ")
    forward 0, send_output 0, receive_gradient 0, backward 0
    receive_input 0 of chunk 1, forward 0 of chunk 1, backward 0 of chunk 1, send_gradient 0 of chunk 1
    """
    if any(event.kind in TRANSFERS for stage in events for event in stage):
        return tuple(map(tuple, events))
    sent = defaultdict[tuple[int, int], deque[PipeEvent]](
        deque
    )  # (source, target) -> receive events, in the order of sending
    for stage, own in enumerate(events):
        for event in own:
            for send in sends(event, stage, stage_of):
                there, receive = receive_of(send, stage_of)
                sent[stage, there].append(receive)
    return tuple(
        tuple(_with_own_transfers(name, stage, own, stage_of, sent))
        for stage, own in enumerate(events)
    )


def _with_own_transfers(
    name: str,
    stage: int,
    events: Iterable[PipeEvent],
    stage_of: Sequence[int],
    sent: dict[tuple[int, int], deque[PipeEvent]],
) -> Iterator[PipeEvent]:
    received = set[PipeEvent]()
    for event in events:
        for receive, there in needs(event, stage, stage_of):
            arriving = sent[there, stage]
            while receive not in received:
                if not arriving:
                    is_input = receive.kind == "receive_input"
                    what = (
                        f"{'output' if is_input else 'gradient'} that chunk "
                        f"{receive.chunk + (-1 if is_input else 1)} makes"
                    )
                    raise OrderError(
                        f"order {name!r}, stage {stage}: {event} needs the {what} of micro-batch "
                        f"{event.micro_batch}, which stage {there} does not compute; give that "
                        f"stage its event"
                    )
                received.add(arriving[0])
                yield arriving.popleft()
        yield event
        yield from sends(event, stage, stage_of)


def needs(event: PipeEvent, stage: int, stage_of: Sequence[int]) -> Iterator[tuple[PipeEvent, int]]:
    """The receive that must precede an event, and the stage that the message comes
    from; none if it is made on the same stage.
    """
    kind, micro_batch, chunk = event
    if kind == "forward" and chunk > 0 and stage_of[chunk - 1] != stage:
        yield PipeEvent("receive_input", micro_batch, chunk), stage_of[chunk - 1]
    if (
        kind in ("backward", "backward_input")
        and chunk + 1 < len(stage_of)
        and stage_of[chunk + 1] != stage
    ):
        yield PipeEvent("receive_gradient", micro_batch, chunk), stage_of[chunk + 1]


def sends(event: PipeEvent, stage: int, stage_of: Sequence[int]) -> Iterator[PipeEvent]:
    """The send of what an event makes; none if it is needed on the same stage, or by
    none.
    """
    kind, micro_batch, chunk = event
    if kind == "forward" and chunk + 1 < len(stage_of) and stage_of[chunk + 1] != stage:
        yield PipeEvent("send_output", micro_batch, chunk)
    if kind in ("backward", "backward_input") and chunk > 0 and stage_of[chunk - 1] != stage:
        yield PipeEvent("send_gradient", micro_batch, chunk)


def receive_of(send: PipeEvent, stage_of: Sequence[int]) -> tuple[int, PipeEvent]:
    """The receiving stage of a send, and the event that receives it there."""
    if send.kind == "send_output":
        return stage_of[send.chunk + 1], PipeEvent(
            "receive_input", send.micro_batch, send.chunk + 1
        )
    return stage_of[send.chunk - 1], PipeEvent("receive_gradient", send.micro_batch, send.chunk - 1)


# --- parts ----------------------------------------------------------------------------------------


def _check(stages: int, micro_batches: int) -> None:
    check_at_least("order", "stages", stages, 1)
    check_at_least("order", "micro_batches", micro_batches, 1)


def _merge(
    forwards: Sequence[PipeEvent], backwards: Sequence[tuple[PipeEvent, ...]], ahead: int
) -> list[PipeEvent]:
    """`ahead` forwards, then one backward and one forward in turn, while there are any."""
    events = list(forwards[:ahead])
    for number, parts in enumerate(backwards):
        events += parts
        events += forwards[ahead + number : ahead + number + 1]
    return events


def _rounds(micro_batches: int, num_rounds: int) -> list[range]:
    """The micro-batches in rounds of about equal size, larger ones first.

    >>> _rounds(9, 2)
    [range(0, 5), range(5, 9)]
    """
    size, larger = divmod(micro_batches, num_rounds)
    starts = [number * size + min(number, larger) for number in range(num_rounds + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _order(
    name: str,
    micro_batches: int,
    events: Events,
    *,
    in_flight: Sequence[int],
    waiting: Sequence[int] = (),
) -> PipeOrder:
    num_chunks = 1 + max(event.chunk for stage in events for event in stage)
    stage_of = tuple(chunk % len(events) for chunk in range(num_chunks))
    return PipeOrder(
        name,
        micro_batches,
        stage_of,
        with_transfers(name, events, stage_of),
        tuple(in_flight),
        tuple(waiting),
    )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
