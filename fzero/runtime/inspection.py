"""Uses of a state without gradients: `evaluate`, `inspect`, `first_overflow`.
`TrainStep` documents them for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.common.arguments import check_callable
from fzero.comms import collectives
from fzero.comms.hangs.failures import store_barrier
from fzero.comms.records import Label
from fzero.model.binding import random_state
from fzero.model.changes import modes_kept
from fzero.runtime import outcome
from fzero.runtime.eager import ForwardBackward
from fzero.runtime.finish import check_passes, check_rows, loss_row, mean_of
from fzero.runtime.param_views import NO_VIEWS, ParamViews
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.weights import differing
from fzero.state import TrainState
from fzero.storage.shard_transfer import read_later

T = TypeVar("T")
State = TrainState[Tensor]


def _check_read(run: StepRuntime, state: State) -> None:
    """Checks a state that is used without an update."""
    run.check_state(state)
    run.learned.model_check.check(partial(differing, run, state))


def evaluate(run: StepRuntime, state: State, batch: Any) -> Tensor:
    """See `TrainStep.evaluate`."""
    _check_read(run, state)
    return run.program.evaluate(run, state, batch)


def inspect(run: StepRuntime, state: State, function: Callable[[], T], kind: str) -> T:
    """See `TrainStep.inspect`, whose argument `run` is `kind` here."""
    check_callable("inspect", function, "a function without arguments that calls the model")
    _check_read(run, state)
    if run.plan.row.shards("params"):
        store_barrier("TrainStep.inspect", run.mesh.world)
    with inspecting(run, state, kind):
        return function()


@contextmanager
def inspecting(
    run: StepRuntime, state: State, kind: str, *, calls_vary: bool = False
) -> Iterator[None]:
    """Inside, the model computes with the state's parameters, gathered when a forward
    uses them; see `TrainStep.inspect`.

    *Collective* in stage 3: every rank enters and leaves; on the way, a rank gathers
    the units that others use, too.

    Args:
        calls_vary: whether the number of calls of the model may differ between ranks,
            or from one time to the next. Then ranks negotiate the order of the gathers
            instead of learning it, and transforms do not count the forwards.
    """
    learned = run.learned
    transfer = run.offload.transfer(run.scratch)
    call = run.call(read_later(state.step), is_counted=not calls_vary)
    seen = (
        ParamViews(run.changes.views, call.num_updates, state.buffers)
        if run.changes.views
        else NO_VIEWS
    )
    known = learned.negotiating() if calls_vary else learned
    params = run.inner_params(state.params, transfer)
    work = ForwardBackward(run.inner_plan, run.mesh, params, None, known, transfer, seen=seen)
    learned.num_passes += params is not state.params or not work.gathers_nothing
    buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
    with (
        run.binding.to(work.fetch, buffers),
        run.changes.bound(run.spec.model, lambda: call),
        work.forward(kind, saves=False, compares=run.compares(kind)),
    ):
        yield
    learned.compared.add(kind)
    work.close()
    if run.offload.passes_use_files:
        run.agree_on_files(state)


def first_overflow(run: StepRuntime, state: State) -> str | None:
    """See `TrainStep.first_overflow`."""
    run.check_state(state)
    store_barrier("TrainStep.first_overflow", run.mesh.world)
    return outcome.first_overflow(run, state)


def evaluated(
    run: StepRuntime, state: State, compute: Callable[[], tuple[Tensor, Tensor | None]]
) -> Tensor:
    """The mean over ranks of the loss that `compute` returns, with its weight if it is
    a sum. *Collective:* every rank.

    `compute` sets evaluation mode itself; afterwards each module is in its own mode
    again.
    """
    store_barrier("TrainStep.evaluate", run.mesh.world)
    with modes_kept(run.spec.model), torch.no_grad(), random_state(state.rng, run.device):
        loss, weight = compute()
    row = loss_row(loss, weight, run.learned.num_passes)
    stats_W3 = collectives.stack(row, run.mesh.world, label=Label("loss_stats", phase="boundary"))
    check_passes(stats_W3[:, 2])
    check_rows(stats_W3[:, :2], is_sum=weight is not None)
    return mean_of(stats_W3[:, :2], is_sum=weight is not None)[0].float()
