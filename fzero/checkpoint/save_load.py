"""How is a training state saved, and loaded by a job of another size, stage or layout?

    fzero.save(state, "checkpoints", step=step, client={"samples": 4096}, keep=3)
    state, client, _ = fzero.load("checkpoints", step=step)

Every rank writes a file with the parts of the state that are its own, and nothing is gathered (`fzero.checkpoint.layout`
says which parts, `fzero.checkpoint.dcp_format` how they become files). Rank 0 then adds what the files hold, and makes the
whole visible at once (`fzero.checkpoint.folders`). The ranks tell each other through files that they are done, so that a
save needs no collective while the next steps run: `start_save` copies this rank's parts and returns.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fzero.checkpoint import folders as files
from fzero.checkpoint.folders import CheckpointError
from fzero.checkpoint.layout import (
    Slice,
    Stored,
    StoredSlice,
    check_names,
    check_told,
    describe_hook_states,
    key_of,
    nbytes_of,
    numbers_by_name,
    own_specs,
    parts_of_own,
    parts_to_load,
    parts_to_save,
    sources_of_numbers,
    stored_by,
    told_of,
)
from fzero.common.arguments import check_kind, check_no_inference, check_path
from fzero.common.pickles import load_tensors
from fzero.comms import collectives
from fzero.comms.axes import Bound
from fzero.comms.failures import meet
from fzero.comms.records import Label
from fzero.plans.plan import Plan
from fzero.resharding.place import place
from fzero.resharding.reshard import AnyStep, begin_anew, blank, by_name, chosen_numbers, narrow, numbers_of, rescale
from fzero.runtime.offload import agree
from fzero.runtime.trainability import listed
from fzero.simulation import LockstepRanks, stacked, unstacked
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_store import StoreError
from fzero.storage.file_tensor import FilePart, StateFiles as Scratch, part_of
from fzero.storage.shard_io import Leaf

if TYPE_CHECKING:
    from fzero.checkpoint.dcp_format import Fragment  # PyTorch takes a second to import what it imports

T = TypeVar("T")

FEW_BYTES = 1 << 20
"""Of the files of rank 0 beside the tensors, but for what grows with the model."""

GRACE = 60.0
"""Seconds for which an asynchronous save waits for other ranks when the program has come to its end."""


class Loaded(NamedTuple):
    """What `load` gives."""

    state: TrainState[Tensor]
    """Of the step that it was loaded for, this rank's part."""
    client: Any
    """What `save` was given as `client`."""
    path: Path
    """The checkpoint that it was loaded from."""


def save(
    state: TrainState[Tensor],
    dir: str | Path,
    *,
    step: AnyStep,
    client: Any = None,
    keep: int | None = None,
) -> Path:
    """Saves a training state as a new checkpoint in `dir`, and returns when it is on the disk and is what `latest` names.

    A job that is killed meanwhile, at any moment, leaves what `latest` named before. Each element is written once, by one of the
    ranks that hold it; nothing is gathered. The files are those of torch.distributed.checkpoint, with the parameters as
    `model.<name>`, which any job can load: `dcp.load({"model": tensors}, checkpoint_id=path)`.

    *Collective:* every rank of the step; sends some numbers. All ranks must see the same `dir`.

    Args:
        state: of this step. It is left as it is. Simulated steps (`simulate`) have simulated states.
        dir: a folder of checkpoints, which is made.
        step: the step that `state` is of.
        client: what else belongs to it: numbers, strings, lists, dicts and tensors, as where the data is. Rank 0's is saved.
        keep: how many checkpoints stay in `dir`, those saved last; None is all. One more is there while it is written.

    Returns:
        The checkpoint's own folder, `dir/step-<updates>`, which `load` takes as well.

    Raises:
        CheckpointError: told on every rank: the disk is too small (before anything is written), a file cannot be written, or
            another save to `dir` is under way.
        ValueError: the state is not one of `step`, or `client` holds something else.
        CollectiveError: another rank died or did not come.
    """
    check_path("dir", dir)
    _check_step(step)
    if isinstance(step, LockstepRanks):
        states = unstacked(state, step.world_size)
        return step._run(lambda rank: save(states[rank], dir, step=step.steps[rank], client=client, keep=keep))[0]
    return _started(state, Path(dir), step, client, keep, copies=False)._ended()


def start_save(
    state: TrainState[Tensor],
    dir: str | Path,
    *,
    step: TrainStep,
    client: Any = None,
    keep: int | None = None,
    after: Saving | None = None,
) -> Saving:
    """Starts to save a training state, and returns when this rank's part of it is copied to host memory.

    The state may then be given to the next step, whose collectives are not disturbed. The checkpoint is visible when all ranks
    have written theirs, whether or not anyone waits for it.

        saving = None
        for batch in loader:
            state, metrics = step(state, batch)
            if is_time:
                saving = fzero.start_save(state, "checkpoints", step=step, after=saving)
        saving.wait()

    *Collective*, arguments and errors as for `save`; but what goes wrong while it is written is told by `wait`.

    Args:
        after: an earlier one, which is waited for first, so that its errors are told and one copy at a time is held.
    """
    if isinstance(step, LockstepRanks):
        raise ValueError("start_save: step must be of real ranks, got a simulated one; call save")
    check_path("dir", dir)
    _check_step(step)
    if after is not None:
        after.wait()
    return _started(state, Path(dir), step, client, keep, copies=True)


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
    _check_step(step)
    check_no_inference("load")
    if isinstance(step, LockstepRanks):
        loaded = step._run(lambda rank: load(dir, step=step.steps[rank]))
        return loaded[0]._replace(state=stacked([of_rank.state for of_rank in loaded]))
    axis = step._mesh.world
    meet("fzero.load", axis)
    check_same_folder(axis, dir, "load")
    path = Path(of_rank_0(axis, lambda: str(files.find(Path(dir)))))
    scratch = step._offload.make_files(axis)
    own = together(axis, lambda: _load(path, step, scratch))
    return own._replace(state=placed(own.state, step, scratch))


def placed(state: TrainState[Tensor], step: TrainStep, scratch: Scratch | None) -> TrainState[Tensor]:
    """A state that was read, where the step wants it. *Collective* where there are files, which may have failed."""
    if scratch is not None:
        agree(scratch, step._mesh.world)
    return place(state, step)


# --- saving ------------------------------------------------------------------------------------------------------


class Saving:
    """A checkpoint that is being written; made by `start_save`.

    Attributes:
        is_written: whether this rank has written its part, or failed to; the rest may take longer.
    """

    def __init__(self, writer: _Writer, axis: Bound, fragments: list[Fragment]) -> None:
        self._writer, self._axis, self._fragments = writer, axis, fragments
        self._is_written, self._given_up = threading.Event(), threading.Event()
        self._problem: Exception | None = None
        self._name: str | None = None
        self._outcome: Path | CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name="fzero save")
        self._thread.start()

    @property
    def is_written(self) -> bool:
        return self._is_written.is_set()

    def wait(self) -> Path:
        """Returns the checkpoint's folder when it is on the disk and is what `latest` names. *Collective:* sends some numbers.

        Raises:
            CheckpointError: told on every rank; what was written is removed.
            CollectiveError: another rank died or did not come.
        """
        if self._outcome is None:
            meet("Saving.wait", self._axis)
        return self._ended()

    def _ended(self) -> Path:
        if self._outcome is None:
            self._outcome = self._end()
        if isinstance(self._outcome, CheckpointError):
            raise self._outcome
        return self._outcome

    def _end(self) -> Path | CheckpointError:
        self._is_written.wait()
        try:
            problems = collectives.exchange(_told(self._problem), self._axis, label=Label("save"))
        except BaseException:
            self._given_up.set()
            raise
        if not any(problems):  # all parts are there, so that rank 0 comes to an end
            self._thread.join()
            problems = collectives.exchange(_told(self._problem), self._axis, label=Label("save"))
        if any(problems):
            self._given_up.set()
            self._thread.join()
            if self._axis.rank == 0:
                shutil.rmtree(self._writer.folder, ignore_errors=True)
            rank = next(rank for rank, problem in enumerate(problems) if problem)
            return CheckpointError(f"{problems[rank]} (on rank {rank})")
        name: str = collectives.exchange(self._name, self._axis, label=Label("save"))[0]
        return self._writer.path / name

    def _run(self) -> None:
        self._try(lambda: self._writer.write(self._fragments))
        self._fragments = []
        self._is_written.set()
        if self._axis.rank == 0 and self._problem is None and self._all_are_there():
            self._name = self._try(self._writer.publish)

    def _try(self, function: Callable[[], T]) -> T | None:
        try:
            return function()
        except Exception as error:
            self._problem = error
            if isinstance(error, OSError | RuntimeError) and not isinstance(error, CheckpointError):
                self._problem = CheckpointError(
                    f"save: {self._writer.folder} must be a folder that all ranks can write to, got {error}; make space on the "
                    f"disk, or save to a folder that all ranks see"
                )
        return None

    def _all_are_there(self) -> bool:
        """Waits for the parts of all ranks; False when there is no use in it."""
        ends, pause = float("inf"), 0.001
        while not all(self._writer.part(rank).exists() for rank in range(self._axis.size)):
            if not threading.main_thread().is_alive():
                ends = min(ends, time.monotonic() + GRACE)
            if self._given_up.wait(pause) or time.monotonic() > ends:
                return False
            pause = min(2 * pause, 0.5)
        return True


class _Writer(NamedTuple):
    """What writes one checkpoint, without a collective."""

    folder: Path
    """Where it is written."""
    path: Path
    """The folder of checkpoints."""
    step: TrainStep
    client: bytes
    keep: int | None
    numbers: dict[str, float | int]
    rates: dict[str, float]

    def part(self, rank: int) -> Path:
        return self.folder / f"part-{rank}.json"

    def write(self, fragments: Iterable[Fragment]) -> None:
        """Writes this rank's part."""
        from fzero.checkpoint.dcp_format import write

        slices = write(self.folder, self.step.rank, fragments)
        files.write_whole(self.part(self.step.rank), json.dumps(slices).encode())

    def publish(self) -> str:
        """Adds what all parts hold, and makes the checkpoint visible."""
        parts = [self.part(rank) for rank in range(self.step.plan.world_size)]
        slices = [Slice.of(values) for part in parts for values in json.loads(part.read_bytes())]
        for part in parts:
            part.unlink()
        contents = _contents_of(self.step, self.numbers, self.rates)
        published = publish(self.folder, self.path, slices, contents, self.client)
        if self.keep is not None:
            files.keep_last(self.path, self.keep)
        return published.name


class Contents(NamedTuple):
    """What a checkpoint tells beside its tensors.

    Attributes:
        stored: what there is, by key, but for what each rank has for itself; and `aliases`, further keys of it.
        numbers: the 0-d tensors, those of the optimizer state for each parameter.
        optimizer: what kind of optimizer state each parameter has (`fzero.checkpoint.layout.told_of`).
        hook_states: what the comm hooks of reductions remember.
        names: the keys of the model's state dict, each with the name under which its tensor is stored.
        rates: the learning rate of each parameter's next update; and `loss_scaling`, the rules of the loss scale: for others,
            as fzero's steps have their own.
        stage, mesh, scales_dynamically: of the job.
    """

    stored: Mapping[str, Stored]
    aliases: Mapping[str, str]
    numbers: Mapping[str, float | int]
    optimizer: Mapping[str, Any]
    hook_states: Mapping[str, str]
    names: Mapping[str, str]
    rates: Mapping[str, float]
    loss_scaling: Mapping[str, Any]
    stage: int
    mesh: Sequence[tuple[str, int]]
    scales_dynamically: bool


def _contents_of(step: TrainStep, numbers: Mapping[str, float | int], rates: Mapping[str, float]) -> Contents:
    plan = step.plan
    return Contents(
        *stored_by(plan, aliases_of(step)), numbers_by_name(plan, numbers), told_of(plan), describe_hook_states(plan),
        step._stored_names, rates, asdict(step._scaling), plan.stage, plan.mesh.axes, step._scaling.dynamic,
    )  # fmt: skip


def _rates_of(step: TrainStep, num_updates: int) -> dict[str, float]:
    """The learning rate of each parameter's next update; nothing where the schedule has come to its end, and raises."""
    try:
        rates = [float(rate(num_updates)) for rate in step._updater.rates]
    except Exception:
        return {}
    return {name: rates[b.group] for b in step.plan.flat_buffers if b.trainable for name in b.layout.names}


def publish(folder: Path, path: Path, slices: Sequence[Slice], contents: Contents, client: bytes) -> Path:
    """Adds to the tensors in `folder` what tells of them, and makes them the latest checkpoint in `path`."""
    from fzero.checkpoint.dcp_format import write_metadata

    write_metadata(folder, slices, contents.stored, contents.aliases)
    fields = ("numbers", "optimizer", "hook_states", "names", "rates", "loss_scaling")
    told = {name: getattr(contents, name) for name in fields} | {"slices": slices}
    files.write_whole(folder / files.CONTENTS, json.dumps(told).encode())
    files.write_whole(folder / files.CLIENT, client)
    before = files.whole_ones(path)
    num_updates = int(contents.numbers["state.step"])
    manifest = {
        "fzero": version("fzero"),
        "torch": torch.__version__,
        "serial": 1 + max((files.read_manifest(other)["serial"] for other in before), default=0),
        "step": num_updates,
        "stage": contents.stage,
        "mesh": contents.mesh,
        "scales_dynamically": contents.scales_dynamically,
    }
    files.write_manifest(folder, manifest)
    return files.publish(folder, path, num_updates)


def _check_step(step: object) -> None:
    fix = "pass what fzero.make_train_step or fzero.simulate(..., by='lockstep') returned"
    check_kind("step", step, TrainStep | LockstepRanks, "a step", fix)


def _started(
    state: TrainState[Tensor], path: Path, step: TrainStep, client: Any, keep: int | None, *, copies: bool
) -> Saving:
    """Makes the folder to write to, and starts to write: from copies, or from the state itself."""
    axis = step._mesh.world

    def prepare() -> list[StoredSlice]:
        step._check_state(state)
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(
                f"keep: must be a whole number, at least 1, or None for all, got {keep!r}; pass how many checkpoints stay"
            )
        return list(parts_to_save(step.plan, axis.rank, own_specs(step.plan, step.specs.rng)))

    meet("fzero.start_save" if copies else "fzero.save", axis)
    check_same_folder(axis, path, "save")
    parts = together(axis, prepare)
    nbytes = dict(enumerate(collectives.exchange(nbytes_of(parts), axis, label=Label("save"))))
    content = of_rank_0(axis, lambda: content_of(client))

    def begin() -> str:
        files.check_space(path, nbytes | {0: nbytes[0] + len(content) + FEW_BYTES})
        return str(files.begin(path, int(state.step)))

    tensors = by_name(state)
    # Of what lives in files the writer reads one range after the other.
    fragments: list[Fragment] = [(part, span(tensors[part.tensor], part)) for part in parts]
    if copies:
        fragments = together(axis, lambda: [(part, flat[:].to("cpu", copy=True)) for part, flat in fragments])
    folder = Path(of_rank_0(axis, begin))
    writer = _Writer(folder, path, step, content, keep, numbers_of(state), _rates_of(step, int(state.step)))
    return Saving(writer, axis, fragments)


def content_of(client: Any) -> bytes:
    """The bytes of a user's value, which must come back without running code."""
    content = io.BytesIO()
    try:
        torch.save(client, content)
        content.seek(0)
        load_tensors(content)
    except Exception as error:
        raise ValueError(
            f"client: must hold numbers, strings, lists, dicts and tensors, got {type(client).__name__} which torch cannot store "
            f"safely: {error}; leave out what is no such thing"
        ) from error
    return content.getvalue()


# --- loading -----------------------------------------------------------------------------------------------------


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
    check_names(plan, aliases_of(step), source.stored)
    check_told(plan, saved.optimizer)
    frozen = {name for name, kept in saved.optimizer.items() if kept is None}
    _tell_of_frozen(plan, frozen, rank)
    numbers = chosen_numbers(sources_of_numbers(plan, frozen), dict(saved.numbers))
    kept = {*step._stored_names.values()}
    missing = [n for n in plan.buffers if n not in kept and key_of("params", n) not in source.stored]
    wanted: dict[str, list[StoredSlice]] = {}
    for quantity, parts in parts_to_load(plan, rank, source.stored, without=missing, frozen=frozen):
        wanted.setdefault(quantity, []).extend(parts)
    keeps_scale = saved.scales_dynamically and step._scaling.dynamic
    state = blank(step, rank, numbers, keeps_scale=keeps_scale, files=scratch)
    wanted["own"] = parts_of_own(rank, _kept_own(step, saved.hook_states), source.stored)
    read_into(state, wanted.values(), source)
    for name, value in step._first_state.values(missing, None, None).items():
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


def span(tensor: Leaf, part: StoredSlice) -> Tensor | FilePart:
    """The elements of a part in the flat tensor that holds them: to be written to a file, or to be read into."""
    return part_of(tensor, part.offset, part.offset + part.stop - part.start)  # type: ignore[no-any-return]


class Source(Protocol):
    """What tensors are read from, a range at a time."""

    @property
    def stored(self) -> Mapping[str, Stored]: ...

    def read(self, fragments: Iterable[Fragment]) -> None:
        """Fills each flat tensor with the elements of its part, cast to its dtype."""


def aliases_of(step: TrainStep) -> dict[str, str]:
    """The further names of parameters and module buffers: of tied ones, and those that `state_dict` gives them."""
    return step.plan.aliases | {key: name for key, name in step._stored_names.items() if key != name}


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


_RAISED = (ValueError, StoreError)
"""What is raised as it is; of all else a CheckpointError tells."""


# --- agreement ---------------------------------------------------------------------------------------------------


def together(axis: Bound, function: Callable[[], T]) -> T:
    """What `function` returns; what it raises on any rank is raised on all. *Collective:* sends some numbers."""
    values: list[T] = []
    problem: Exception | None = None
    try:
        values.append(function())
    except (CheckpointError, ValueError, OSError, StoreError) as error:
        problem = error
    index = next((i for i, kind in enumerate(_RAISED) if isinstance(problem, kind)), len(_RAISED))
    world = collectives.exchange((_told(problem), index), axis, label=Label("save"))
    for rank, (told, index) in enumerate(world):
        if told:
            kind = [*_RAISED, CheckpointError][index]
            raise kind(told if len(world) == 1 else f"{told} (on rank {rank})") from problem
    return values[0]


def check_same_folder(axis: Bound, dir: str | Path, call: str) -> None:
    """Raises a ValueError on every rank unless all were given the same folder. *Collective:* sends its name."""
    folders = collectives.exchange(os.path.abspath(dir), axis, label=Label("save"))
    for rank, folder in enumerate(folders):
        if folder != folders[0]:
            raise ValueError(
                f"{call}: dir must be the same on all ranks, got {folders[0]} on rank 0 and {folder} on rank {rank}; pass every "
                f"rank the same folder, which all of them see"
            )


def of_rank_0(axis: Bound, function: Callable[[], T]) -> T:
    """What `function` returns, or raises, on rank 0, where alone it is called; a plain value. *Collective:* sends it."""
    value = together(axis, lambda: function() if axis.rank == 0 else None)
    found: T = collectives.exchange(value, axis, label=Label("save"))[0]
    return found


def _told(problem: Exception | None) -> str | None:
    return None if problem is None else str(problem) or repr(problem)
