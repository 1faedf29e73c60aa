"""`claim`, `release`: the ownership of state folders, by a marker file that names the
owner's process.

A run keeps state under a path, in a folder per rank, and per state where a process has
several (`folder_of`). A killed process leaves its marker and files behind. `claim`
reads all markers under the path, because the next run may have fewer ranks or states.
It does not touch a folder whose process is alive, or is on another machine, where this
cannot be known. Folders of processes that have ended are refused or removed, as the
caller chooses.

(A file lock would not do: the system frees it only when the last forked child has ended
too, such as a data loader's worker. The path is locked only while a folder is claimed
or released, so that ranks that start at once do so one after the other: the first of
them removes all leftovers, and no folder is removed while it is being claimed.)
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
from fzero.comms.hangs.thread_dumps import stat_of

MARKER, UNFINISHED = "owner.json", "owner.new"
FILES = "*.flat"
"""The files of a run. Besides these, only markers are ever removed."""
FOLDERS = ("fzero-rank[0-9]*", "state[0-9]*/fzero-rank[0-9]*")
"""The folders of those files under a path: see `folder_of`."""
_MOST_NAMED = 8
SECONDS_TO_WAIT = 300.0
"""The longest wait for the lock of a path, which ranks hold while they remove
leftovers.
"""


def folder_of(path: str | Path, rank: int, state: int = 0) -> Path:
    """The folder of a rank's files, for its first state or for another one.

    >>> folder_of("/disk", 3), folder_of("/disk", 3, state=1)
    (PosixPath('/disk/fzero-rank3'), PosixPath('/disk/state1/fzero-rank3'))
    """
    return (Path(path) / f"state{state}" if state else Path(path)) / f"fzero-rank{rank}"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its id and start (in clock ticks since boot), the machine's name, boot
    id and PID namespace, and the id and start of its parent."""

    pid: int
    started: int
    host: str
    boot: str
    names: str
    parent: int
    parent_started: int

    @classmethod
    def this_process(cls) -> Self:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid, parent = os.getpid(), os.getppid()
        names = os.readlink("/proc/self/ns/pid")
        return cls(
            pid,
            _started(pid) or 0,
            socket.gethostname(),
            boot,
            names,
            parent,
            _started(parent) or 0,
        )

    def is_followed(self) -> bool:
        """Whether the calling process was started in its place by the same parent
        (`--max_restarts`).
        """
        here = Owner.this_process()
        is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        ours, theirs = ((x.host, x.boot, x.names, x.parent, x.parent_started) for x in (here, self))
        return is_again and ours == theirs and not self.may_live()

    def may_live(self) -> bool:
        """Whether the process may be alive, as far as can be known on this machine."""
        here = Owner.this_process()
        if (self.host, self.boot) != (here.host, here.boot):
            return self.host != here.host
        return self.names != here.names or _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _started(pid: int) -> int | None:
    """The start of a process; None if there is none, or it is a zombie."""
    found = stat_of(pid)
    return int(found[19]) if found and found[0] not in "ZX" else None


def claim(path: Path, folder: Path, leftover: Literal["refuse", "clean"]) -> str:
    """Makes this process the owner of a folder under a path, and removes leftovers of
    ended processes from the path.

    Args:
        path: the path of a run; ranks may claim folders concurrently.
        folder: one of its `FOLDERS`.
        leftover: what to do with leftovers; those of a process that this one was
            restarted for are always removed.

    Returns:
        The name of the claim, for `release`.

    Raises:
        FileExistsError: the folder is another's or a link, or files are left under the
            path and `leftover` is "refuse".
        PermissionError: the folder belongs to another user.
        OSError: from the system, if the folder cannot be made or written to, or
            leftovers cannot be removed.
    """
    with contextlib.suppress(FileExistsError):  # if it is no folder, locking it raises
        path.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        for made in (folder, folder.parent):
            if made != path and os.path.lexists(made):
                check_own(made)
        owner, _ = _read(folder)
        if owner and owner.may_live():
            raise FileExistsError(
                f"{folder}: is in use by {owner}; give each run a path of its own, or remove it if "
                f"that has ended"
            )
        left = _left(path)
        # also with an unknown owner: this run needs the folder
        if (folder / MARKER).exists() or _files(folder):
            left[folder] = owner
        refused = {
            x: of
            for x, of in left.items()
            if leftover == "refuse" and not (of and of.is_followed())
        }
        if refused:
            raise FileExistsError(_refusal(path, refused))
        for one in left:
            _remove(path, one)
        name = secrets.token_hex(8)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Written under another name and renamed, so that a marker is complete or absent.
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
    """Removes a run's files, its marker, and the folders that are then empty. Missing
    files are no error.

    Args:
        name: the name of the claim. If the folder has been removed and claimed anew
            under another name, nothing is done.
    """
    with contextlib.suppress(FileNotFoundError):
        # Outside the lock, which all ranks share, because this takes long; the marker still keeps
        # others away.
        for file in _files(folder) if _read(folder)[1] in (name, None) else ():
            file.unlink(missing_ok=True)
        with _alone(path):
            if _read(folder)[1] in (name, None):
                _remove(path, folder)


def _left(path: Path) -> dict[Path, Owner | None]:
    """The folders under the path whose owners have ended. A folder with an unknown
    owner may be in use, and is not among them.
    """
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
    names = [
        f"{folder.relative_to(path)} ({owner or 'an unknown process'})"
        for folder, owner in left.items()
    ]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"{path}: holds {len(files)} files ({nbytes:,} bytes) of a run that has ended, in "
        f"{', '.join(names[:_MOST_NAMED])}{more}; pass leftover='clean' to remove them, or another "
        f"path"
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(FILES))


def _remove(path: Path, folder: Path) -> None:
    """Removes a run's files, the marker last, and the folders that are then empty. The
    caller holds the lock of the path.
    """
    for file in (*_files(folder), folder / UNFINISHED, folder / MARKER):
        file.unlink(missing_ok=True)
    for empty in (folder, folder.parent):
        if empty != path:
            with contextlib.suppress(OSError):  # it is not empty
                empty.rmdir()


def _read(folder: Path) -> tuple[Owner | None, str | None]:
    """The owner of a folder and the name of its claim, from the marker; None where it
    is missing or invalid.
    """
    try:
        fields = json.loads((folder / MARKER).read_text())
        name = fields.pop("claim", None)
        return Owner(**fields), name
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None, None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Excludes other processes from such a block of the same path."""
    fd, collects = os.open(path, os.O_RDONLY | os.O_DIRECTORY), gc.isenabled()
    gc.disable()  # collecting a store in here would release its folder, and wait for this very lock
    try:
        _lock(fd, path)
        yield
    finally:
        if collects:
            gc.enable()
        # closing is not enough if another thread has forked in the meantime
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise FileExistsError(
                    f"{path}: has been locked by another process for {SECONDS_TO_WAIT:g} s "
                    f"(lslocks names it); end that, or pass another path"
                ) from None
            time.sleep(0.01)
