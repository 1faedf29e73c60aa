"""`load`: reads a saved state into a step of any size, stage or layout.

    state, client, _ = fzero.load("checkpoints", step=step)

Each rank reads the ranges that it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.checkpoint import folders as files, layout
from fzero.checkpoint.agreement import check_same_folder, check_step, of_rank_0, together
from fzero.checkpoint.dcp_format import DcpReader, Fragment
from fzero.checkpoint.layout import Slice, Stored, StoredSlice
from fzero.checkpoint.torch_jobs import TorchJob, is_torch_job, starts_of
from fzero.common.arguments import check_no_inference, check_path
from fzero.comms.hangs.failures import store_barrier
from fzero.model.model_check import listed
from fzero.plans.plan import Plan
from fzero.resharding.new_state import begin_anew, blank, by_name, chosen_numbers, narrow, rescale
from fzero.resharding.place import place
from fzero.resharding.reshard import AnyStep
from fzero.simulation import LockstepRanks
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_agreement import agree
from fzero.storage.state_files import StateFiles as Scratch


class Loaded(NamedTuple):
    """The result of `load`."""

    state: TrainState[Tensor]
    """This rank's part of the state, for the given step."""
    client: Any
    """The argument `client` of `save`; None from another job."""
    path: Path
    """The checkpoint that was loaded."""


def load(dir: str | Path, *, step: AnyStep) -> Loaded:
    """A state of `step` that continues from the one saved in `dir`; this rank's part.

    Ranks, stage, mesh, units, parameter groups, dtypes and frozen parameters may differ
    from those of the saving job, under the rules of `reshard`: every element is the
    same, and neither masters nor optimizer state may become narrower. Parameters that
    were frozen and are now trained get new optimizer state; a warning on rank 0 names
    them. With the same number of ranks and configuration, training continues bit for
    bit. A rank continues the random state of the same rank; a rank that the saving job
    did not have starts as in `init`. Gradients are zeros.

    *Collective:* every rank of the step; sends some numbers. Each rank reads the ranges
    that it holds, and checks their bytes.

    A folder that torch.distributed.checkpoint wrote for another job (FSDP2, DDP) is
    loaded, too, if it holds the model and the optimizer (`get_model_state_dict` and
    `get_optimizer_state_dict`, under any two keys). The job's parameters are the
    masters. Optimizer state and its counts continue; hyper-parameters are those of
    `step`, and the random state is as in `init`.

    Args:
        dir: a folder of checkpoints, whose `latest` is loaded, or one checkpoint in it
            (`dir/step-500`).
        step: to continue with, of the same model.

    Raises:
        NoCheckpointError: on every rank: no save to `dir` was ever completed. It is a
            CheckpointError.
        CheckpointError: on every rank: the checkpoint is incomplete, has a newer
            format, or differs from the bytes written (the message has file and tensor).
        ValueError: on every rank: the model or the optimizer differs, or a tensor would
            become narrower.
        CollectiveError: another rank died, or does not take part.
    """
    check_path("dir", dir)
    check_step(step)
    check_no_inference("load")
    return load_by_ranks(
        "fzero.load",
        dir,
        step,
        lambda path: path if is_torch_job(path) else files.find(path),
        _load,
    )


def load_partly(dir: str | Path, *, step: AnyStep) -> tuple[Loaded, list[str]]:
    """As `load`, also of a checkpoint without its frozen parameters
    (`save(without=…)`); returns their names, too.

    The caller gives the state their values.
    """
    left: list[str] = []
    return load_by_ranks("fzero.load", dir, step, files.find, partial(_load, left=left)), sorted(
        {*left}
    )


def load_by_ranks(
    call: str,
    dir: str | Path,
    step: AnyStep,
    find: Callable[[Path], Path],
    read: Callable[[Path, TrainStep, Scratch | None], Loaded],
) -> Loaded:
    """Each rank's result of `read`, from the checkpoint that rank 0 finds.
    *Collective:* every rank of the step.
    """
    if isinstance(step, LockstepRanks):
        loaded = step.on_each(lambda rank: load_by_ranks(call, dir, step.steps[rank], find, read))
        return loaded[0]._replace(state=step.joined([of_rank.state for of_rank in loaded]))
    axis = step.runtime.world
    store_barrier(call, axis)
    check_same_folder(axis, dir, call.rpartition(".")[2])
    path = Path(of_rank_0(axis, lambda: str(find(Path(dir)))))
    scratch = together(axis, partial(step.runtime.offload.make_files, step.runtime.mesh.world))
    own = together(axis, lambda: read(path, step, scratch))
    return own._replace(state=placed(own.state, step, scratch))


def placed(
    state: TrainState[Tensor], step: TrainStep, scratch: Scratch | None
) -> TrainState[Tensor]:
    """A state that was read, moved to the step's placements. *Collective* where there
    are files: raises if any failed.
    """
    if scratch is not None:
        agree(scratch, step.runtime.mesh.world)
    return place(state, step)


class Saved(NamedTuple):
    """The source of a state; `Contents` documents the fields that both have."""

    source: Source
    numbers: Mapping[str, float | int]
    optimizer: Mapping[str, Any]
    hook_states: Mapping[str, str]
    scales_dynamically: bool
    left_out: Sequence[str] = ()


def _load(
    path: Path, step: TrainStep, scratch: Scratch | None, left: list[str] | None = None
) -> Loaded:
    """`left` receives the names of parameters that are not stored; None allows none."""
    if is_torch_job(path):
        return _load_torch_job(path, step, scratch)
    scales = files.read_manifest(path)["scales_dynamically"]
    contents, found = opened(path)
    _warn_of_transforms(contents.transforms, step)
    missing = contents.left_out
    if missing and left is None:
        raise files.CheckpointError(
            f"load: {path} must hold all parameters, and was saved without {listed(missing)} "
            f"(exclude_frozen_parameters); load it with load_checkpoint of an engine, whose model "
            f"has them"
        )
    (left if left is not None else []).extend(missing)
    numbers, optimizer, hook_states = contents.numbers, contents.optimizer, contents.hook_states
    saved = Saved(found, numbers, optimizer, hook_states, scales, missing)
    client = files.read_client(path)
    return Loaded(restored(saved, step, scratch), client, path)


def _warn_of_transforms(before: Mapping[str, str] | None, step: TrainStep) -> None:
    """Warns on rank 0 of transforms with which the model computes other numbers than in
    the job that saved.

    Args:
        before: the settings of that job's transforms; None where it did not store them.
    """
    now = step.runtime.changes.compared
    if before is None or step.runtime.rank:
        return
    lines = [
        f"{name!r} was {_first_difference(before.get(name), now.get(name))} and is "
        f"{_first_difference(now.get(name), before.get(name))}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if not lines and [*before] != [*now]:
        lines = [f"their order was {', '.join(before)} and is {', '.join(now)}"]
    if lines:
        warnings.warn(
            f"load: the model had other transforms in the job that saved, so it computes other "
            f"numbers of the same weights: {'; '.join(lines)}; pass the transforms of that job, "
            f"unless you mean to change them",
            stacklevel=7,
        )


def _first_difference(text: str | None, other: str | None) -> str:
    """A transform's settings in a message: the first line that differs from the other
    text.
    """
    if text is None:
        return "not there"
    lines, others = text.splitlines(), (other or "").splitlines()
    return next((line for line in lines if line not in others), text) or "there"


def _load_torch_job(path: Path, step: TrainStep, scratch: Scratch | None) -> Loaded:
    job = TorchJob(path, step.plan, step.runtime.aliases)
    if not job.counts_updates and step.runtime.rank == 0:
        warnings.warn(
            f"load: {path} has no count of updates (SGD keeps none), so state.step is 1 and a "
            f"learning-rate schedule starts there; give the state the right one, "
            f"state._replace(step=…)",
            stacklevel=6,
        )
    return Loaded(
        restored(Saved(job, job.numbers, job.optimizer, {}, False), step, scratch), None, path
    )


def opened(folder: Path) -> tuple[files.StoredContents, DcpReader]:
    """The contents of a checkpoint of fzero, and the reader of its tensors.

    Raises:
        CheckpointError: a file is damaged, or they do not fit each other.
    """
    contents = files.read_contents(folder)
    found = DcpReader(folder, map(Slice.of, contents.slices))
    wanted = {
        layout.key_of("params", name) for name in (*contents.names.values(), *contents.optimizer)
    }
    for name, state in contents.optimizer.items():
        kept = [] if state is None else state.get("keeps")
        if not isinstance(kept, list) or (
            state is not None and not isinstance(state.get("kind"), str)
        ):
            raise files.is_not_ours(
                folder / files.CONTENTS, f"optimizer.{name}: must have 'kind' and 'keeps'"
            )
        wanted |= {layout.key_of(path, name) for path in kept}
    left = {layout.key_of("params", name) for name in contents.left_out}
    if absent := sorted(wanted - found.stored.keys() - contents.numbers.keys() - left):
        raise files.is_not_ours(folder / files.CONTENTS, f"{absent[0]!r} is not stored beside it")
    if type(contents.numbers.get("state.step")) is not int:
        raise files.is_not_ours(
            folder / files.CONTENTS, "numbers must have the number of updates, 'state.step'"
        )
    return contents, found


def restored(saved: Saved, step: TrainStep, scratch: Scratch | None) -> TrainState[Tensor]:
    """A state of `step` that continues from a saved one; this rank's part.

    A module buffer that is not in the model's `state_dict` may be missing; then the
    model's own value is used.

    Raises:
        ValueError: the model or the optimizer differs, or a tensor would become
            narrower.
        CheckpointError: a tensor cannot be read.
    """
    plan, rank, source = step.plan, step.runtime.rank, saved.source
    layout.check_names(plan, (*step.runtime.aliases, *step.runtime.job.names), source.stored)
    layout.check_kinds(plan, saved.optimizer)
    frozen = {name for name, kept in saved.optimizer.items() if kept is None}
    _warn_of_frozen(plan, frozen, rank)
    numbers = chosen_numbers(layout.sources_of_numbers(plan, frozen), dict(saved.numbers))
    kept = {*step.runtime.stored_names.values()}
    missing = [
        n for n in plan.buffers if n not in kept and layout.key_of("params", n) not in source.stored
    ]
    wanted: dict[str, list[StoredSlice]] = {}
    for quantity, parts in layout.parts_to_load(
        plan, rank, source.stored, without=(*missing, *saved.left_out), frozen=frozen
    ):
        wanted.setdefault(quantity, []).extend(parts)
    keeps_scale = saved.scales_dynamically and step.runtime.rules.scaling.dynamic
    state = blank(step, rank, numbers, keeps_scale=keeps_scale, files=scratch)
    wanted["own"] = layout.parts_of_own(rank, _kept_own(step, saved.hook_states), source.stored)
    read_into(state, wanted.values(), source)
    for name, value in step.runtime.builder.values(missing, None, None).items():
        state.buffers[name].copy_(value)
    narrow(state, step, rank)
    begin_anew(state, step, rank, frozen)
    rescale(state, numbers)
    return state


def _warn_of_frozen(plan: Plan, frozen: Collection[str], rank: int) -> None:
    """Warns on rank 0 of parameters that are frozen in only one of the two jobs."""
    trained = {name: b.trainable for b in plan.flat_buffers for name in b.layout.names}
    anew = [name for name, is_trained in trained.items() if is_trained and name in frozen]
    left = [name for name, is_trained in trained.items() if not is_trained and name not in frozen]
    changes = (
        [f"the optimizer state of {listed(anew)} begins anew, because it was not saved"]
        if anew
        else []
    )
    changes += (
        [f"that of {listed(left)} is not loaded, because these are frozen now"] if left else []
    )
    if changes and rank == 0:
        warnings.warn(
            f"load: other parameters were frozen in the job that saved: {'; '.join(changes)}",
            stacklevel=8,
        )


def read_into(
    state: TrainState[Tensor], groups: Iterable[Iterable[StoredSlice]], found: Source
) -> None:
    """Reads parts of a state, group by group; parts of tensors in files one by one."""
    tensors = by_name(state)
    for parts in groups:
        spans = [(part, layout.span(tensors[part.tensor], part)) for part in parts]
        found.read((part, x) for part, x in spans if isinstance(x, Tensor))
        for part, x in spans:
            if not isinstance(x, Tensor):
                values = torch.empty(x.numel(), dtype=x.tensor.dtype)
                found.read([(part, values)])
                x.copy_(values)


class Source(Protocol):
    """Stored tensors that are read in ranges."""

    @property
    def stored(self) -> Mapping[str, Stored]: ...

    def read(self, fragments: Iterable[Fragment]) -> None:
        """Fills each flat tensor with the elements of its part, cast to its dtype."""


def _kept_own(step: TrainStep, hook_states: Mapping[str, str]) -> dict[str, Any]:
    """The specs of this rank's own tensors that can be continued."""
    own, now = layout.own_specs(step.plan, step.specs.rng), layout.describe_hook_states(step.plan)
    forgotten = [name for name in now if hook_states.get(name) != now[name]]
    if hook_states and forgotten:
        warnings.warn(
            f"load: states of comm hooks (errors fed back) are dropped where ranks, flat buffers "
            f"or comm hooks change: now {step.plan.comm_hooks} on {step.world_size} ranks",
            stacklevel=4,
        )
    return {name: spec for name, spec in own.items() if name not in forgotten}


def starts(dir: str | Path) -> dict[str, int]:
    """When the optimizer state of each parameter in a checkpoint began, for
    `make_train_step(after=...)`.

    Args:
        dir: the folder of `fzero.save`, or that of one of its checkpoints.

    Raises:
        CheckpointError: there is no checkpoint.

    Returns:
        A number per parameter, equal for parameters whose optimizer states count the
        same updates.
    """
    if is_torch_job(Path(dir)):
        return starts_of(Path(dir))
    contents, _ = opened(files.find(Path(dir)))
    return layout.stored_starts(contents.optimizer, contents.numbers)
