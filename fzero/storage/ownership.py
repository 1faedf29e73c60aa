"""Whose folder is this, and does its owner still live?

A run keeps state under a path, in a folder for each rank, and for each state where a process has several (`folder_of`). It leaves
a file in each that names its process: id, start, machine. A process that is killed leaves the file; nothing else outlives it.
Whoever claims a folder reads who left which under the same path, for the next run may have fewer ranks or states. Where that
process lives, or is on another machine where nobody can tell, a folder is not touched. Where it has ended, what it left is
refused or removed, as the caller chooses.

(A lock of the file would be freed by the system with the process, but not before the last of the children that it was forked
into: the workers of a data loader, say. The path is locked only while a folder is claimed or given up, so that ranks that come
at once do so one after the other: the first of them removes what is left, of all, and a folder does not go while it is claimed.)
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from fzero.common.safe_files import check_own, create

MARKER, UNFINISHED = "owner.json", "owner.new"
FILES = "*.flat"
"""The files of a run. No other is ever removed, but the marker and an unfinished one."""
FOLDERS = ("fzero-rank[0-9]*", "state[0-9]*/fzero-rank[0-9]*")
"""Where they are under a path: see `folder_of`."""
_MOST_NAMED = 8
SECONDS_TO_WAIT = 300.0
"""For the lock of a path: ranks hold it while they remove what is left there."""


def folder_of(path: str | Path, rank: int, state: int = 0) -> Path:
    """The folder of a rank's files, of the first of its states or of a further one.

    >>> folder_of("/disk", 3), folder_of("/disk", 3, state=1)
    (PosixPath('/disk/fzero-rank3'), PosixPath('/disk/state1/fzero-rank3'))
    """
    return (Path(path) / f"state{state}" if state else Path(path)) / f"fzero-rank{rank}"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its id, when it began (in clock ticks since the machine did), the machine's name, start and name space, and the
    same two of what started it."""

    pid: int
    started: int
    host: str
    boot: str
    names: str
    parent: int
    parent_started: int

    @classmethod
    def this_process(cls) -> Self:
        """The one that asks."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid, parent = os.getpid(), os.getppid()
        names = os.readlink("/proc/self/ns/pid")
        return cls(pid, _started(pid) or 0, socket.gethostname(), boot, names, parent, _started(parent) or 0)

    def is_followed(self) -> bool:
        """Whether this process was started in its place, by what had started both (`--max_restarts`)."""
        here = Owner.this_process()
        is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        ours, theirs = ((x.host, x.boot, x.names, x.parent, x.parent_started) for x in (here, self))
        return is_again and ours == theirs and not self.may_live()

    def may_live(self) -> bool:
        """Whether the process lives, as far as one can tell here."""
        here = Owner.this_process()
        if self.host != here.host:
            return True
        if self.boot != here.boot:
            return False
        return self.names != here.names or _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _started(pid: int) -> int | None:
    """When a process began; None if there is none, or only what is left of one that has ended."""
    try:
        # The name of the program is in parentheses and may hold any character.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def claim(path: Path, folder: Path, leftover: Literal["refuse", "clean"]) -> str:
    """Makes a folder under a path this process's own, and the path free of what was left by processes that have ended.

    Args:
        path: the path of a run; ranks may come at once.
        folder: one of its `FOLDERS`.
        leftover: what to do with what is left; of processes in whose place this one was started it is removed.

    Returns:
        The name of the claim, for `release`.

    Raises:
        FileExistsError: the folder is another's or a link, or something is left under the path and `leftover` is "refuse".
        PermissionError: the folder belongs to another user.
        OSError: of the system, if the folder cannot be made or written to, or what is left not be removed.
    """
    with contextlib.suppress(FileExistsError):  # where it is no folder, which is told when it is locked
        path.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        for made in (folder, folder.parent):
            if made != path and os.path.lexists(made):
                check_own(made)
        owner, _ = _read(folder)
        if owner and owner.may_live():
            raise FileExistsError(
                f"{folder}: is in use by {owner}; give each run a path of its own, or remove it if that has ended"
            )
        left = _left(path)
        if (folder / MARKER).exists() or _files(folder):  # whoever left that: no other run gets this folder
            left[folder] = owner
        refused = {x: of for x, of in left.items() if leftover == "refuse" and not (of and of.is_followed())}
        if refused:
            raise FileExistsError(_refusal(path, refused))
        for one in left:
            _remove(path, one)
        name = secrets.token_hex(8)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Written beside and moved, so that a marker is whole or not there.
            unfinished = folder / UNFINISHED
            with create(unfinished) as file:
                file.write(json.dumps({"claim": name} | asdict(Owner.this_process())).encode())
            unfinished.rename(folder / MARKER)
        except BaseException:
            _remove(path, folder)
            raise
    return name


def is_mine(folder: Path) -> bool:
    """Whether this process has claimed the folder, and not released it."""
    try:
        return _read(folder)[0] == Owner.this_process()
    except OSError:
        return False


def release(path: Path, folder: Path, name: str) -> None:
    """Removes a run's files, its marker, and the folders that are empty then. What has gone already is no error.

    Args:
        name: of the claim. Where there is another by now, for somebody had removed the folder, nothing is done.
    """
    with contextlib.suppress(FileNotFoundError):
        # While the marker still keeps others away, for this takes long, and the lock is for all ranks.
        for file in _files(folder) if _read(folder)[1] in (name, None) else ():
            file.unlink(missing_ok=True)
        with _alone(path):
            if _read(folder)[1] in (name, None):
                _remove(path, folder)


def _left(path: Path) -> dict[Path, Owner | None]:
    """The folders under the path whose owners have ended. One whose owner nobody knows may be in use."""
    left: dict[Path, Owner | None] = {}
    for folder in sorted(folder for pattern in FOLDERS for folder in path.glob(pattern)):
        with contextlib.suppress(OSError):  # no folder of a run, or another user's
            check_own(folder)
            owner, _ = _read(folder)
            if owner and not owner.may_live():
                left[folder] = owner
    return left


def _refusal(path: Path, left: dict[Path, Owner | None]) -> str:
    files = [file for folder in left for file in _files(folder)]
    nbytes = sum(file.stat().st_size for file in files)
    names = [f"{folder.relative_to(path)} ({owner or 'an unknown process'})" for folder, owner in left.items()]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"{path}: holds {len(files)} files ({nbytes:,} bytes) of a run that has ended, in {', '.join(names[:_MOST_NAMED])}"
        f"{more}; pass leftover='clean' to remove them, or another path"
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(FILES))


def _remove(path: Path, folder: Path) -> None:
    """Removes what a run has there, the marker last, and the folders that are empty then: nobody claims one meanwhile."""
    for file in (*_files(folder), folder / UNFINISHED, folder / MARKER):
        file.unlink(missing_ok=True)
    for empty in (folder, folder.parent):
        if empty != path:
            with contextlib.suppress(OSError):  # where something else is in it
                empty.rmdir()


def _read(folder: Path) -> tuple[Owner | None, str | None]:
    """Whose the folder is, and the name of the claim; None where that cannot be told."""
    try:
        told = json.loads((folder / MARKER).read_text())
        name = told.pop("claim", None)
        return Owner(**told), name
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None, None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process is in such a block of the same path meanwhile."""
    fd, collects = os.open(path, os.O_RDONLY | os.O_DIRECTORY), gc.isenabled()
    gc.disable()  # a store that is collected in here gives its folder up, and would wait for this very lock
    try:
        _lock(fd, path)
        yield
    finally:
        if collects:
            gc.enable()
        fcntl.flock(fd, fcntl.LOCK_UN)  # which closing leaves, where another thread has forked meanwhile
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise FileExistsError(
                    f"{path}: has been locked by another process for {SECONDS_TO_WAIT:g} s (lslocks names it); end that, or pass "
                    f"another path"
                ) from None
            time.sleep(0.01)
