"""`finish`: from collected gradients to the next state. Loss, norm, overflow, factor, update."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from fzero.runtime.hyper_check import HyperCheck
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import Metrics, TrainState, taken
from fzero.storage.shard_io import ShardTransfer


def finish(
    run: StepRuntime, check: HyperCheck, state: TrainState[Tensor], losses: Tensor, buffers: dict[str, Tensor],
    rng: dict[str, Tensor], hook_states: dict[str, dict[str, Any]], *, is_sum: bool, transfer: ShardTransfer,
    still: Collection[str] = (),
) -> tuple[TrainState[Tensor], Metrics]:  # fmt: skip
    """The state after the update with the gradients that it holds. *Collective:* see `StepMetrics.metrics`, `Updater.update`.

    Args:
        losses: of every micro-step and rank, with their weights (A, W, 2).
        buffers, rng, hook_states: of the next state.
        is_sum: whether each loss is a sum, to be divided by the sum of the weights.
        transfer: the transfer of the backward, which may know what a gradient adds to the norm.
        still: the keys of flat buffers that are not updated.

    Raises:
        FloatingPointError: on every rank, when loss or gradient are not finite and no overflow is skipped.
    """
    hyper = run.updater.hyper(int(state.step))
    check.used(hyper)
    metrics, factor = run.metrics.metrics(losses, state, is_sum=is_sum, rate=hyper.rates[0], transfer=transfer)
    state = taken(state)  # before the first write: a state whose update raised must not be used again
    state = run.updater.update(state, factor, metrics.overflow, hyper=hyper, still=still)
    loss_scale = state.loss_scale
    if run.recipe.cfg.skips_overflow:
        loss_scale = run.scaling.update(loss_scale, metrics.overflow)
    return run.updater.next_state(state, metrics, loss_scale, buffers, rng, hook_states), metrics
