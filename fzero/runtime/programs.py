"""`Program`: what runs the forwards and backwards of a step. `Eager` runs them one after the other, as Python does.

| program | where | runs |
| --- | --- | --- |
| `Eager` | here | each micro-batch by `forward` and `backward` of `fzero.runtime.phases` |
| `GraphProgram` | `fzero.graph.program` | a captured graph; with `stacked`, one for all ranks at once |
| `PipelineProgram` | `fzero.pipeline.execution` | the forwards and backwards of one pipeline stage, in its order |

All end alike (`fzero.step.end`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.hangs.failures import meet
from fzero.comms.records import CommRecord, Label
from fzero.model.binding import random_state
from fzero.runtime import phases
from fzero.runtime.finish import Collected
from fzero.runtime.loss import check_rows, loss_row, mean_of
from fzero.runtime.outcome import check_passes
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState

State = TrainState[Tensor]


class Program(Protocol):
    """Runs the forwards and backwards of a step. All of its methods but the last two are collective: every rank calls them."""

    is_graph: ClassVar[bool]
    """Whether it runs captured graphs, which hold the present optimizers."""

    def split(self, run: StepRuntime, state: State, batch: Any, /) -> list[Any]:
        """This rank's micro-batches of a batch, or of an iterator."""
        ...

    def __call__(self, run: StepRuntime, state: State, micro_batches: list[Any], /) -> Collected:
        """The gradients of a step on these micro-batches; a program may make its update, too."""
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


@dataclass(frozen=True, slots=True)
class Eager:
    """Runs the model on one micro-batch after the other."""

    is_graph: ClassVar[bool] = False

    def split(self, run: StepRuntime, state: State, batch: Any) -> list[Any]:
        return list(run.batches.split(batch))

    def __call__(self, run: StepRuntime, state: State, micro_batches: list[Any]) -> Collected:
        window = phases.open_window(run, state, measures_early=True)
        with random_state(state.rng, run.device) as rng, phases.bound_throughout(run, window) as window:
            for index, micro_batch in enumerate(micro_batches):
                loss, weight = phases.forward(run, window, partial(phases.loss_of_batch, run, micro_batch))
                # A mean is divided here. A sum is divided in the update, when all weights are known.
                num_parts, is_last = len(micro_batches) if weight is None else 1, index == len(micro_batches) - 1
                window = phases.backward(run, window, loss, weight=weight, num_parts=num_parts, is_last=is_last)
        return phases.collect(run, window, rng)

    def evaluate(self, run: StepRuntime, state: State, batch: Any) -> Tensor:
        def compute() -> tuple[Tensor, Tensor | None]:
            with phases.inspecting(run, state, "evaluate"):
                run.spec.model.eval()  # here, because the model's own eval() may read its tensors
                return phases.loss_of_batch(run, batch)

        return evaluated(run, state, compute)

    def following(self, run: StepRuntime) -> Self:
        return self

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        return self


def evaluated(run: StepRuntime, state: State, compute: Callable[[], tuple[Tensor, Tensor | None]]) -> Tensor:
    """The mean over ranks of the loss that `compute` returns, with its weight if it is a sum. *Collective:* every rank.

    `compute` sets evaluation mode itself; afterwards each module is in its own mode again.
    """
    meet("TrainStep.evaluate", run.mesh.world)
    modes = [(module, module.training) for module in run.spec.model.modules()]
    try:
        with torch.no_grad(), random_state(state.rng, run.device):
            loss, weight = compute()
    finally:
        for module, mode in modes:
            module.training = mode
    row = loss_row(loss, weight, run.learned.num_passes)
    stats_W3 = collectives.stack(row, run.mesh.world, label=Label("loss_stats", phase="boundary"))
    check_passes(stats_W3[:, 2])
    check_rows(stats_W3[:, :2], is_sum=weight is not None)
    return mean_of(stats_W3[:, :2], is_sum=weight is not None)[0].float()
