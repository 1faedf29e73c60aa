"""The contexts in which the model of a step computes: with compressed parameters and inputs, dropped tokens, compiled blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from fzero.runtime.seen_params import SeenParams
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState


def seen_params(run: StepRuntime, state: TrainState[Tensor], *, keeps: bool = False) -> SeenParams:
    """Gives the model the compressed values for this state; `keeps`: whether a backward needs them again."""
    plan = run.spec.compress
    if not plan:
        return SeenParams()
    from fzero.runtime.seen_compressed import SeenCompressed  # a step without compression does not load it

    return SeenCompressed(plan, int(state.step), state.buffers, units=run.plan if keeps else None)


def quantizing(run: StepRuntime, state: TrainState[Tensor]) -> AbstractContextManager[None]:
    """Inside, inputs of modules are quantized where the compression says so."""
    plan = run.spec.compress
    if plan is None or not plan.inputs:
        return nullcontext()
    from fzero.compression.inputs import quantized_inputs  # a step without compression does not load it

    return quantized_inputs(run.spec.model, plan, int(state.step))


def dropping(run: StepRuntime, step: Tensor, forwards: Callable[[], Collection[int]]) -> AbstractContextManager[None]:
    """Inside, the layers that drop tokens do so; see `fzero.runtime.token_dropping.dropping`."""
    if run.spec.drop is None:
        return nullcontext()
    from fzero.runtime.token_dropping import dropping  # a step without dropped tokens does not load it

    return dropping(run, run.spec.drop, step, forwards)


def with_blocks(run: StepRuntime) -> AbstractContextManager[None]:
    """Inside, the blocks of `compile="block"` run compiled."""
    return run.blocks.applied(run.spec.model) if run.blocks else nullcontext()
