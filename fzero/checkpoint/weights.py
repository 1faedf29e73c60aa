"""`load_weights`, `save_16bit_model`, `export`: weights to and from files of other
libraries.

    state = fzero.load_weights("model.safetensors", step=step)      # weights only: the rest starts as in init
    fzero.checkpoint.save_16bit_model(state, "out", step=step)        # for from_pretrained
    fzero.checkpoint.export("checkpoints", "out")                              # the same from a checkpoint, in one process

Each rank reads the ranges that it holds; no rank ever holds the full model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fzero.checkpoint import folders as files
from fzero.checkpoint.agreement import check_same_folder, together
from fzero.checkpoint.dcp_format import DcpReader
from fzero.checkpoint.folders import CheckpointError
from fzero.checkpoint.layout import Stored, StoredSlice, parts_of_weights
from fzero.checkpoint.loading import Source, opened, placed, read_into
from fzero.checkpoint.readers import foreign
from fzero.checkpoint.safetensors import INDEX, Export, SafetensorsFile, TorchFile, exported_dtype
from fzero.common.arguments import check_path
from fzero.comms import collectives
from fzero.comms.hangs.failures import store_barrier
from fzero.comms.records import Label
from fzero.compression.plan import is_added
from fzero.resharding.new_state import blank
from fzero.resharding.reshard import AnyStep
from fzero.runtime.weights import with_made_buffers
from fzero.simulation import LockstepRanks
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.state_files import StateFiles as Scratch

TORCH_INDEX = "pytorch_model.bin.index.json"


class _Ranges:
    """Reads ranges of the tensors in several files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        found = [SafetensorsFile(p) if p.suffix == ".safetensors" else TorchFile(p) for p in paths]
        self._file_of = {name: file for file in found for name in file.stored}
        self.stored = {name: file.stored[name] for name, file in self._file_of.items()}

    def read(self, fragments: Iterable[tuple[StoredSlice, Tensor]]) -> None:
        for part, flat in fragments:
            flat.copy_(self._file_of[part.key].range(part.key, part.start, part.stop))


def save_16bit_model(
    state: TrainState[Tensor],
    out: str | Path,
    *,
    step: AnyStep,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    max_file_nbytes: int = 5 * 10**9,
) -> None:
    """Writes the weights as safetensors files, named and indexed as `from_pretrained`
    of transformers expects them.

    A tied weight is stored under its first name; the files' metadata holds the others.
    Files of an earlier export in `out` are replaced when the new ones are complete.

    *Collective:* every rank; sends as much as `step.gather`. Rank 0 writes, and holds
    one unit at a time.

    Args:
        state: the state of this step.
        out: a folder, which is made.
        step: the step.
        dtype: of the parameters; None is the model's own if that has 16 bits, else
            bfloat16. Module buffers keep theirs.
        max_file_nbytes: the most bytes in one file, unless one tensor is larger.

    Raises:
        CheckpointError: on every rank: a file cannot be written.
        ValueError: a dtype that safetensors does not have.
    """
    if isinstance(step, LockstepRanks):
        states = step.states_of(state)
        how: dict[str, Any] = {"dtype": dtype, "max_file_nbytes": max_file_nbytes}
        step.on_each(lambda rank: save_16bit_model(states[rank], out, step=step.steps[rank], **how))
        return
    check_path("out", out)
    runtime, names = step.runtime, step.runtime.stored_names
    runtime.check_state(state)
    store_barrier("fzero.checkpoint.save_16bit_model", runtime.mesh.world)
    stored = {n: Stored(spec.shape, spec.dtype) for n, spec in step.plan.buffers.items()} | {
        name: Stored(shape, exported_dtype(buffer.dtypes.param, dtype))
        for buffer in step.plan.flat_buffers
        for name, shape in zip(buffer.layout.names, buffer.layout.shapes)
    }
    views: Iterator[Mapping[str, Tensor]] = chain(runtime.full_weights(state), (state.buffers,))
    if step.data_rank == 0:
        names, forms, views = runtime.job.streamed(
            names, {n: (x.shape, x.dtype) for n, x in stored.items()}, views
        )
        stored = {name: Stored(tuple(shape), dtype) for name, (shape, dtype) in forms.items()}
    keys, aliases = _first_keys(names)
    exported = Export(
        Path(out), {key: stored[name] for name, key in keys.items()}, max_file_nbytes, aliases
    )
    problem = None
    try:
        if step.rank == 0:
            with exported:
                for tensors in views:
                    for name in tensors.keys() & keys.keys():
                        exported.write(keys[name], tensors[name])
    except OSError as error:
        problem = (
            f"save_16bit_model: {out} must be a folder that can be written to, got {error}; "
            f"make space, or pass another"
        )
    for _ in views:  # all ranks must finish the gathers, also after an error on rank 0
        pass
    runtime.agree_on_files(state)
    problems = collectives.exchange(problem, runtime.world, label=Label("save"))
    if problems[0]:
        raise CheckpointError(problems[0])


def load_weights(path: str | Path, *, step: AnyStep) -> TrainState[Tensor]:
    """A new state of `step` with weights from files; this rank's part. Counters,
    optimizer state and the rest are as in `init`.

    *Collective:* every rank of the step; sends some numbers. Each rank reads the ranges
    that it holds.

    Args:
        path: a `.safetensors` file; a state dict that torch.save wrote; a folder of
            such files, with an index if there are several; a checkpoint of
            torch.distributed.checkpoint with the parameters under `model.<name>` or
            `<name>`; or a checkpoint of fzero or DeepSpeed, whose masters are used
            where there are any.
        step: to continue with. Module buffers that are not stored keep the model's own
            values.

    Raises:
        CheckpointError: on every rank: the path cannot be read.
        ValueError: on every rank: a parameter is missing, has another shape, or is not
            the model's.

    Returns:
        The state.
    """
    if isinstance(step, LockstepRanks):
        return step.joined(step.on_each(lambda rank: load_weights(path, step=step.steps[rank])))
    world = step.runtime.world
    store_barrier("fzero.load_weights", world)
    scratch = together(world, partial(step.runtime.offload.make_files, step.runtime.mesh.world))
    check_same_folder(world, path, "load_weights")
    read = together(world, lambda: _load(Path(path), step, scratch))
    return with_made_buffers(step.runtime, placed(read, step, scratch))


def export(
    dir: str | Path,
    out: str | Path,
    *,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    max_file_nbytes: int = 5 * 10**9,
) -> None:
    """Writes the weights of a checkpoint as safetensors files, as `save_16bit_model`
    does, in a single process.

    Only one tensor is in memory at a time, and no model is needed.

    Args:
        dir: as for `load`.
        out, dtype, max_file_nbytes: as for `save_16bit_model`.
    """
    folder = files.find(Path(dir))
    contents, found = opened(folder)
    names, params = contents.names, contents.optimizer
    first, aliases = _first_keys(names)
    tensors = {}
    for name, key in first.items():
        like = found.stored[f"model.{name}"]
        tensors[key] = Stored(
            like.shape, exported_dtype(like.dtype, dtype) if name in params else like.dtype
        )
    with Export(Path(out), tensors, max_file_nbytes, aliases) as exported:
        for name, key in first.items():
            source = next(k for k in (f"master.{name}", f"model.{name}") if k in found.stored)
            exported.write(key, found.full(source))


def _first_keys(names: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The first key of each tensor of a state dict, by its name; and the first one of
    each other key.
    """
    first = {name: key for key, name in reversed(names.items())}
    return first, {key: first[name] for key, name in names.items() if first[name] != key}


def _load(path: Path, step: TrainStep, scratch: Scratch | None) -> TrainState[Tensor]:
    source, prefixes = _opened(path)
    names = [*(name for b in step.plan.flat_buffers for name in b.layout.names), *step.plan.buffers]
    aliases = step.runtime.aliases
    others: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        others.setdefault(first, []).append(alias)
    keys: dict[str, str] = {}
    for name in names:
        candidates = [prefix + n for prefix in prefixes for n in (name, *others.get(name, ()))]
        found = next((key for key in candidates if key in source.stored), None)
        if found is not None:
            keys[name] = found
    known = {
        prefix + name for prefix in prefixes for name in (*names, *aliases, *step.runtime.job.names)
    }
    # Keys without the prefix of parameters are other values of the job.
    prefix = "model." if any(key.startswith("model.") for key in source.stored) else ""
    unknown = [
        k for k in source.stored if k not in known and k.startswith(prefix) and not is_added(k)
    ]
    if unknown:
        raise ValueError(
            f"load: {unknown[0]!r} must be of this model, and is not ({len(unknown)} such names); "
            f"take the weights of the same model"
        )
    rank = step.runtime.rank
    state = blank(step, rank, {"state.step": 0}, keeps_scale=False, files=scratch)
    missing = [name for name in step.plan.buffers if name not in keys]
    for name, value in step.runtime.builder.values(missing, None, None).items():
        state.buffers[name].copy_(value)
    read_into(state, parts_of_weights(step.plan, rank, source.stored, keys), source)
    return state._replace(
        optimizer=step.runtime.builder.optimizer(rank, state.params, state.master, scratch)
    )


def _opened(path: Path) -> tuple[Source, tuple[str, ...]]:
    """The source of weights, and the possible prefixes of their names, best first."""
    for index in (path / INDEX, path / TORCH_INDEX):
        if index.exists():
            return _Ranges(_files_of(index)), ("",)
    for single in (path, path / "model.safetensors", path / "pytorch_model.bin"):
        if single.is_file():
            return _Ranges([single]), ("",)
    if (source := foreign(path)) is not None:
        return source, ("master.", "model.")
    if (path / files.METADATA).exists() and not (path / files.MANIFEST).exists():
        return DcpReader(path), ("model.", "")
    return opened(files.find(path))[1], ("master.", "model.")


def _files_of(index: Path) -> list[Path]:
    """The files that an index names, which are in its folder."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"load: {index} must be an index of files, got {error!r}; take another folder"
        ) from error
    return [files.inside(index.parent, name, index) for name in names]
