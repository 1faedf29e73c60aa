"""The parts of an eager step, as functions of its runtime: begin, forward, backward,
collect, finish, update.

`TrainStep` documents them for users. `Eager` composes the first four for a batch; a
loop that runs its own code between the parts calls them one by one, on an
`AccumulationWindow`.

Shape letters: A micro-steps, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import optree
import torch
from torch import Tensor

from fzero.common.arguments import check_kind, refuse_without_grad, shown
from fzero.common.profiler_ranges import profiler_range
from fzero.comms import collectives
from fzero.comms.records import CommRecord, Label
from fzero.model.binding import is_bound, random_state
from fzero.model.errors import OVER
from fzero.model.tensor_checks import ModuleGradsUnused
from fzero.model.transforms import Call
from fzero.plans.leaves import stream_name
from fzero.runtime.autograd_nodes import Visits, visits_in, visits_of, works_of
from fzero.runtime.batches import loss_of_batch
from fzero.runtime.eager import ForwardBackward, recomputing
from fzero.runtime.finish import (
    Collected,
    Finished,
    check_alike,
    check_outcome,
    check_passes,
    check_updating,
    finish,
    loss_row,
    norm_parts,
    number_of,
)
from fzero.runtime.inspection import evaluated, inspecting
from fzero.runtime.learned import hold
from fzero.runtime.module_buffers import agree, check_no_views, moved
from fzero.runtime.outcome import check_used
from fzero.runtime.param_views import NO_VIEWS, ParamViews
from fzero.runtime.reductions import GradNorms
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.weights import differing, on_any_rank
from fzero.state import TrainState
from fzero.storage.shard_transfer import own_shard, read_later
from fzero.storage.state_memory import check_not_donated, taken

T = TypeVar("T")
State = TrainState[Tensor]


class AccumulationWindow(NamedTuple):
    """The forwards and backwards since the last update; their gradients are in
    `state.grads`.
    """

    state: State
    forward_backward: ForwardBackward
    buffers: dict[str, Tensor]
    """Copies of the module buffers; forwards write into these."""
    before: dict[str, tuple[Tensor, int]]
    """The same buffers with their versions when the window began."""
    num_updates: Callable[[], int]
    """Reads the number of updates so far."""
    loss_stats: tuple[Tensor, ...] = ()
    """Per backward, every rank's (loss, weight or -1, number of forwards and backwards
    so far, checksum of hyper-parameters, number of module buffers that changed for the
    first time), shape (W, 5)."""
    is_sum: bool = False
    """Whether losses are sums."""
    is_bound: bool = False
    """Whether the model is bound for all forwards and backwards (`bound_throughout`),
    so that none of them binds it again.
    """


# --- a step on a batch ----------------------------------------------------------------------------


def check(run: StepRuntime, state: State, batch: Any) -> tuple[State, list[Any]]:
    """The state that a step may write into, and its micro-batches. Raises as
    `TrainStep.__call__` says.
    """
    if run.observer:
        run.observer.sees(batch)
    if is_bound(run.spec.model):
        raise RuntimeError(
            "step: must not be called inside a forward of its own model, got a call inside; call "
            "it after the forward, or compute there with the model itself"
        )
    _check_state(run, state)
    # Before random_state: the user's iterator must not draw from the state's generators.
    micro_batches = run.program.split(run, state, batch)
    _enter(run, state)
    return state if run.spec.donate else optree.tree_map(torch.clone, state), micro_batches


@dataclass(frozen=True, slots=True)
class Eager:
    """Runs the model on one micro-batch after the other."""

    is_graph: ClassVar[bool] = False

    def split(self, run: StepRuntime, state: State, batch: Any) -> list[Any]:
        return list(run.batches.split(batch))

    def __call__(self, run: StepRuntime, state: State, micro_batches: list[Any]) -> Collected:
        window = open_window(run, state, measures_early=True)
        with random_state(state.rng, run.device) as rng, bound_throughout(run, window) as window:
            for index, micro_batch in enumerate(micro_batches):
                loss, weight = forward(run, window, partial(loss_of_batch, run, micro_batch))
                # A mean is divided here. A sum is divided in the update, when all weights are
                # known.
                num_parts, is_last = (
                    len(micro_batches) if weight is None else 1,
                    index == len(micro_batches) - 1,
                )
                window = backward(
                    run, window, loss, weight=weight, num_parts=num_parts, is_last=is_last
                )
        return collect(run, window, rng)

    def evaluate(self, run: StepRuntime, state: State, batch: Any) -> Tensor:
        def compute() -> tuple[Tensor, Tensor | None]:
            with inspecting(run, state, "evaluate"):
                run.spec.model.eval()  # here, because the model's own eval() may read its tensors
                return loss_of_batch(run, run.batches.changed(batch))

        return evaluated(run, state, compute)

    def following(self, run: StepRuntime) -> Self:
        return self

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        return self


# --- its parts ------------------------------------------------------------------------------------


def begin(run: StepRuntime, state: State, *, measures_early: bool) -> AccumulationWindow:
    """See `TrainStep.begin`."""
    _check_state(run, state)
    _enter(run, state)
    return open_window(run, state, measures_early=measures_early)


def _check_state(run: StepRuntime, state: State) -> None:
    run.check_state(state)
    if run.flags is not None:
        run.flags.check()


def _enter(run: StepRuntime, state: State) -> None:
    """Begins the work of a step."""
    if not torch.is_grad_enabled():
        refuse_without_grad("step")
    collectives.next_step(run.mesh.world)
    if run.observer:
        run.observer.begins()
    run.learned.model_check.check_at_step(partial(differing, run, state), partial(on_any_rank, run))


def open_window(run: StepRuntime, state: State, *, measures_early: bool) -> AccumulationWindow:
    """An accumulation window of a state that is checked already; see `TrainStep.begin`."""
    learned = run.learned
    if learned.moving_buffers is None:
        learned.module_grads = ModuleGradsUnused(run.spec.model)
    if learned.leaves or any(each.is_held for each in learned.leaked):
        hold(run, state.params)
    # Forwards write in copies, so that the given state stays valid if this step raises.
    buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
    before = {name: (tensor, tensor._version) for name, tensor in buffers.items()}
    transfer, num_updates = run.offload.transfer(run.scratch), read_later(state.step)
    seen, changes = NO_VIEWS, run.changes
    if changes.views:
        seen = ParamViews(
            changes.views, num_updates, state.buffers, units=run.plan, sizes=changes.sizes
        )
    work = ForwardBackward(
        run.inner_plan,
        run.mesh,
        run.inner_params(state.params, transfer),
        state.grads,
        learned,
        transfer,
        hook_states=state.hook_states,
        norms=GradNorms(run.rules.loss.of_shard, in_memory=measures_early),
        seen=seen,
    )
    learned.leaked = work.gathers.leaked
    return AccumulationWindow(state, work, buffers, before, num_updates)


def forward(
    run: StepRuntime,
    window: AccumulationWindow,
    function: Callable[[], T],
    *,
    kind: str = "train",
    no_grad_names: frozenset[str] = frozenset(),
) -> T:
    """See `TrainStep.forward`; `kind` is its `run`."""
    learned = run.learned
    learned.leaves_out_params |= bool(no_grad_names)
    compares, is_counted = run.compares(kind), not window.forward_backward.gathers_nothing
    # Where ranks may make different numbers of forwards, only one that raises counts.
    learned.num_passes += is_counted
    try:
        with (
            profiler_range("forward"),
            bound_to(run, window, lambda: (window.forward_backward.forwards.last_index,)),
            window.forward_backward.forward(kind, no_grad_names=no_grad_names, compares=compares),
        ):
            result = function()
            if compares:
                check_no_views(run.binding.index, window.forward_backward.gathers.holds)
                learned.leaves = window.forward_backward.given.leaves
    except BaseException:
        learned.num_passes += not is_counted
        raise
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
    retain_graph: bool = False,
) -> AccumulationWindow:
    """See `TrainStep.backward`."""
    if not isinstance(loss, Tensor) or loss.dim():
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise ValueError(f"backward: loss must be a 0-d tensor, got {given}; take its mean or sum")
    scaled = scaled_loss(run, window, loss)
    how: dict[str, Any] = {
        "weight": weight,
        "num_parts": num_parts,
        "is_last": is_last,
        "retain_graph": retain_graph,
    }
    with going_back(run, window, visits_of(scaled, window.forward_backward), loss, **how) as after:
        torch.autograd.backward(scaled, retain_graph=retain_graph)
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
    retain_graph: bool = False,
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
    learned, work = run.learned, window.forward_backward
    learned.num_passes += 1
    newly_moved = (
        moved(window.buffers, window.before) - (learned.moving_buffers or set())
        if window.buffers
        else ()
    )
    if is_last and run.offload.has_files:
        run.offload.read_ahead(window.state, work.forwards.skipped_buffers(run.plan.flat_buffers))
    number = number_of(learned.num_passes, work.forwards.no_grad_names, is_last=is_last)
    checksum = learned.hyper.checksum(run.updater, window.state, num_parts=num_parts)
    after: list[AccumulationWindow] = []
    with (
        profiler_range("backward"),
        bound_to(run, window, lambda: visits),
        work.backward(
            visits,
            loss_row(loss, weight, number, checksum, len(newly_moved)),
            grad_scale=1 / (run.rules.loss.predivide * num_parts),
            is_first=not window.loss_stats,
            is_last=is_last,
            retain_graph=retain_graph,
            check=(lambda rows: check_passes(rows[:, 2])) if learned.leaves_out_params else None,
            needs_grads=needs_grads,
        ) as rows,
    ):
        try:
            yield after
        except RuntimeError as error:  # of autograd, about memory that another step has written
            if any(each.status == "over" for each in works_of(loss)):
                raise RuntimeError(OVER) from error
            raise
    (stats_W5,) = rows
    check_alike(stats_W5[:, 2:4], run.mesh.world, partial(learned.hyper.named, num_parts))
    if learned.module_grads is not None:
        learned.module_grads.check()
    after.append(
        window._replace(loss_stats=(*window.loss_stats, stats_W5), is_sum=weight is not None)
    )


def backward_through(
    run: StepRuntime, window: AccumulationWindow, loss: Tensor, *, retain_graph: bool
) -> AbstractContextManager[None]:
    """See `TrainStep.backward_through`."""
    visits = visits_in(loss, window.forward_backward)
    return passing(run, window, visits, retain_graph=retain_graph)


@contextmanager
def passing(
    run: StepRuntime,
    window: AccumulationWindow,
    visits: Visits | None = None,
    *,
    retain_graph: bool,
) -> Iterator[None]:
    """Inside, a backward goes through these visits (None: those of the last forward),
    without gradients of parameters. *Collective* in stage 3.
    """
    if visits is None:
        visits = window.forward_backward.forwards.last_alone or {}
    with (
        bound_to(run, window, lambda: visits),
        window.forward_backward.backward_through(visits, retain_graph=retain_graph),
    ):
        yield


def check_window(window: AccumulationWindow) -> None:
    """Raises unless the window holds the gradients of at least one backward and no
    error has ended it.
    """
    rule, fix = (
        "given the AccumulationWindow of the last backward",
        "pass what step.backward(...) returned",
    )
    check_kind("update", window, AccumulationWindow, rule, fix)
    check_not_donated(window.state)
    if window.forward_backward.status == "over":
        raise RuntimeError(
            "update: must be of a window that no error has ended, and an error did, so that "
            "gradients are missing; begin another window with the same state"
        )
    if not window.loss_stats:
        raise ValueError(
            "update: needs a backward since the last one, and there was none; call backward(loss) "
            "first"
        )


def collect(
    run: StepRuntime, window: AccumulationWindow, rng: dict[str, Tensor] | None = None
) -> Collected:
    """Ends a window: takes its gradients, and makes the module buffers that steps
    change equal on all ranks.

    *Collective:* every rank.

    Args:
        rng: the random state of the next state; None takes that of the present state.
    """
    state, work, buffers, learned = (
        window.state,
        window.forward_backward,
        window.buffers,
        run.learned,
    )
    work.close()
    if rng is None and run.device.type == "cpu":  # each rank calls the update for itself
        check_updating(run.mesh.world)
    if not run.spec.cfg.zero_optimization.ignore_unused_parameters:
        check_used(run, work.forwards.used | work.forwards.no_grad_names)
    if run.offload.passes_use_files:
        run.agree_on_files(state)
    stats_AW5 = torch.stack(window.loss_stats)
    moving = (
        agree(run, state, buffers, window.before, stats_AW5[..., 4])
        if buffers
        else frozenset[str]()
    )
    learned.moving_buffers, learned.module_grads = moving, None
    hook_states: dict[str, Any] = work.reductions.hook_states
    return Collected(
        state,
        stats_AW5[..., :4],
        window.is_sum,
        buffers,
        state.rng if rng is None else rng,
        hook_states,
        run.updater.hyper(window.num_updates()),
        transfer=work.transfer,
        norms=work.reductions.norms,
        skipped=work.forwards.skipped_buffers(run.plan.flat_buffers),
    )


def finish_step(run: StepRuntime, collected: Collected) -> Finished:
    """Loss, norm, overflow and factor of a step, checked. *Collective* where there are
    several shards: sends one number.

    Raises:
        FloatingPointError: on every rank, when loss or gradient are not finite and no
            overflow is skipped.
    """
    state, result = collected.state, collected.outcome and Finished(collected.outcome)
    if result is None:
        mesh, grads, transfer, rules = run.mesh, state.grads, collected.transfer, run.rules
        assert transfer is not None
        cut = [b for b in run.plan.flat_buffers if b.trainable and b.shard_numel]
        norms = {
            b.key: None if collected.norms is None else collected.norms.of(b.key, grads[b.key])
            for b in cut
        }
        if unknown := [b for b in cut if norms[b.key] is None]:
            shards = [
                (stream_name("grads", b.key), own_shard(grads[b.key], b, mesh.shard))
                for b in unknown
            ]
            measured = map(rules.loss.of_shard, transfer.each(shards))
            norms |= dict(zip((b.key for b in unknown), measured, strict=True))
        own = run.job.norm_parts(
            [number for number in norms.values() if number is not None], run.device
        )
        stack = partial(mesh.stack, label=Label("norm", phase="update"))
        parts_F = norm_parts(rules.loss, own, stack=stack, device=run.device)
        result = finish(
            rules, collected.loss_stats, parts_F, state.loss_scale, is_sum=collected.is_sum
        )
    check_outcome(run, result.outcome, state, run.learned.hyper.named, is_sum=collected.is_sum)
    return result


def update(run: StepRuntime, collected: Collected, result: Finished) -> State:
    """The updated state; its counter is still that of the step. *Collective:* see
    `Updater.update`.
    """
    # before the first write: a state whose update raised must not be used again
    state = taken(collected.state)
    run.learned.hyper.used(collected.hyper)
    if collected.outcome is None:  # otherwise a graph has made the update
        skip = result.skip if run.rules.skips_overflow else None
        state = run.updater.update(
            state, result.factor, skip, hyper=collected.hyper, skipped=collected.skipped
        )
    if run.observer:
        run.observer.has_updated()
    return state


# --- helpers --------------------------------------------------------------------------------------


@contextmanager
def bound_throughout(run: StepRuntime, window: AccumulationWindow) -> Iterator[AccumulationWindow]:
    """Binds the model once for all forwards and backwards of a window, where it can;
    yields the window.
    """
    # What a forward assigns to module buffers, or writes into `.grad`, is known after its binding.
    if window.buffers or run.learned.module_grads is not None or run.changes.is_by_forward:
        yield window
        return
    window.forward_backward.given.share(
        run.plan.num_micro_steps > 1
        and window.forward_backward.gathers_nothing
        and not run.changes.views
    )
    with bound_to(run, window, lambda: ()):
        yield window._replace(is_bound=True)


@contextmanager
def bound_to(
    run: StepRuntime, window: AccumulationWindow, forwards: Callable[[], Collection[int]]
) -> Iterator[None]:
    """Inside, the model computes with the tensors of a window; `forwards`: the numbers
    of those that run, or run again.
    """
    if window.is_bound:
        yield
        return

    def call() -> Call:
        how: dict[str, Any] = {
            "again": partial(recomputing, window.forward_backward),
            "moving": run.learned.moving_buffers,
        }
        return run.call(window.num_updates, micro=lambda: _only(forwards()), **how)

    forwards_of = run.changes.bound(run.spec.model, call) if run.changes.wrapping else nullcontext()
    with run.binding.to(window.forward_backward.fetch, window.buffers), forwards_of:
        yield


def _only(forwards: Collection[int]) -> int:
    """The one forward that runs, or of which a backward runs parts again."""
    if len(forwards) != 1:
        raise RuntimeError(
            f"transforms: a backward that runs modules again must be of one forward where a "
            f"transform depends on its number (as random_ltd does, for the tokens to keep), got "
            f"one of {len(forwards)}; call backward for each forward, or checkpoint the layers "
            f"themselves and nothing around them (activation_checkpointing)"
        )
    return next(iter(forwards))
