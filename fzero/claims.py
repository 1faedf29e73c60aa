"""Whose folder is this, and does its owner still live?

A run that keeps state in a folder leaves a file there that names its process: id, start, machine. A process that is killed leaves
the file; nothing else outlives it. The next run reads who it was. If that process lives, or is on another machine where nobody
can tell, the folder is not touched. If it has ended, what it left is refused or removed, as the caller chooses.

(A lock of the file would be freed by the system with the process, but not before the last of the children that it was forked
into: the workers of a data loader, say. It is used only while a folder is claimed, so that two who come at once see each other.)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

MARKER = "owner.json"


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


def claim(folder: Path, leftover: Literal["refuse", "clean"], files: str) -> None:
    """Makes the folder this process's own, and empty of what an earlier one left there.

    Args:
        leftover: what to do with what a process left that has ended; of one in whose place this one was started it is removed.
        files: the pattern of the files that belong to a run. No other file is ever removed.

    Raises:
        FileExistsError: the folder is another's, or holds what another left and `leftover` is "refuse".
        OSError: of the system, if the folder cannot be made or written to; what was made is removed.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _mark(folder, leftover, files)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # unless another process is there by now
                folder.rmdir()
        raise


def _mark(folder: Path, leftover: Literal["refuse", "clean"], files: str) -> None:
    marker = folder / MARKER
    with _alone(folder):
        left = sorted(folder.glob(files))
        owner = _read(marker)
        if owner and owner.may_live():
            raise FileExistsError(
                f"is in use by {owner}; give each run a path of its own, or remove it if that has ended"
            )
        if (left or marker.exists()) and leftover == "refuse" and not (owner and owner.is_followed()):
            nbytes = sum(path.stat().st_size for path in left)
            by = owner or "an unknown process"
            raise FileExistsError(
                f"holds {len(left)} files ({nbytes:,} bytes) of a run that has ended ({by}); pass leftover='clean' to remove "
                f"them, or another path"
            )
        for path in left:
            path.unlink()
        # Written beside and moved, so that a marker is whole or not there.
        fresh = marker.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(asdict(Owner.this_process())))
            fresh.rename(marker)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def is_mine(folder: Path) -> bool:
    """Whether this process has claimed the folder, and not released it."""
    try:
        return _read(folder / MARKER) == Owner.this_process()
    except OSError:
        return False


def release(folder: Path, files: str) -> None:
    """Removes a run's files, its marker, and the folder if nothing else is in it. What has gone already is no error."""
    for path in (*folder.glob(files), folder / MARKER):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _read(marker: Path) -> Owner | None:
    try:
        return Owner(**json.loads(marker.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process is in such a block of the same folder meanwhile."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
