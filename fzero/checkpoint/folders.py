"""A folder of checkpoints, in which every visible checkpoint is complete even if the
job that writes it is killed.

    DIR/latest                    the name of the newest complete checkpoint
    DIR/.job.json                 the process that saves here
    DIR/step-500/                 a complete checkpoint
        fzero.json its format, and checksums of the other files contents.json counters,
        kinds of optimizer state, position and checksum of each chunk .metadata,
        __0_0.distcp torch.distributed.checkpoint's own files client.pt the user's dict
    DIR/.saving-step-600-1a2b3c4d a checkpoint that is being written, or was when its
    job was killed DIR/.removing-step-400 a checkpoint that is being removed

A checkpoint is written under a temporary name, flushed to the disk file by file, and
renamed when it is complete; then a new `latest` is renamed over the old one. Both
renames are atomic. So after a kill at any moment, `latest` names the previous
checkpoint or the new one. A checkpoint to be removed is also renamed first. A complete
checkpoint is never written to again.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fzero.checkpoint.client_values import restored
from fzero.common.pickles import load_tensors
from fzero.common.safe_files import check_inside, create
from fzero.storage.ownership import Owner

T = TypeVar("T")

FORMAT = 1
"""The newest checkpoint format that this code reads, and the one that it writes."""

METADATA = ".metadata"
LATEST, MANIFEST, CONTENTS, CLIENT = "latest", "fzero.json", "contents.json", "client.pt"
SAVING, REMOVING, OWNER, JOB = ".saving-", ".removing-", "owner.json", ".job.json"

CHUNK = 1 << 22
"""Bytes of a file in memory at once while its checksum is computed."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message has the path, the rule and
    the fix.
    """


class NoCheckpointError(CheckpointError):
    """There is nothing to load yet: the folder does not exist, or no save into it was
    ever completed.

    A job that may be the first of its chain starts anew on this error, and on no other.
    A checkpoint that is damaged, incomplete or of another model raises something else.
    """


# --- one checkpoint -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredContents:
    """`contents.json`: the fields of `fzero.checkpoint.saving.Contents` that are read
    again, and the chunks of all tensors.
    """

    numbers: dict[str, int | float]
    optimizer: dict[str, dict[str, str | list[str]] | None]
    slices: list[tuple[str, list[int], str, list[int], list[int], str, int, int, int]]
    names: dict[str, str]
    hook_states: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    loss_scaling: dict[str, int | float | bool | None] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    transforms: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class _Manifest:
    """The fields of `fzero.json` that are read, besides its format and checksum."""

    files: dict[str, int]
    serial: int
    scales_dynamically: bool


def is_not_ours(path: Path, why: object) -> CheckpointError:
    """The error for a file of a checkpoint that cannot be one that fzero wrote."""
    return CheckpointError(
        f"load: {path} must be what fzero wrote, and is not: {why}; take another checkpoint"
    )


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest of a checkpoint, with checksums of the files beside it and of
    itself.
    """
    beside = {name: checksum_of(folder / name) for name in (METADATA, CONTENTS, CLIENT)}
    fields = {"format": FORMAT, **manifest, "files": beside}
    write_whole(folder / MANIFEST, json.dumps(fields | {"checksum": _checksum(fields)}).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CheckpointError: it is not one of fzero, has
    a newer format, or was changed.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        number, checksum = manifest["format"], manifest.pop("checksum")
        is_newer = number > FORMAT
    except FileNotFoundError:
        raise CheckpointError(
            f"load: {folder} must hold {MANIFEST}, and does not: it is not a checkpoint of fzero, "
            f"or is incomplete; take another one, or fzero.load_weights for another library's"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise is_not_ours(path, repr(error)) from error
    if is_newer:
        raise CheckpointError(
            f"load: the format of {folder} must be at most {FORMAT}, got {number}: a newer fzero "
            f"wrote it ({manifest.get('fzero')}); update fzero"
        )
    if checksum != _checksum(manifest):
        raise CheckpointError(
            f"load: {path} must have checksum {checksum}, got {_checksum(manifest)}: it is not "
            f"what was written; take another checkpoint"
        )
    _read(_Manifest, path, json.dumps(manifest).encode())
    return manifest


def _read(kind: type[T], path: Path, content: bytes) -> T:
    """The content of a file as a value of a kind; else a CheckpointError with the first
    place where it is not one.
    """
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        where, why = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise is_not_ours(path, f"{'.'.join(map(str, where))}: {why}" if where else why) from error


def check_beside(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises unless the files beside the manifest are those that were written."""
    for name, checksum in manifest["files"].items():
        try:
            found: int | None = checksum_of(inside(folder, name, folder / MANIFEST))
        except OSError:
            found = None
        if found != checksum:
            raise CheckpointError(
                f"load: {folder / name} must have checksum {checksum}, got {found}: it is not what "
                f"was written; take another checkpoint"
            )


def read_contents(folder: Path) -> StoredContents:
    """The contents of a checkpoint besides its tensors. Raises as `read_manifest` and
    `check_beside`.
    """
    check_beside(folder, read_manifest(folder))
    return _read(StoredContents, folder / CONTENTS, (folder / CONTENTS).read_bytes())


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


# --- a folder of them -----------------------------------------------------------------------------


def find(path: Path) -> Path:
    """The checkpoint at `path`: itself, or the one that its `latest` names.

    Raises:
        NoCheckpointError: none was ever completed there.
        CheckpointError: there is one, which cannot be read.
    """
    if not path.is_dir():
        raise NoCheckpointError(
            f"load: {path} must be a folder, and there is none; pass the folder that was saved to"
        )
    if (path / MANIFEST).exists():
        return path
    if (path / LATEST).exists():
        name = latest_of(path)
        if (path / name / MANIFEST).exists():
            return path / name
        if (path / name / LATEST).exists():
            raise CheckpointError(
                f"load: {path} must hold checkpoints, and holds tags of an engine; pass "
                f"{path / name}, the tag that {LATEST!r} names, or call load_checkpoint of an "
                f"engine"
            )
        raise CheckpointError(
            f"load: {path / LATEST} must name a checkpoint in {path}, got {name!r}; pass one of "
            f"{[str(p) for p in whole_ones(path)]}"
        )
    if path.name.startswith((SAVING, REMOVING)) or (path / OWNER).exists():
        raise CheckpointError(
            f"load: {path} must be complete, and was not written to its end; pass {path.parent}, "
            f"whose {LATEST!r} names the last complete one"
        )
    if lost := whole_ones(path):
        raise CheckpointError(
            f"load: {path} must hold {LATEST!r}, which names one of its checkpoints, and it is "
            f"missing; pass one of {[str(p) for p in lost]}, or write its name into {LATEST!r}"
        )
    if theirs := _foreign(path):
        raise CheckpointError(
            f"load: {path} must be written by fzero, and holds {theirs.name!r} of another program; "
            f"take its weights with fzero.load_weights({str(path)!r}, step=step), pass the folder "
            f"that holds {METADATA!r} itself, or load a DeepSpeed checkpoint with "
            f"fzero.deepspeed.import_deepspeed"
        )
    raise NoCheckpointError(
        f"load: {path} must hold {LATEST!r} or {MANIFEST}, and holds "
        f"{sorted(p.name for p in path.iterdir())[:4]}; pass the folder that was saved to"
    )


def _foreign(path: Path) -> Path | None:
    """A file of weights or state that another program has written into the folder, or
    into a folder in it; else None.
    """
    endings = (".distcp", ".safetensors", ".pt", ".pth", ".bin", ".ckpt")
    found = (
        p
        for p in (*path.iterdir(), *path.glob("[!.]*/*"))
        if p.name == ".metadata" or p.suffix in endings
    )
    return min(
        (p for p in found if p.is_file() and not p.parent.name.startswith((SAVING, REMOVING))),
        default=None,
    )


def latest_of(path: Path, latest: str = LATEST) -> str:
    """The name in a file `latest`; a CheckpointError unless it is of an entry of the
    same folder.
    """
    file = path / latest
    try:
        return check_inside(file.read_bytes().decode().strip())
    except (OSError, ValueError) as error:
        why = "is not" if isinstance(error, UnicodeDecodeError) else error
        raise CheckpointError(
            f"load: {file} must hold the name of a folder beside it, in UTF-8, and {why}; write "
            f"the name into it, or pass the folder of one checkpoint"
        ) from error


def inside(folder: Path, name: str, told_by: Path) -> Path:
    """The path of an entry of a folder, whose name comes from the file `told_by`; a
    CheckpointError if it leads out of it.
    """
    try:
        return folder / check_inside(name)
    except ValueError as error:
        raise CheckpointError(f"load: {told_by} {error}; take another checkpoint") from None


def read_client(folder: Path) -> Any:
    """The user's value in a checkpoint; a CheckpointError if the file is damaged, or
    needs code to be read.
    """
    path = folder / CLIENT
    try:
        return restored(load_tensors(path))
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise CheckpointError(
            f"load: {path} must hold the value saved as client, and {error}; take another "
            f"checkpoint, or only the weights of this one with fzero.load_weights"
        ) from error


def whole_ones(path: Path) -> list[Path]:
    """The complete checkpoints in a folder, in the order in which they were saved."""
    found = []
    for manifest in path.glob(f"[!.]*/{MANIFEST}"):
        with suppress(CheckpointError):
            found.append((read_manifest(manifest.parent)["serial"], manifest.parent))
    return [folder for _, folder in sorted(found)]


def begin(path: Path, step: int) -> Path:
    """Removes leftovers of killed jobs, and makes a new folder to write the checkpoint
    after `step` updates to.

    Raises:
        CheckpointError: another save to this folder is under way, or it cannot be
            written to.
    """
    try:
        claim(path)
        for left in (*path.glob(f"{SAVING}*"), *path.glob(f"{REMOVING}*")):
            owner = _owner_of(left)
            if owner is None or not owner.may_live():
                shutil.rmtree(left, ignore_errors=True)
            elif owner.host == Owner.this_process().host:
                raise CheckpointError(
                    f"save: no other save to {path} may be under way, and {owner} is writing "
                    f"{left.name}; wait() for it first, pass it as after=, or save elsewhere"
                )
        folder = path / f"{SAVING}step-{step}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        try:
            write_whole(folder / OWNER, json.dumps(asdict(Owner.this_process())).encode())
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(
            f"save: {path} must be a folder that can be written to, got {error}; pass another"
        ) from error
    return folder


_CLAIMED: set[Path] = set()
"""The folders of checkpoints that this process saves to."""


def claim(path: Path) -> None:
    """Makes a folder of checkpoints, and records this process as the one that saves
    there.

    Whether an owner on another machine lives cannot be known: the last process to claim
    gets the folder, and the earlier one gets the error at its next save.

    Raises:
        CheckpointError: another job saves to this folder.
        OSError: it cannot be made or written to.
    """
    path.mkdir(parents=True, exist_ok=True)
    me, owner, known = Owner.this_process(), _owner_of(path, JOB), path.resolve()
    if owner == me:
        return
    is_taken = known in _CLAIMED and owner is not None
    if owner is not None and owner.may_live() and (is_taken or owner.host == me.host):
        raise CheckpointError(
            f"save: only one job may save to {path}, and {owner} does too; nothing was written: "
            f"give each job its own folder, or end that one"
        )
    write_whole(path / JOB, json.dumps(asdict(me)).encode())
    _CLAIMED.add(known)


def publish(folder: Path, path: Path, step: int) -> Path:
    """Renames a complete folder to a visible checkpoint, and makes it the latest one."""
    name, number = f"step-{step}", 1
    while (path / name).exists():  # the same step, saved again after going back
        number += 1
        name = f"step-{step}-{number}"
    with flushed(folder):
        (folder / OWNER).unlink()
    with flushed(path):
        folder.rename(path / name)
    write_whole(path / LATEST, f"{name}\n".encode())
    return path / name


def keep_last(path: Path, num: int) -> None:
    """Removes all but the last `num` checkpoints."""
    for old in whole_ones(path)[:-num]:
        renamed = old.with_name(f"{REMOVING}{old.name}")
        old.rename(renamed)
        shutil.rmtree(renamed)


def _owner_of(folder: Path, name: str = OWNER) -> Owner | None:
    try:
        return Owner(**json.loads((folder / name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


# --- files ----------------------------------------------------------------------------------------


def checksum_of(path: Path, start: int = 0, nbytes: int | None = None) -> int:
    """The CRC-32 of `nbytes` bytes of a file from `start` on; by default of all to its
    end.
    """
    checksum, left = 0, path.stat().st_size - start if nbytes is None else nbytes
    with path.open("rb") as file:
        file.seek(start)
        while left > 0 and (block := file.read(min(left, CHUNK))):
            checksum, left = zlib.crc32(block, checksum), left - len(block)
    return checksum


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically: it is complete and on the disk, or absent. Whoever sees
    it may rename its folder at once.

    Raises:
        OSError: it cannot be written, or its temporary name is a link.
    """
    beside = path.with_name(f".{path.name}.new")
    with create(beside) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            with flushed(path.parent):
                beside.rename(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


@contextmanager
def flushed(folder: Path) -> Iterator[None]:
    """On exit, flushes the entries of a folder to the disk, also if it has been renamed
    inside.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(path: Path, nbytes_by_rank: Mapping[int, int]) -> None:
    """Raises a CheckpointError if the disk, or the limit of one file's size, is too
    small for the files of all ranks.
    """
    there = next(
        parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()
    )
    disk, needed = os.statvfs(there), sum(nbytes_by_rank.values())
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise CheckpointError(
            f"save: {path} must have {needed:,} bytes free, and has {free:,}; nothing was written: "
            f"make space, or save elsewhere"
        )
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)[0], max(nbytes_by_rank.values())
    if limit != resource.RLIM_INFINITY and most > limit:
        raise CheckpointError(
            f"save: a file of {most:,} bytes must be allowed, and RLIMIT_FSIZE is {limit:,}; "
            f"nothing was written: raise it (ulimit -f), or save from more ranks"
        )
