"""`save`, `start_save`: write a training state so that a job of any size, stage or
layout can load it.

    fzero.save(state, "checkpoints", step=step, client={"samples": 4096}, keep=3)

Every rank writes a file with its own parts of the state (`fzero.checkpoint.layout`,
`fzero.checkpoint.dcp_format`). Rank 0 then adds the index, and makes the checkpoint
visible in one rename (`fzero.checkpoint.folders`). Each rank reports its completion
through a file, so that a save needs no collective while the next steps run.
"""

from __future__ import annotations

import io
import json
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.checkpoint import folders as files, layout
from fzero.checkpoint.agreement import check_same_folder, check_step, of_rank_0, report_of, together
from fzero.checkpoint.client_values import plain
from fzero.checkpoint.dcp_format import Fragment, write, write_metadata
from fzero.checkpoint.folders import CheckpointError
from fzero.checkpoint.layout import Slice, Stored, StoredSlice
from fzero.common.arguments import check_path
from fzero.common.pickles import load_tensors
from fzero.common.version import installed_version
from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.hangs.failures import store_barrier
from fzero.comms.records import Label
from fzero.resharding.new_state import by_name, numbers_of
from fzero.resharding.reshard import AnyStep
from fzero.simulation import LockstepRanks
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.promised import error_of

T = TypeVar("T")

FEW_BYTES = 1 << 20
"""Bytes of rank 0's files besides the tensors, without the parts that grow with the
model.
"""

GRACE = 60.0
"""Seconds for which an asynchronous save waits for other ranks after the main thread
has ended.
"""


def save(
    state: TrainState[Tensor],
    dir: str | Path,
    *,
    step: AnyStep,
    client: Any = None,
    keep: int | None = None,
    without: Collection[str] = (),
) -> Path:
    """Saves a training state as a new checkpoint in `dir`, and returns when it is on
    the disk and `latest` names it.

    If the job is killed before that, `latest` still names the previous checkpoint. Each
    element is written once, by one of the ranks that hold it; nothing is gathered. The
    files are those of torch.distributed.checkpoint, with the parameters as
    `model.<name>`, which any job can load:
    `dcp.load({"model": tensors}, checkpoint_id=path)`.

    *Collective:* every rank of the step; sends some numbers. All ranks must see the
    same `dir`.

    Args:
        state: the state of this step; it is not changed. Simulated steps (`simulate`)
            have simulated states.
        dir: a folder of checkpoints, which is made.
        step: the step that `state` belongs to.
        client: other values to save, such as the position in the data: numbers,
            strings, containers, tensors, and values of the standard library and numpy.
            The parts of other types are left out, with a warning that names them. Rank
            0's is saved.
        keep: the number of newest checkpoints to keep in `dir`; None keeps all. One
            more exists while the new one is written.
        without: names of frozen parameters that are left out; `Engine.load_checkpoint`
            takes them from its own model.

    Returns:
        The checkpoint's own folder, `dir/step-<updates>`, which `load` accepts as well.

    Raises:
        CheckpointError: on every rank: the disk is too small (before anything is
            written), a file cannot be written, or another save to `dir` is under way.
        ValueError: the state is not one of `step`.
        CollectiveError: another rank died, or does not take part.
    """
    check_path("dir", dir)
    check_step(step)
    if isinstance(step, LockstepRanks):
        states = step.states_of(state)
        how: dict[str, Any] = {"client": client, "keep": keep, "without": without}
        return step.on_each(lambda rank: save(states[rank], dir, step=step.steps[rank], **how))[0]
    return _started(state, Path(dir), step, client, keep, copies=False, without=without)._ended()


def start_save(
    state: TrainState[Tensor],
    dir: str | Path,
    *,
    step: TrainStep,
    client: Any = None,
    keep: int | None = None,
    after: Saving | None = None,
) -> Saving:
    """Starts to save a training state, and returns when this rank's part of it is
    copied to host memory.

    The state may then be passed to the next step, whose collectives are not disturbed.
    The checkpoint becomes visible when all ranks have written their parts, even without
    a call of `wait`.

        saving = None
        for batch in loader:
            state, metrics = step(state, batch)
            if is_time:
                saving = fzero.start_save(state, "checkpoints", step=step, after=saving)
        saving.wait()

    *Collective*, arguments and errors as for `save`; but errors during the write are
    raised by `wait`.

    Args:
        after: an earlier save to wait for first, so that its errors are raised and only
            one copy is in memory.
    """
    if isinstance(step, LockstepRanks):
        raise ValueError("start_save: step must be of real ranks, got a simulated one; call save")
    check_path("dir", dir)
    check_step(step)
    if after is not None:
        after.wait()
    return _started(state, Path(dir), step, client, keep, copies=True)


class Saving:
    """A checkpoint that is being written; made by `start_save`."""

    def __init__(self, writer: _Writer, axis: RankAxis, fragments: list[Fragment]) -> None:
        self._writer, self._axis, self._fragments = writer, axis, fragments
        self._is_written, self._given_up = threading.Event(), threading.Event()
        self._problem: Exception | None = None
        self._name: str | None = None
        self._outcome: Path | CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name="fzero save")
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part, or failed to; the rest may take
        longer.
        """
        return self._is_written.is_set()

    def wait(self) -> Path:
        """Returns the checkpoint's folder when it is on the disk and `latest` names it.
        *Collective:* sends some numbers.

        Raises:
            CheckpointError: on every rank; the incomplete checkpoint is removed.
            CollectiveError: another rank died, or does not take part.
        """
        if self._outcome is None:
            store_barrier("Saving.wait", self._axis)
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
            problems = collectives.exchange(
                report_of(self._problem), self._axis, label=Label("save")
            )
        except BaseException:
            self._given_up.set()
            raise
        if not any(problems):  # all parts are written, so rank 0's thread will end
            self._thread.join()
            problems = collectives.exchange(
                report_of(self._problem), self._axis, label=Label("save")
            )
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
                    f"save: {self._writer.folder} must be a folder that all ranks can write to, "
                    f"got {error}; make space on the disk, or save to a folder that all ranks see"
                )
        return None

    def _all_are_there(self) -> bool:
        """Waits for the parts of all ranks; False if the save has failed, or the wait
        has timed out after the program's end.
        """
        ends, pause = float("inf"), 0.001
        while not all(self._writer.part(rank).exists() for rank in range(self._axis.size)):
            if not threading.main_thread().is_alive():
                ends = min(ends, time.monotonic() + GRACE)
            if self._given_up.wait(pause) or time.monotonic() > ends:
                return False
            pause = min(2 * pause, 0.5)
        return True


class _Writer(NamedTuple):
    """Writes one checkpoint, without collectives."""

    folder: Path
    """The temporary folder."""
    path: Path
    """The folder of checkpoints."""
    step: TrainStep
    client: bytes
    keep: int | None
    contents: Callable[[], Contents]

    def part(self, rank: int) -> Path:
        return self.folder / f"part-{rank}.json"

    def write(self, fragments: Iterable[Fragment]) -> None:
        slices = write(self.folder, self.step.rank, fragments)
        files.write_whole(self.part(self.step.rank), json.dumps(slices).encode())

    def publish(self) -> str:
        """Writes the index of all parts, and makes the checkpoint visible."""
        parts = [self.part(rank) for rank in range(self.step.world_size)]
        slices = [Slice.of(values) for part in parts for values in json.loads(part.read_bytes())]
        for part in parts:
            part.unlink()
        published = publish(self.folder, self.path, slices, self.contents(), self.client)
        if self.keep is not None:
            files.keep_last(self.path, self.keep)
        return published.name


class Contents(NamedTuple):
    """The contents of a checkpoint besides its tensors.

    Attributes:
        stored, aliases: the tensors that ranks store together, by key; and their other
            keys (`layout.stored_by`).
        numbers, optimizer, hook_states: see `numbers_by_name`, `kinds_of` and
            `describe_hook_states` of `layout`.
        names: the keys of the model's state dict, each with the name under which its
            tensor is stored.
        rates, loss_scaling: the learning rate of each parameter's next update, and the
            rules of the loss scale; for other programs, since fzero's steps have their
            own.
        stage, mesh, scales_dynamically: those of the job.
        left_out: the frozen parameters that are not stored.
        transforms: the settings of the model's transforms (`AllChanges.compared`); None
            where they are not known.
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
    left_out: Sequence[str] = ()
    transforms: Mapping[str, str] | None = None


def _contents(
    step: TrainStep,
    numbers: dict[str, float | int],
    rates: dict[str, float],
    without: Collection[str],
) -> Contents:
    """The contents of a checkpoint, as one rank's plan knows them: in a pipeline those
    of its stage.
    """
    plan, runtime, scaling = step.plan, step.runtime, step.runtime.rules.scaling
    stored, aliases = layout.stored_by(plan, runtime.aliases)
    left = {layout.key_of("params", name) for name in without}
    return Contents(
        {key: like for key, like in stored.items() if key not in left},
        {key: first for key, first in aliases.items() if first not in left},
        layout.numbers_by_name(plan, numbers),
        layout.kinds_of(plan),
        layout.describe_hook_states(plan),
        {key: name for key, name in runtime.stored_names.items() if name not in without},
        rates,
        asdict(scaling),
        plan.row.number,
        step.mesh.axes,
        scaling.dynamic,
        sorted(without),
        runtime.changes.compared,
    )


def _of_all_stages(own: Contents, step: TrainStep) -> Contents:
    """The contents of all stages of a pipeline. *Collective:* every rank."""
    fields = ("stored", "aliases", "numbers", "optimizer", "hook_states", "names", "rates")
    mine: dict[str, Any] = {name: dict(getattr(own, name)) for name in fields}
    mine["stored"] = {key: (like.shape, like.dtype) for key, like in own.stored.items()}
    merged: dict[str, Any] = {name: {} for name in fields}
    for theirs in collectives.exchange(mine, step.runtime.world, label=Label("save")):
        for name in fields:
            merged[name] |= theirs[name]
    merged["stored"] = {
        key: Stored(tuple(shape), dtype) for key, (shape, dtype) in merged["stored"].items()
    }
    place = {name: index for index, name in enumerate(step.runtime.job.names)}
    merged["names"] = dict(sorted(merged["names"].items(), key=lambda item: place[item[0]]))
    return own._replace(**merged)


def _rates_of(step: TrainStep, num_updates: int) -> dict[str, float]:
    """The learning rate of each parameter's next update; empty where the schedule
    raises because it has ended.
    """
    try:
        rates = [float(rate(num_updates)) for rate in step.runtime.updater.rates]
    except Exception:
        return {}
    return {
        name: rates[b.group]
        for b in step.plan.flat_buffers
        if b.trainable
        for name in b.layout.names
    }


def publish(
    folder: Path, path: Path, slices: Sequence[Slice], contents: Contents, client: bytes
) -> Path:
    """Writes the index of the tensors in `folder`, and makes it the latest checkpoint
    in `path`.
    """
    write_metadata(folder, slices, contents.stored, contents.aliases)
    fields = (
        "numbers",
        "optimizer",
        "hook_states",
        "names",
        "rates",
        "loss_scaling",
        "left_out",
        "transforms",
    )
    index = {name: getattr(contents, name) for name in fields} | {"slices": slices}
    files.write_whole(folder / files.CONTENTS, json.dumps(index).encode())
    files.write_whole(folder / files.CLIENT, client)
    before = files.whole_ones(path)
    num_updates = int(contents.numbers["state.step"])
    manifest = {
        "fzero": installed_version(),
        "torch": torch.__version__,
        "serial": 1 + max((files.read_manifest(other)["serial"] for other in before), default=0),
        "step": num_updates,
        "stage": contents.stage,
        "mesh": contents.mesh,
        "scales_dynamically": contents.scales_dynamically,
    }
    files.write_manifest(folder, manifest)
    return files.publish(folder, path, num_updates)


def _started(
    state: TrainState[Tensor],
    path: Path,
    step: TrainStep,
    client: Any,
    keep: int | None,
    *,
    copies: bool,
    without: Collection[str] = (),
) -> Saving:
    """Makes the temporary folder, and starts to write, from copies or from the state
    itself.
    """
    axis, job = step.runtime.world, step.runtime.job

    def prepare() -> list[StoredSlice]:
        step.runtime.check_state(state)
        if (error := error_of(state)) is not None:  # waits for its update
            raise error
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(
                f"keep: must be a whole number, at least 1, or None for all, got {keep!r}; pass "
                f"the number of checkpoints to keep"
            )
        frozen = {
            name for b in step.plan.flat_buffers if not b.trainable for name in b.layout.names
        }
        if others := sorted(set(without) - frozen):
            raise ValueError(
                f"without: must name frozen parameters of the model, got {others[0]!r}; leave it "
                f"out"
            )
        left = {layout.key_of("params", name) for name in without}
        own = layout.own_specs(step.plan, step.specs.rng)
        parts = layout.parts_to_save(step.plan, step.runtime.rank, own)
        return [part for part in parts if part.key not in left and job.stores(part.tensor)]

    store_barrier("fzero.start_save" if copies else "fzero.save", axis)
    check_same_folder(axis, path, "save")
    parts = together(axis, prepare)
    nbytes = dict(
        enumerate(collectives.exchange(layout.nbytes_of(parts), axis, label=Label("save")))
    )
    content = of_rank_0(axis, lambda: content_of(client))

    def begin() -> str:
        files.check_space(path, nbytes | {0: nbytes[0] + len(content) + FEW_BYTES})
        return str(files.begin(path, int(state.step)))

    tensors = by_name(state)
    # The writer reads tensors in files one range after the other.
    fragments: list[Fragment] = [(part, layout.span(tensors[part.tensor], part)) for part in parts]
    if copies:
        fragments = together(
            axis, lambda: [(part, flat[:].to("cpu", copy=True)) for part, flat in fragments]
        )
    folder = Path(of_rank_0(axis, begin))
    rates = _rates_of(step, int(state.step))
    contents = partial(_contents, step, numbers_of(state), rates, frozenset(without))
    whole = _of_all_stages(contents(), step) if job.names else None
    writer = _Writer(
        folder, path, step, content, keep, contents if whole is None else lambda: whole
    )
    return Saving(writer, axis, fragments)


def content_of(client: Any) -> bytes:
    """The bytes of a user's value, which can be read without running code; warns of the
    parts that are not kept as they are.
    """
    stored, lines = plain(client)
    if lines:
        text = (
            "client: holds values that a file without code cannot hold; {}; store numbers, "
            "strings, lists, dicts and tensors"
        )
        warnings.warn(text.format("; ".join(lines[:20])), stacklevel=6)
    content = io.BytesIO()
    torch.save(stored, content)
    content.seek(0)
    load_tensors(content)
    return content.getvalue()
