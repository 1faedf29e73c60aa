"""`reshard`: moves a training state to a step with another stage, number of ranks, mesh
or layout.

    state = fzero.reshard(state, old, new)    # old and new are steps of one model

The plan (`fzero.resharding.plan`) lists the moves. `reshard` runs it on real processes,
`reshard_all` on the states of all ranks in one process. Neither gathers a tensor that
the new step does not hold in full; one unit moves at a time.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.common.arguments import check_kind
from fzero.comms import collectives
from fzero.comms.axes import AbstractAxis, ProcessAxis
from fzero.comms.hangs.failures import store_barrier
from fzero.comms.process_group import job
from fzero.comms.records import Label
from fzero.parallelism import parallelism_of
from fzero.plans.plan import Plan
from fzero.plans.staged import StagedPlan
from fzero.resharding import new_state
from fzero.resharding.new_state import Numbers, by_name, chosen_numbers, numbers_of, read, write
from fzero.resharding.place import place as put
from fzero.resharding.plan import JobRank, ReshardPlan, ReshardRound, kept_hook_states, plan_reshard
from fzero.runtime.step_spec import MismatchError
from fzero.simulation import LockstepRanks
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_agreement import agree, files_of
from fzero.storage.file_tensor import StoredTensor, StoreError, handles_of
from fzero.storage.promised import error_of
from fzero.storage.state_files import StateFiles
from sharding import DATA
from sharding.views import torch_dtype

AnyStep = TrainStep | LockstepRanks
_FIX = "pass the step that made the state"


def reshard(
    state: TrainState[Tensor] | None, old: AnyStep, new: AnyStep
) -> TrainState[Tensor] | None:
    """A state of `new` that continues from `state`, a state of `old`; this process's
    part.

    Parameters, master, optimizer state, counters, loss scale and module buffers are
    moved bit by bit; under other dtypes, parameters are rounded from the master. A rank
    keeps its random state; a new rank starts as in `init`. Gradients are zeros, because
    a step collects them anew. The loss scale is kept if both steps scale dynamically,
    else it is the new step's initial one. States of comm hooks are kept where the same
    ranks send the same flat buffers through the same hooks, in any stage; otherwise
    they start anew, with a warning. The given state is not changed.
    A parameter that was frozen and is now trained keeps its values, and its optimizer
    state starts as in `init`. One that was trained and is now frozen keeps only its
    values.
    The result has the placements of `new`: tensors for files are written as they
    arrive, and tensors in files are read as they are sent, so that no full tensor is in
    memory.

    *Collective:* every process of the default group, whichever of the two jobs it is
    in. Sends `plan_reshard(…).sent_nbytes`, unit by unit, in one message per pair of
    processes, dtype and kind (shards or replicated tensors), and the 0-d tensors once.
    Besides the two states a process holds its messages of one unit.

    Args:
        state: this process's part; None where it is not in the old job.
        old: the step of `state`. In a process outside the old job, a step on
            `AbstractAxis("data", W)`, or of a pipeline on `AbstractAxis.of(mesh)`.
        new: the step to continue with, of the same model, on any number of pipeline
            stages. In a process outside the new job, as `old`. Simulated steps
            (`simulate`) have simulated states, and send nothing.

    Returns:
        This process's part; None where it is not in the new job.

    Raises:
        MismatchError: the processes have different steps (on all of them).
        ValueError: the state is not one of `old`, the models or optimizers differ, or a
            rank is missing (on all).
        StoreError, MemoryError: files cannot be made, read or written (on all); the
            given state is unchanged.
        CollectiveError: another process died, or does not take part.
    """
    _check_steps(old, new, TrainStep | LockstepRanks)
    if isinstance(old, LockstepRanks) or isinstance(new, LockstepRanks):
        return _reshard_simulated(state, old, new)
    axis = job()
    for step in (new, old):
        if isinstance(step.runtime.ranks, ProcessAxis) and step.runtime.ranks.observe is not None:
            axis = replace(axis, observe=step.runtime.ranks.observe)
    store_barrier("fzero.reshard", axis)
    plans = staged_plan(old), staged_plan(new)
    mine = _report(state, old, new, plans)
    world = [
        _Report(*values)
        for values in collectives.exchange(tuple(mine), axis, label=Label("compare"))
    ]
    _check_reports(world)
    _warn_of_hooks(old, new)
    job_ranks = [JobRank(report.old, report.new) for report in world]
    plan = plan_reshard(*plans, job_ranks=job_ranks, rng=_rng_specs(old, new))
    numbers = _merged(report.numbers for report in world)
    chosen = chosen_numbers(plan.numbers, numbers)
    # A stage without parameters has no files, and agrees with the others.
    has_files = [
        any(p.in_file for plan in staged.stages for p in plan.placements.values())
        for staged in plans
    ]
    files = _make_files(new, axis) if has_files[1] else None
    made = None
    if mine.new is not None:
        made = new_state.blank(
            new, new.data_rank, chosen, keeps_scale=new_state.keep_scale(old, new), files=files
        )
    sources = {} if state is None else by_name(state)
    targets = {} if made is None else by_name(made)
    for round_ in plan.rounds:
        _run(round_, plan, sources, targets, axis, new.device)
    if made is not None and mine.new is not None:
        new_state.narrow(made, new, new.data_rank)
        new_state.begin_anew(made, new, new.data_rank, plan.anew)
        new_state.rescale(made, numbers)
    if any(has_files):
        agree(files, axis, error=next((x.files.cause for x in handles_of(state)), None))
    return None if made is None else put(made, new)


def _make_files(new: TrainStep, axis: ProcessAxis) -> StateFiles | None:
    """The files of this process's part of the new state. *Collective:* every process,
    whichever job it is in.
    """
    files, error = None, None
    if isinstance(new.runtime.ranks, ProcessAxis):
        try:
            files = new.runtime.offload.make_files(new.runtime.mesh.world)
        except (StoreError, MemoryError) as raised:
            error = raised
    agree(files, axis, error=error)
    return files


def _reshard_simulated(
    state: TrainState[Tensor] | None, old: AnyStep, new: AnyStep
) -> TrainState[Tensor]:
    if not isinstance(old, LockstepRanks) or not isinstance(new, LockstepRanks):
        raise ValueError(
            f"reshard: both steps must be simulated or neither, got {type(old).__name__} and "
            f"{type(new).__name__}; simulate the other step too"
        )
    if state is None:
        raise ValueError(
            "reshard: the state of simulated steps must be that of all ranks, got None; pass the "
            "state that the old step returned"
        )
    made = new.joined(_moved(old.states_of(state), old.steps, new.steps))
    return put(made, new) if any(step.runtime.offload.has_files for step in new.steps) else made


def reshard_all(
    states: Sequence[TrainState[Tensor]], old: TrainStep, new: TrainStep
) -> list[TrainState[Tensor]]:
    """`reshard` in one process: from the states of all ranks of `old` to those of all
    ranks of `new`. Sends nothing.

    The new states are on the device, wherever `new` wants them; `fzero.place` brings
    them there.

    Args:
        states: in rank order.
        old, new: steps of one model; both may be on a `AbstractAxis` axis.

    Raises:
        ValueError: there is not one state of `old` for each rank, or the models or
            optimizers differ.
    """
    _check_steps(old, new, TrainStep)
    check_kind(
        "states", states, Sequence, "a list of states", "pass those of all ranks, in rank order"
    )
    if len(states) != old.world_size:
        raise ValueError(
            f"reshard_all: needs the states of all {old.world_size} ranks of the old step in rank "
            f"order, got {len(states)}; pass them all"
        )
    return _moved(states, _of_ranks(old), _of_ranks(new))


def staged_plan(step: TrainStep) -> StagedPlan:
    """The plan of the whole job of a step, for `plan_reshard`: of all stages, if it is
    a pipeline. Sends nothing.
    """
    return parallelism_of(step.spec).staged(step.spec, step.mesh, step.plan)


def _of_ranks(step: TrainStep) -> list[TrainStep]:
    """The step of every rank, as far as they differ."""
    if parallelism_of(step.spec).is_uniform:
        return [step] * step.world_size
    return [
        TrainStep(step.spec, AbstractAxis.of(step.mesh, rank)) for rank in range(step.world_size)
    ]


def _moved(
    states: Sequence[TrainState[Tensor]], olds: Sequence[TrainStep], news: Sequence[TrainStep]
) -> list[TrainState[Tensor]]:
    """The states of all ranks of the new job, from the steps of all ranks of both."""
    old, new = olds[0], news[0]
    _check_devices(old, new)
    _warn_of_hooks(old, new)
    for state, step in zip(states, olds, strict=True):
        step.runtime.form.check(state, fix=_FIX)
    plan = plan_reshard(staged_plan(old), staged_plan(new), rng=_rng_specs(old, new))
    numbers = _merged(
        numbers_of(state) for rank, state in enumerate(states) if _data_rank(old, rank) == 0
    )
    chosen = chosen_numbers(plan.numbers, numbers)
    ranks = [_data_rank(new, rank) for rank in range(new.world_size)]
    keeps = new_state.keep_scale(old, new)
    made = [
        new_state.blank(step, rank, chosen, keeps_scale=keeps)
        for step, rank in zip(news, ranks, strict=True)
    ]
    sources, targets = [by_name(state) for state in states], [by_name(state) for state in made]
    for flow in (flow for round_ in plan.rounds for flow in round_.flows):
        for move in plan.moves(flow):
            source = sources[move.source_rank][flow.source.name][
                move.source_start : move.source_stop
            ]
            targets[move.target_rank][flow.target.name][move.target_start : move.target_stop].copy_(
                source
            )
    for state, step, rank in zip(made, news, ranks, strict=True):
        new_state.narrow(state, step, rank)
        new_state.begin_anew(state, step, rank, plan.anew)
        new_state.rescale(state, numbers)
    return made


def _data_rank(step: TrainStep, rank: int) -> int:
    """The number of a rank of the job among those of its stage."""
    return rank if parallelism_of(step.spec).is_uniform else step.mesh.coordinate(rank)[DATA]


def _merged(of_ranks: Iterable[Numbers | None]) -> Numbers:
    """The numbers of all stages; those that several ranks have are equal."""
    merged: Numbers = {}
    for numbers in of_ranks:
        merged |= numbers or {}
    return merged


# --- the executor on real processes ---------------------------------------------------------------


class _Span(NamedTuple):
    """Elements [start, stop) of a flat tensor."""

    name: str
    start: int
    stop: int


class _Message(NamedTuple):
    """A message of a round. Tensors with other numbers of shards are in others, so that
    equal messages are packed once.
    """

    process: int
    dtype: str
    num_shards: int


def _run(
    round_: ReshardRound,
    plan: ReshardPlan,
    sources: Mapping[str, StoredTensor],
    targets: Mapping[str, StoredTensor],
    axis: ProcessAxis,
    device: torch.device,
) -> None:
    """Makes the copies within this process, and exchanges the messages of one round,
    from `device` to `device`.
    """
    sent: dict[_Message, list[_Span]] = {}
    received: dict[_Message, list[_Span]] = {}
    for flow in round_.flows:
        for move in plan.moves(flow, axis.rank):
            source = _Span(flow.source.name, move.source_start, move.source_stop)
            target = _Span(flow.target.name, move.target_start, move.target_stop)
            if move.source_rank == move.target_rank:
                write(
                    targets[target.name],
                    target.start,
                    read(sources[source.name], source.start, source.stop),
                )
                continue
            is_sent = move.source_rank == axis.rank
            other = move.target_rank if is_sent else move.source_rank
            spans_of, span = (sent, source) if is_sent else (received, target)
            spans_of.setdefault(_Message(other, flow.dtype, flow.target.num_shards), []).append(
                span
            )
    packed: dict[tuple[str, tuple[_Span, ...]], Tensor] = {}
    outgoing, incoming = [], []
    for message, spans in sent.items():
        key = message.dtype, tuple(spans)
        if key not in packed:
            parts = (read(sources[span.name], span.start, span.stop) for span in spans)
            sent_values = [part.to(device, torch_dtype(message.dtype)) for part in parts]
            packed[key] = torch.cat(sent_values) if len(sent_values) > 1 else sent_values[0]
        outgoing.append((message.process, packed[key]))
    for message, spans in received.items():
        numel = sum(span.stop - span.start for span in spans)
        incoming.append(
            (message.process, torch.empty(numel, dtype=torch_dtype(message.dtype), device=device))
        )
    collectives.swap(incoming, outgoing, axis, label=Label("reshard", round_.name))
    for (_, received_values), spans in zip(incoming, received.values(), strict=True):
        by_span = torch.split(received_values, [span.stop - span.start for span in spans])
        for span, values in zip(spans, by_span, strict=True):
            write(targets[span.name], span.start, values)


# --- checks ---------------------------------------------------------------------------------------


class _Report(NamedTuple):
    """The values that every process sends to all others before it starts."""

    old: int | None
    new: int | None
    steps: int
    """A checksum of the two steps' plans."""
    numbers: Numbers | None
    """The numbers of the first rank of each old stage."""
    problem: str | None


def _report(
    state: TrainState[Tensor] | None,
    old: TrainStep,
    new: TrainStep,
    plans: tuple[StagedPlan, StagedPlan],
) -> _Report:
    """Checks this process. An error is reported and not raised, because the others
    would wait.
    """
    old_rank, new_rank = (
        None if isinstance(step.runtime.ranks, AbstractAxis) else step.rank for step in (old, new)
    )
    forms = [[staged.mesh, *map(_form_of, staged.stages)] for staged in plans]
    numbers, problem = None, None
    try:
        _check_devices(old, new)
        if (state is None) != (old_rank is None):
            raise ValueError(
                f"state: must be this process' part if `old` runs on ranks, and None if `old` is "
                f"on an AbstractAxis, got {'None' if state is None else 'a state'} "
                f"with {old.runtime.ranks}; pass the step that made it"
            )
        if state is not None:
            old.runtime.form.check(state, fix=_FIX)
            files_of(state)
            if (error := error_of(state)) is not None:  # waits for its update
                raise error
            numbers = numbers_of(state) if old.data_rank == 0 else None
    except (ValueError, StoreError) as error:
        problem = str(error)
    return _Report(old_rank, new_rank, zlib.crc32(repr(forms).encode()), numbers, problem)


def _form_of(plan: Plan) -> tuple[Any, ...]:
    return (
        plan.stage,
        plan.mesh,
        plan.flat_buffers,
        plan.optimizer,
        plan.buffers,
        str(plan.comm_hooks),
    )


def _check_reports(world: Sequence[_Report]) -> None:
    """Raises on every process if any has reported a problem, or their steps differ."""
    problems = [
        f"on process {process}: {report.problem}"
        for process, report in enumerate(world)
        if report.problem
    ]
    if problems:
        raise ValueError(f"reshard: {problems[0]}")
    differing = [process for process, report in enumerate(world) if report.steps != world[0].steps]
    if differing:
        raise MismatchError(
            f"reshard: old and new must be the same two steps on every process, and those of "
            f"processes {differing} have other plans than those of process 0; make them from the "
            f"same model and configurations (and freeze the layers of a pipeline where they are "
            f"made)"
        )


def _check_steps(old: object, new: object, kinds: Any) -> None:
    for which, step in (("old", old), ("new", new)):
        if not isinstance(step, kinds):
            raise ValueError(
                f"reshard: {which} must be a step, of "
                f"make_train_step{' or of simulate' * (kinds != TrainStep)}, got "
                f"{type(step).__name__}; pass the one that "
                f"{'made the state' if which == 'old' else 'goes on with it'}"
            )


def _check_devices(old: TrainStep, new: TrainStep) -> None:
    if old.device.type != new.device.type:
        raise ValueError(
            f"reshard: both steps must be on one kind of device, got {old.device} and "
            f"{new.device}; move the model of one"
        )


def _warn_of_hooks(old: TrainStep, new: TrainStep) -> None:
    num_kept, num_new = (
        len(kept_hook_states(old.plan, new.plan)),
        len(optree.tree_leaves(new.plan.hook_states)),
    )
    if old.plan.hook_states and num_kept < num_new:
        warnings.warn(
            f"reshard: states of comm hooks (errors fed back) are dropped where ranks, flat "
            f"buffers or comm hooks change: from {old.plan.comm_hooks} on {old.world_size} ranks "
            f"to {new.plan.comm_hooks} on {new.world_size}",
            stacklevel=3,
        )


def _rng_specs(old: TrainStep, new: TrainStep) -> dict[str, Any]:
    return {kind: spec for kind, spec in new.specs.rng.items() if kind in old.specs.rng}
