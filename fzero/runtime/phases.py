"""The parts of an eager step, as functions of its runtime: begin, forward, backward, collect, finish, update; and inspection.

`TrainStep` documents them for users. `fzero.runtime.programs.Eager` composes the first four for a batch; a loop that runs its own
code between the parts calls them one by one, on an `AccumulationWindow`.

Shape letters: A micro-steps, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from fzero.common.arguments import check_callable, check_kind, check_trains, shown
from fzero.common.profiler_ranges import profiler_range
from fzero.comms import collectives
from fzero.comms.hangs.failures import meet
from fzero.comms.records import Label
from fzero.model.binding import is_bound
from fzero.model.own_params import OwnGrads, check_unchanged
from fzero.model.transforms import Call
from fzero.plans.leaves import stream_name
from fzero.runtime import outcome
from fzero.runtime.autograd_nodes import Visits, visits_in, visits_of
from fzero.runtime.eager import ForwardBackward, recomputing
from fzero.runtime.finish import Collected, Finished, GradNorms, finish, norm_parts
from fzero.runtime.learned import hold
from fzero.runtime.loss import loss_of, loss_row
from fzero.runtime.module_buffers import check_no_views, make_equal, moved
from fzero.runtime.outcome import check_alike, check_outcome, check_passes, check_updating, check_used, number_of
from fzero.runtime.param_views import ParamViews
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.weights import differing
from fzero.state import TrainState, taken
from fzero.storage.shard_transfer import own_shard, read_later
from fzero.storage.state_memory import check_not_donated

T = TypeVar("T")
State = TrainState[Tensor]


class AccumulationWindow(NamedTuple):
    """The forwards and backwards since the last update; their gradients are in `state.grads`."""

    state: State
    work: ForwardBackward
    buffers: dict[str, Tensor]
    """Copies of the module buffers; forwards write into these."""
    before: dict[str, tuple[Tensor, int]]
    """The same buffers with their versions when the window began."""
    num_updates: Callable[[], int]
    """Reads the number of updates so far."""
    loss_stats: tuple[Tensor, ...] = ()
    """Per backward, every rank's (loss, weight or -1, number of forwards and backwards so far, checksum of hyper-parameters,
    number of module buffers that changed for the first time), shape (W, 5)."""
    is_sum: bool = False
    """Whether losses are sums."""
    is_bound: bool = False
    """Whether the model is bound for all forwards and backwards (`bound_throughout`), so that none of them binds it again."""


# --- a step on a batch -------------------------------------------------------------------------------------------


def check(run: StepRuntime, state: State, batch: Any) -> tuple[State, list[Any]]:
    """The state that a step may write into, and its micro-batches. Raises as `TrainStep.__call__` says."""
    if run.observer:
        run.observer.sees(batch)
    if is_bound(run.spec.model):
        raise RuntimeError(
            "step: must not be called inside a forward of its own model, got a call inside; call it after the forward, or "
            "compute there with the model itself"
        )
    _check_state(run, state)
    # Before random_state: the user's iterator must not draw from the state's generators.
    micro_batches = run.program.split(run, state, batch)
    _enter(run, state)
    return state if run.spec.donate else optree.tree_map(torch.clone, state), micro_batches


# --- its parts ---------------------------------------------------------------------------------------------------


def begin(run: StepRuntime, state: State, *, measures_early: bool) -> AccumulationWindow:
    """See `TrainStep.begin`."""
    _check_state(run, state)
    _enter(run, state)
    return open_window(run, state, measures_early=measures_early)


def _check_state(run: StepRuntime, state: State) -> None:
    run.check_state(state)
    if run.flags is not None:
        run.flags.check()


def _check_read(run: StepRuntime, state: State) -> None:
    """Checks a state that is used without an update."""
    run.check_state(state)
    run.learned.origin.check(partial(differing, run, state))


def _enter(run: StepRuntime, state: State) -> None:
    """Begins the work of a step."""
    check_trains("step")
    collectives.next_step(run.mesh.world)
    if run.observer:
        run.observer.begins()
    run.learned.origin.leave(partial(differing, run, state))


def open_window(run: StepRuntime, state: State, *, measures_early: bool) -> AccumulationWindow:
    """An accumulation window of a state that is checked already; see `TrainStep.begin`."""
    learned = run.learned
    if learned.moving_buffers is None:
        learned.own_grads = OwnGrads(run.spec.model)
    if learned.leaves or any(each.is_held for each in learned.lingering):
        hold(run, state.params)
    # Forwards write in copies, so that the given state stays valid if this step raises.
    buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
    before = {name: (tensor, tensor._version) for name, tensor in buffers.items()}
    transfer, num_updates = run.offload.transfer(run.scratch), read_later(state.step)
    work = ForwardBackward(
        run.inner_plan, run.mesh, run.inner_params(state.params, transfer), state.grads, learned, transfer,
        hook_states=state.hook_states, norms=GradNorms(run.rules.loss.of_shard, in_memory=measures_early),
        seen=ParamViews(run.changes.views, num_updates, state.buffers, units=run.plan, sizes=run.changes.sizes),
    )  # fmt: skip
    learned.lingering = work.gathers.lingering
    return AccumulationWindow(state, work, buffers, before, num_updates)


def forward(
    run: StepRuntime,
    window: AccumulationWindow,
    function: Callable[[], T],
    *,
    kind: str = "train",
    still: frozenset[str] = frozenset(),
) -> T:
    """See `TrainStep.forward`; `kind` is its `run`."""
    check_callable("forward", function, "a function without arguments that calls the model")
    learned = run.learned
    learned.holds_still |= bool(still)
    compares = _compares(run, kind)
    with (
        profiler_range("forward"),
        learned.counted(is_all=not window.work.gathers_nothing),
        bound_to(run, window, lambda: (window.work.forwards.last_index,)),
        window.work.forward(kind, still=still, compares=compares),
    ):
        result = function()
        if compares:
            check_no_views(run.spec.model, window.work.gathers.holds)
            learned.leaves = window.work.given.leaves
    learned.compared.add(kind)
    return result


def backward(
    run: StepRuntime,
    window: AccumulationWindow,
    loss: Tensor,
    *,
    weight: Tensor | None = None,
    num_parts: int = 1,
    is_last: bool = True,
    keeps: bool = False,
) -> AccumulationWindow:
    """See `TrainStep.backward`."""
    if not isinstance(loss, Tensor) or loss.dim():
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise ValueError(f"backward: loss must be a 0-d tensor, got {given}; take its mean or sum")
    scaled = scaled_loss(run, window, loss)
    how: dict[str, Any] = {"weight": weight, "num_parts": num_parts, "is_last": is_last, "keeps": keeps}
    with going_back(run, window, visits_of(scaled, window.work), loss, **how) as after:
        torch.autograd.backward(scaled, retain_graph=keeps)
    return after[0]


def scaled_loss(run: StepRuntime, window: AccumulationWindow, loss: Tensor) -> Tensor:
    """The loss times the loss scale, if there is one."""
    if not run.rules.loss.scales_loss:
        return loss
    return loss.to(torch.promote_types(loss.dtype, torch.float32)) * window.state.loss_scale.scale


@contextmanager
def going_back(
    run: StepRuntime,
    window: AccumulationWindow,
    visits: Visits,
    loss: Tensor,
    *,
    weight: Tensor | None = None,
    num_parts: int = 1,
    is_last: bool = True,
    keeps: bool = False,
    needs_grads: bool = True,
) -> Iterator[list[AccumulationWindow]]:
    """`backward` as a context, in which autograd runs. *Collective:* every rank.

    Args:
        visits: the visits of the backward (`visits_of`).
        loss: its value; the step's loss is computed from these values.
        needs_grads: see `ForwardBackward.backward`.

    Yields:
        A list that receives the window at the end.
    """
    learned, work = run.learned, window.work
    learned.num_passes += 1
    newly_moved = moved(window.buffers, window.before) - (learned.moving_buffers or set())
    if is_last and run.offload.has_files:
        run.offload.read_ahead(window.state, work.forwards.still_buffers(run.plan.flat_buffers))
    number = number_of(learned.num_passes, work.forwards.still, is_last=is_last)
    checksum = learned.hyper.checksum(run.updater, window.state, num_parts=num_parts)
    after: list[AccumulationWindow] = []
    with (
        profiler_range("backward"),
        bound_to(run, window, lambda: visits),
        work.backward(
            visits, loss_row(loss, weight, number, checksum, len(newly_moved)),
            grad_scale=1 / (run.rules.loss.predivide * num_parts), is_first=not window.loss_stats, is_last=is_last,
            keeps=keeps, check=(lambda rows: check_passes(rows[:, 2])) if learned.holds_still else None,
            needs_grads=needs_grads,
        ) as rows,
    ):  # fmt: skip
        yield after
    (stats_W5,) = rows
    check_alike(stats_W5[:, 2:4], run.mesh.world, partial(learned.hyper.named, num_parts))
    if learned.own_grads is not None:
        learned.own_grads.check()
    after.append(window._replace(loss_stats=(*window.loss_stats, stats_W5), is_sum=weight is not None))


@contextmanager
def passing(run: StepRuntime, window: AccumulationWindow, loss: Tensor, *, keeps: bool) -> Iterator[None]:
    """See `TrainStep.passing`."""
    with bound_to(run, window, partial(visits_in, loss, window.work)), window.work.passing(loss, keeps=keeps):
        yield


def check_window(window: AccumulationWindow) -> None:
    """Raises unless the window holds the gradients of at least one backward and no error has ended it."""
    rule, fix = "given the AccumulationWindow of the last backward", "pass what step.backward(...) returned"
    check_kind("update", window, AccumulationWindow, rule, fix)
    check_not_donated(window.state)
    if window.work.status == "over":
        raise RuntimeError(
            "update: must be of a window that no error has ended, and an error did, so that gradients are missing; begin "
            "another window with the same state"
        )
    if not window.loss_stats:
        raise ValueError("update: needs a backward since the last one, and there was none; call backward(loss) first")


def collect(run: StepRuntime, window: AccumulationWindow, rng: dict[str, Tensor] | None = None) -> Collected:
    """Ends a window: takes its gradients, and makes the module buffers that steps change equal on all ranks.

    *Collective:* every rank.

    Args:
        rng: the random state of the next state; None takes that of the present state.
    """
    state, work, buffers, learned = window.state, window.work, window.buffers, run.learned
    work.close()
    if rng is None and run.device.type == "cpu":  # each rank calls the update for itself
        check_updating(run.mesh.world)
    if not run.spec.cfg.zero_optimization.ignore_unused_parameters:
        check_used(run, work.forwards.used | work.forwards.still)
    if run.offload.passes_use_files:
        run.agree_on_files(state)
    stats_AW5 = torch.stack(window.loss_stats)
    changed, moving = moved(buffers, window.before), learned.moving_buffers
    if moving is None:  # kernels such as BatchNorm's change a buffer without its version
        changed |= run.statistics | {n for n in buffers if not torch.equal(buffers[n], state.buffers[n])}
    check_unchanged(changed, learned.sharing)
    run.changes.check_unread(changed)
    # On CUDA the host would wait for the device here, to read whether any rank has a newly changed buffer.
    has_news = bool(stats_AW5[..., 4].any()) if run.device.type == "cpu" else run.spec.schedule != "learned"
    learned.moving_buffers = make_equal(
        buffers, changed, moving, run.mesh.world, has_news=has_news, ranges=run.changes.ranges
    )
    learned.own_grads = None
    hook_states: dict[str, Any] = work.reductions.hook_states
    return Collected(
        state, stats_AW5[..., :4], window.is_sum, buffers, state.rng if rng is None else rng, hook_states,
        run.updater.hyper(window.num_updates()), transfer=work.transfer, norms=work.reductions.norms,
        still=work.forwards.still_buffers(run.plan.flat_buffers),
    )  # fmt: skip


def finish_step(run: StepRuntime, collected: Collected) -> Finished:
    """Loss, norm, overflow and factor of a step, checked. *Collective* where there are several shards: sends one number.

    Raises:
        FloatingPointError: on every rank, when loss or gradient are not finite and no overflow is skipped.
    """
    state, result = collected.state, collected.outcome and Finished(collected.outcome)
    if result is None:
        parts_F = _norm_parts(run, collected)
        result = finish(run.rules, collected.loss_stats, parts_F, state.loss_scale, is_sum=collected.is_sum)
    check_outcome(run, result.outcome, state, run.learned.hyper.named, is_sum=collected.is_sum)
    return result


def _norm_parts(run: StepRuntime, collected: Collected) -> Tensor:
    mesh, grads, transfer = run.mesh, collected.state.grads, collected.transfer
    assert transfer is not None
    cut = [b for b in run.plan.flat_buffers if b.trainable and b.shard_numel]
    known = [None if collected.norms is None else collected.norms.of(b.key, grads[b.key]) for b in cut]
    unknown = [
        (stream_name("grads", b.key), own_shard(grads[b.key], b, mesh.shard))
        for b, number in zip(cut, known, strict=True)
        if number is None
    ]
    rest = map(run.rules.loss.of_shard, transfer.each(unknown))
    own = [next(rest) if number is None else number for number in known]
    measured = run.job.norm_parts(own, run.device)
    stack = partial(mesh.stack, label=Label("norm", phase="update"))
    return norm_parts(run.rules.loss, measured, mesh.num_shards, stack=stack, device=run.device)


def update(run: StepRuntime, collected: Collected, result: Finished) -> State:
    """The updated state; its counter is still that of the step. *Collective:* see `Updater.update`."""
    state = taken(collected.state)  # before the first write: a state whose update raised must not be used again
    run.learned.hyper.used(collected.hyper)
    if collected.outcome is None:  # otherwise a graph has made the update
        skip = result.skip if run.rules.skips_overflow else None
        state = run.updater.update(state, result.factor, skip, hyper=collected.hyper, still=collected.still)
    if run.observer:
        run.observer.has_updated()
    return state


# --- without gradients -------------------------------------------------------------------------------------------


def evaluate(run: StepRuntime, state: State, batch: Any) -> Tensor:
    """See `TrainStep.evaluate`."""
    _check_read(run, state)
    return run.program.evaluate(run, state, batch)


def inspect(run: StepRuntime, state: State, function: Callable[[], T], kind: str) -> T:
    """See `TrainStep.inspect`, whose argument `run` is `kind` here."""
    check_callable("inspect", function, "a function without arguments that calls the model")
    _check_read(run, state)
    if run.plan.row.shards("params"):
        meet("TrainStep.inspect", run.mesh.world)
    with inspecting(run, state, kind):
        return function()


@contextmanager
def inspecting(run: StepRuntime, state: State, kind: str, *, calls_vary: bool = False) -> Iterator[None]:
    """Inside, the model computes with the state's parameters, gathered when a forward uses them; see `TrainStep.inspect`.

    *Collective* in stage 3: every rank enters and leaves; on the way, a rank gathers the units that others use, too.

    Args:
        calls_vary: whether the number of calls of the model may differ between ranks, or from one time to the next. Then ranks
            negotiate the order of the gathers instead of learning it, and transforms do not count the forwards.
    """
    learned = run.learned
    transfer = run.offload.transfer(run.scratch)
    call = call_of(run, read_later(state.step), is_counted=not calls_vary)
    seen = ParamViews(run.changes.views, call.num_updates, state.buffers)
    known = learned.negotiating() if calls_vary else learned
    params = run.inner_params(state.params, transfer)
    work = ForwardBackward(run.inner_plan, run.mesh, params, None, known, transfer, seen=seen)
    learned.num_passes += params is not state.params or not work.gathers_nothing
    buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
    with (
        run.binding.to(work.fetch, buffers),
        run.changes.bound(run.spec.model, lambda: call),
        work.forward(kind, saves=False, compares=_compares(run, kind)),
    ):
        yield
    learned.compared.add(kind)
    work.close()
    if run.offload.passes_use_files:
        run.agree_on_files(state)


def first_overflow(run: StepRuntime, state: State) -> str | None:
    """See `TrainStep.first_overflow`."""
    run.check_state(state)
    meet("TrainStep.first_overflow", run.mesh.world)
    return outcome.first_overflow(run, state)


# --- helpers -----------------------------------------------------------------------------------------------------


def _compares(run: StepRuntime, kind: str) -> bool:
    """Whether a forward's parameters are compared before and after: in the first of its kind, or always if configured."""
    return kind not in run.learned.compared or run.spec.check_params == "always"


def call_of(
    run: StepRuntime, num_updates: Callable[[], int], *, micro: Callable[[], int] = lambda: 0, **how: Any
) -> Call:
    """The forwards of a step on this rank, for transforms; see `Call`."""
    return Call(
        num_updates=num_updates, micro=micro, rank=run.ranks.rank, num_micro=run.plan.num_micro_steps,
        device=run.device, aliases=run.plan.aliases, **how,
    )  # fmt: skip


@contextmanager
def bound_throughout(run: StepRuntime, window: AccumulationWindow) -> Iterator[AccumulationWindow]:
    """Binds the model once for all forwards and backwards of a window, where it can; yields the window."""
    # What a forward assigns to module buffers, or writes into `.grad`, is known after its binding.
    if window.buffers or run.learned.own_grads is not None or run.changes.is_by_forward:
        yield window
        return
    window.work.given.share(run.plan.num_micro_steps > 1 and window.work.gathers_nothing and not run.changes.views)
    with bound_to(run, window, lambda: ()):
        yield window._replace(is_bound=True)


@contextmanager
def bound_to(run: StepRuntime, window: AccumulationWindow, forwards: Callable[[], Collection[int]]) -> Iterator[None]:
    """Inside, the model computes with the tensors of a window; `forwards`: the numbers of those that run, or run again."""
    if window.is_bound:
        yield
        return

    def call() -> Call:
        how: dict[str, Any] = {"again": partial(recomputing, window.work), "moving": run.learned.moving_buffers}
        return call_of(run, window.num_updates, micro=lambda: _only(forwards()), **how)

    with run.binding.to(window.work.fetch, window.buffers), run.changes.bound(run.spec.model, call):
        yield


def _only(forwards: Collection[int]) -> int:
    """The one forward that runs, or of which a backward runs parts again."""
    if len(forwards) != 1:
        raise RuntimeError(
            f"transforms: a backward that runs modules again must be of one forward where a transform depends on its number (as "
            f"random_ltd does, for the tokens to keep), got one of {len(forwards)}; call backward for each forward, or "
            f"checkpoint the layers themselves and nothing around them (activation_checkpointing)"
        )
    return next(iter(forwards))


def loss_of_batch(run: StepRuntime, batch: Any) -> tuple[Tensor, Tensor | None]:
    """The loss of a batch, and its weight if `loss_fn` returns a sum and a weight."""
    try:
        return loss_of(
            run.spec.model, run.spec.loss_fn, run.batches.cast(batch),
            reduces_by_sum=not run.rules.loss.is_mean, autocast=run.autocast, device=run.device.type,
        )  # fmt: skip
    except RuntimeError as error:
        param_dtype = run.spec.cfg.precision.param_dtype
        if param_dtype is not None and ("dtype" in str(error) or "scalar type" in str(error)):
            error.add_note(
                f"fzero: the parameters are {param_dtype} (step.plan shows every dtype), the batch is cast to that "
                f"with auto_cast in fp16 or bf16, and module buffers with data_types.buffer_dtype"
            )
        raise
