"""Loads a saved state into a step of another size, stage or layout.

    state, client, _ = fzero.load("checkpoints", step=step)

Each rank reads the ranges that it holds.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.checkpoint import folders as files
from fzero.checkpoint.agreement import check_same_folder, check_step, of_rank_0, together
from fzero.checkpoint.layout import (
    Slice,
    Stored,
    StoredSlice,
    check_names,
    check_told,
    describe_hook_states,
    key_of,
    own_specs,
    parts_of_own,
    parts_to_load,
    sources_of_numbers,
    span,
    stored_starts,
)
from fzero.common.arguments import check_no_inference, check_path
from fzero.comms.failures import meet
from fzero.plans.plan import Plan
from fzero.resharding.new_state import begin_anew, blank, by_name, chosen_numbers, narrow, rescale
from fzero.resharding.place import place
from fzero.resharding.reshard import AnyStep
from fzero.runtime.file_agreement import agree
from fzero.runtime.trainability import listed
from fzero.simulation import LockstepRanks, stacked
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_tensor import StateFiles as Scratch

if TYPE_CHECKING:
    from fzero.checkpoint.dcp_format import Fragment  # PyTorch takes a second to import what it imports


class Loaded(NamedTuple):
    """What `load` gives."""

    state: TrainState[Tensor]
    """Of the step that it was loaded for, this rank's part."""
    client: Any
    """What `save` was given as `client`."""
    path: Path
    """The checkpoint that it was loaded from."""


def load(dir: str | Path, *, step: AnyStep) -> Loaded:
    """The state of `step` that continues where the one saved in `dir` stands, this rank's part.

    Ranks, stage, mesh, units, parameter groups, dtypes and what is frozen may be others than those that saved, by the rules of
    `reshard`: every element is the same, but that neither masters nor optimizer state may become narrower. What was frozen and
    is trained begins anew, and a warning on rank 0 names it. On as many ranks with the same
    configuration training goes on bit for bit. A rank continues the random state of the same rank, a further one starts as in
    `init`; gradients are zeros.

    *Collective:* every rank of the step; sends some numbers. Each rank reads what it holds, and checks the bytes that it reads.

    Args:
        dir: a folder that was saved to, whose `latest` is taken, or one checkpoint of it (`dir/step-500`).
        step: to continue with, of the same model.

    Raises:
        CheckpointError: told on every rank: there is no checkpoint, it was not written to its end, is of a newer format, or
            holds other bytes than were written (names file and tensor).
        ValueError: told on every rank: the model or the optimizer is another, or something would become narrower.
        CollectiveError: another rank died or did not come.
    """
    check_path("dir", dir)
    check_step(step)
    check_no_inference("load")
    if isinstance(step, LockstepRanks):
        loaded = step.on_each(lambda rank: load(dir, step=step.steps[rank]))
        return loaded[0]._replace(state=stacked([of_rank.state for of_rank in loaded]))
    axis = step.runtime.mesh.world
    meet("fzero.load", axis)
    check_same_folder(axis, dir, "load")
    path = Path(of_rank_0(axis, lambda: str(files.find(Path(dir)))))
    scratch = step.runtime.offload.make_files(axis)
    own = together(axis, lambda: _load(path, step, scratch))
    return own._replace(state=placed(own.state, step, scratch))


def placed(state: TrainState[Tensor], step: TrainStep, scratch: Scratch | None) -> TrainState[Tensor]:
    """A state that was read, where the step wants it. *Collective* where there are files, which may have failed."""
    if scratch is not None:
        agree(scratch, step.runtime.mesh.world)
    return place(state, step)


class Saved(NamedTuple):
    """What a state is made from. `Contents` says what the fields are that it has, too."""

    source: Source
    numbers: Mapping[str, float | int]
    optimizer: Mapping[str, Any]
    hook_states: Mapping[str, str]
    scales_dynamically: bool


def _load(path: Path, step: TrainStep, scratch: Scratch | None) -> Loaded:
    from fzero.checkpoint.dcp_format import DcpReader

    manifest = files.read_manifest(path)
    files.check_beside(path, manifest)
    contents = json.loads((path / files.CONTENTS).read_bytes())
    found = DcpReader(path, map(Slice.of, contents["slices"]))
    saved = Saved(
        found,
        contents["numbers"],
        contents["optimizer"],
        contents.get("hook_states", {}),
        manifest["scales_dynamically"],
    )
    client = files.read_client(path)
    return Loaded(restored(saved, step, scratch), client, path)


def restored(saved: Saved, step: TrainStep, scratch: Scratch | None) -> TrainState[Tensor]:
    """The state of `step` that continues from what was saved, this rank's part.

    A module buffer that is not in the model's `state_dict` may be missing, and is the model's own then.

    Raises:
        ValueError: the model or the optimizer is another, or something would become narrower.
        CheckpointError: something cannot be read.
    """
    plan, rank, source = step.plan, step.rank, saved.source
    check_names(plan, step.runtime.aliases, source.stored)
    check_told(plan, saved.optimizer)
    frozen = {name for name, kept in saved.optimizer.items() if kept is None}
    _tell_of_frozen(plan, frozen, rank)
    numbers = chosen_numbers(sources_of_numbers(plan, frozen), dict(saved.numbers))
    kept = {*step.runtime.stored_names.values()}
    missing = [n for n in plan.buffers if n not in kept and key_of("params", n) not in source.stored]
    wanted: dict[str, list[StoredSlice]] = {}
    for quantity, parts in parts_to_load(plan, rank, source.stored, without=missing, frozen=frozen):
        wanted.setdefault(quantity, []).extend(parts)
    keeps_scale = saved.scales_dynamically and step.runtime.scaling.dynamic
    state = blank(step, rank, numbers, keeps_scale=keeps_scale, files=scratch)
    wanted["own"] = parts_of_own(rank, _kept_own(step, saved.hook_states), source.stored)
    read_into(state, wanted.values(), source)
    for name, value in step.runtime.builder.values(missing, None, None).items():
        state.buffers[name].copy_(value)
    narrow(state, step, rank)
    begin_anew(state, step, rank, frozen)
    rescale(state, numbers)
    return state


def _tell_of_frozen(plan: Plan, frozen: Collection[str], rank: int) -> None:
    """Warns on rank 0 of what was frozen in the job that saved and is trained here, and the other way round."""
    trained = {name: b.trainable for b in plan.flat_buffers for name in b.layout.names}
    anew = [name for name, is_trained in trained.items() if is_trained and name in frozen]
    left = [name for name, is_trained in trained.items() if not is_trained and name not in frozen]
    told = [f"the optimizer state of {listed(anew)} begins anew, for frozen parameters have none"] if anew else []
    told += [f"that of {listed(left)} is left, which are frozen now"] if left else []
    if told and rank == 0:
        warnings.warn(f"load: other parameters were frozen in the job that saved: {'; '.join(told)}", stacklevel=7)


def read_into(state: TrainState[Tensor], groups: Iterable[Iterable[StoredSlice]], found: Source) -> None:
    """Reads parts of a state, group by group; those of tensors that live in files one by one."""
    tensors = by_name(state)
    for parts in groups:
        spans = [(part, span(tensors[part.tensor], part)) for part in parts]
        found.read((part, x) for part, x in spans if isinstance(x, Tensor))
        for part, x in spans:
            if not isinstance(x, Tensor):
                values = torch.empty(x.numel(), dtype=x.tensor.dtype)
                found.read([(part, values)])
                x.copy_(values)


class Source(Protocol):
    """What tensors are read from, a range at a time."""

    @property
    def stored(self) -> Mapping[str, Stored]: ...

    def read(self, fragments: Iterable[Fragment]) -> None:
        """Fills each flat tensor with the elements of its part, cast to its dtype."""


def _kept_own(step: TrainStep, hook_states: Mapping[str, str]) -> dict[str, Any]:
    """What this rank has for itself and may go on with."""
    own, now = own_specs(step.plan, step.specs.rng), describe_hook_states(step.plan)
    forgotten = [name for name in now if hook_states.get(name) != now[name]]
    if hook_states and forgotten:
        warnings.warn(
            f"load: what reductions lost so far is forgotten where ranks, flat buffers or comm hooks change: now "
            f"{step.plan.comm_hooks} on {step.world_size} ranks",
            stacklevel=4,
        )
    return {name: spec for name, spec in own.items() if name not in forgotten}


def starts(dir: str | Path) -> dict[str, int]:
    """When the optimizer state of each parameter in a checkpoint began, for `make_train_step(after=...)`.

    Args:
        dir: the folder of `fzero.save`, or that of one of its checkpoints.

    Raises:
        CheckpointError: there is no checkpoint.

    Returns:
        By parameter a number, the same for parameters whose optimizer state counts the same updates.
    """
    contents = files.read_contents(files.find(Path(dir)))
    return stored_starts(contents["optimizer"], contents["numbers"])
