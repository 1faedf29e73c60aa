"""`Program`: what runs the forwards and backwards of a step. `Eager` runs them one
after the other, as Python does.

| program | where | runs |
| --- | --- | --- |
| `Eager` | `fzero.runtime.phases` | each micro-batch by `forward` and `backward` |
| `GraphProgram` | `fzero.graph.program` | a captured graph; with `stacked`, one for all ranks at once |
| `PipelineProgram` | `fzero.pipeline.execution` | the forwards and backwards of one pipeline stage, in its order |

All end alike (`fzero.step.end`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from torch import Tensor

from fzero.comms.records import CommRecord
from fzero.runtime.finish import Collected
from fzero.state import TrainState

if TYPE_CHECKING:
    from fzero.runtime.step_runtime import StepRuntime

State = TrainState[Tensor]


class Program(Protocol):
    """Runs the forwards and backwards of a step. All of its methods but the last two
    are collective: every rank calls them.
    """

    is_graph: ClassVar[bool]
    """Whether it runs captured graphs, which hold the present optimizers."""

    def split(self, run: StepRuntime, state: State, batch: Any, /) -> list[Any]:
        """This rank's micro-batches of a batch, or of an iterator."""
        ...

    def __call__(self, run: StepRuntime, state: State, micro_batches: list[Any], /) -> Collected:
        """The gradients of a step on these micro-batches; a program may make its
        update, too.
        """
        ...

    def evaluate(self, run: StepRuntime, state: State, batch: Any, /) -> Tensor:
        """The mean loss over ranks, in evaluation mode, without gradients."""
        ...

    def following(self, run: StepRuntime, /) -> Self:
        """The same program for a runtime with other optimizers."""
        ...

    def observed(self, observe: Callable[[CommRecord], None], /) -> Self:
        """The same program, whose collectives are also reported to `observe`."""
        ...
