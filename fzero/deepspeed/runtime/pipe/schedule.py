"""`deepspeed.runtime.pipe.schedule`: DeepSpeed's schedules as lists of instructions for
each tick.

They are for scripts that look at them; fzero executes orders (`fzero.pipeline.orders`),
from which these lists are made: an event is an instruction at its tick, and what a
stage sends leaves one tick after it was computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from fzero.pipeline.orders import B, F, PipeEvent, PipeOrder, forward_only, one_f_one_b, tick


class PipeInstruction:
    """An instruction; its arguments are its attributes.

    >>> LoadMicroBatch(1), ReduceGrads()
    (LoadMicroBatch(buffer_id=1), ReduceGrads())
    """

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """The update."""


class ReduceGrads(PipeInstruction):
    """The reduction of gradients over the data ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """The sum of the gradients of tied weights over the stages that hold them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for the buffer of one micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """The next item of the iterator."""


class ForwardPass(BufferOpInstruction):
    """The forward."""


class BackwardPass(BufferOpInstruction):
    """The backward."""


class SendActivation(BufferOpInstruction):
    """The output goes to the next stage."""


class RecvActivation(BufferOpInstruction):
    """The input comes from the stage before."""


class SendGrad(BufferOpInstruction):
    """The gradient of the input goes to the stage before."""


class RecvGrad(BufferOpInstruction):
    """The gradient of the output comes from the next stage."""


_MADE: dict[str, type[BufferOpInstruction]] = {
    "load": LoadMicroBatch,
    "forward": ForwardPass,
    "backward": BackwardPass,
    "send_output": SendActivation,
    "receive_input": RecvActivation,
    "send_gradient": SendGrad,
    "receive_gradient": RecvGrad,
}
"""The instruction of each kind of event; `load` comes before a forward of the first and
the last stage.
"""


class PipeSchedule(ABC):
    """The instructions of one stage, a list for each tick.

    Args:
        micro_batches: m.
        stages: p.
        stage_id: this stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._steps: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each tick."""

    def num_pipe_buffers(self) -> int:
        """How many micro-batches need a buffer at one time."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """This stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether the inputs go to this stage."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the labels go to this stage."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def _ticks(
        self,
        order: PipeOrder,
        at: Callable[[PipeEvent], int],
        buffer: Callable[[int], int],
        kinds: tuple[str, ...],
    ) -> list[list[PipeInstruction]]:
        """The instructions of this stage in an order by tick, each tick's in the order
        of `kinds`.
        """
        num_ticks = (2 if order.has_backward else 1) * (self.micro_batches + self.stages - 1)
        ticks: list[list[tuple[str, int]]] = [[] for _ in range(num_ticks)]
        for event in order.events[self.stage_id]:
            ticks[at(event) + event.kind.startswith("send")].append((event.kind, event.micro_batch))
            if event.kind == "forward" and (self.is_first_stage or self.is_last_stage):
                ticks[at(event)].append(("load", event.micro_batch))
        return [
            [_MADE[kind](buffer(i)) for kind, i in sorted(now, key=lambda one: kinds.index(one[0]))]
            for now in ticks
        ]

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        self._steps = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._steps is None:
            self._steps = self.steps()
        return next(self._steps)


class TrainSchedule(PipeSchedule):
    """1F1B.

    >>> for commands in TrainSchedule(micro_batches=1, stages=2, stage_id=0):
    ...     print(*commands)
    LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)
    SendActivation(buffer_id=0)
    <BLANKLINE>
    RecvGrad(buffer_id=0) BackwardPass(buffer_id=0) ReduceTiedGrads() ReduceGrads() OptimizerStep()
    """

    def num_pipe_buffers(self) -> int:
        """The most forwards in flight, and at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of 2(m + p - 1) ticks."""
        kinds = (
            "send_gradient",
            "receive_gradient",
            "receive_input",
            "send_output",
            "load",
            "forward",
            "backward",
        )

        def at(event: PipeEvent) -> int:
            is_forward = event.kind in ("forward", "receive_input", "send_output")
            return tick((F if is_forward else B)(event.micro_batch, self.stage_id), self.stages)

        *ticks, last = self._ticks(
            one_f_one_b(self.stages, self.micro_batches), at, self._buffer_idx, kinds
        )
        yield from ticks
        yield [*last, ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class InferenceSchedule(PipeSchedule):
    """Forwards only: micro-batch i is on stage s at tick s + i.

    >>> for commands in InferenceSchedule(micro_batches=1, stages=2, stage_id=1):
    ...     print(*commands)
    <BLANKLINE>
    LoadMicroBatch(buffer_id=0) RecvActivation(buffer_id=0) ForwardPass(buffer_id=0)
    """

    def num_pipe_buffers(self) -> int:
        """Two, of which one is received into while the other one is sent."""
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of m + p - 1 ticks; neighbours send and receive in opposite
        order.
        """
        is_even = self.stage_id % 2 == 0
        messages = ("send_output", "receive_input") if is_even else ("receive_input", "send_output")
        yield from self._ticks(
            forward_only(self.stages, self.micro_batches),
            lambda event: self.stage_id + event.micro_batch,
            lambda micro_batch: (self.stage_id + micro_batch + (not is_even)) % 2,
            ("load", *messages, "forward"),
        )


class DataParallelSchedule(PipeSchedule):
    """Gradient accumulation without stages."""

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each micro-batch."""
        for number in range(self.micro_batches):
            is_last = number == self.micro_batches - 1
            after = [ReduceGrads(), OptimizerStep()] if is_last else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *after]


__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]
