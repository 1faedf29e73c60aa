"""`end`: from collected gradients to the next state, the last part of a step of any program."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.runtime.finish import Collected, Outcome, next_state
from fzero.runtime.out_of_memory import explained
from fzero.runtime.phases import finish_step, update
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import Metrics, TrainState


def end(
    run: StepRuntime, collected: Collected, *, sees: Callable[[Outcome], object] | None = None
) -> tuple[TrainState[Tensor], Metrics]:
    """The state after the update, and the metrics. *Collective:* every rank.

    Args:
        sees: gets the outcome before the device is given the update. It may begin to copy a number to the host then, which need
            not wait for the update.

    Raises:
        FloatingPointError: see `finish_step`.
    """
    with profiler_range("update"), explained(run.plan):
        finished = finish_step(run, collected)
        if sees is not None:
            sees(finished.outcome)
        state = update(run, collected, finished)
        return next_state(run.rules, collected, state, finished.outcome)
