"""`deepspeed.runtime.pipe.schedule`: DeepSpeed's schedules as lists of instructions for each tick.

They are for scripts that look at them; fzero executes orders (`fzero.pipeline.orders`). The ticks are those of `one_f_one_b` in
closed form: stage s of p runs forward i at tick s + 2i, and backward i at tick 2p - 1 - s + 2i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


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

    def _at(self, tick: int) -> tuple[bool, int]:
        """Whether the tick is for a forward, and of which micro-batch; there may be none of this number."""
        is_forward = (tick - self.stage_id) % 2 == 0
        start = self.stage_id if is_forward else 2 * self.stages - 1 - self.stage_id
        return is_forward, (tick - start) // 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of 2(m + p - 1) ticks."""
        num_ticks = 2 * (self.micro_batches + self.stages - 1)
        for tick in range(num_ticks):
            is_forward, now = self._at(tick)
            commands = self._messages(is_forward, now, self._at(tick - 1)[1] if tick else -1)
            if self._valid_micro_batch(now):
                buffer = self._buffer_idx(now)
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    commands.append(LoadMicroBatch(buffer))
                commands.append((ForwardPass if is_forward else BackwardPass)(buffer))
            if tick == num_ticks - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def _messages(self, is_forward: bool, now: int, before: int) -> list[PipeInstruction]:
        """What is sent of the tick before, and received for this one."""
        has_now, has_before = self._valid_micro_batch(now), self._valid_micro_batch(before)
        commands = list[PipeInstruction]()
        if is_forward and self._valid_stage(self.prev_stage):
            if has_before:
                commands.append(SendGrad(self._buffer_idx(before)))
            if has_now:
                commands.append(RecvActivation(self._buffer_idx(now)))
        elif not is_forward and self._valid_stage(self.next_stage):
            if has_now:
                commands.append(RecvGrad(self._buffer_idx(now)))
            if has_before:
                commands.append(SendActivation(self._buffer_idx(before)))
        return commands


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
        """The instructions of m + p - 1 ticks; neighbours send and receive in opposite order."""
        for tick in range(self.micro_batches + self.stages - 1):
            now, is_even = tick - self.stage_id, self.stage_id % 2 == 0
            received, sent = (tick + (not is_even)) % 2, (tick + is_even) % 2
            has_now = self._valid_micro_batch(now)
            sends = self._valid_stage(self.next_stage) and self._valid_micro_batch(now - 1)
            receives = self._valid_stage(self.prev_stage) and has_now
            messages: list[PipeInstruction] = [SendActivation(sent)] if sends else []
            if receives:
                messages.insert(len(messages) if is_even else 0, RecvActivation(received))
            loads = [LoadMicroBatch(received)] if has_now and (self.is_first_stage or self.is_last_stage) else []
            yield [*loads, *messages, *([ForwardPass(received)] if has_now else [])]


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
