"""Stacks of all threads of a process: of this process, or of another one on this host,
even while C code holds the GIL there.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

WATCH = "fzero-watch"
"""The name of the thread of the watchdog."""
NUMBER = signal.SIGRTMAX - 7 if hasattr(signal, "SIGRTMAX") else None
"""A real-time signal that other programs do not use."""


def stack_here() -> str:
    """The stacks of this process' threads, except those of the watchdog and of idle
    workers, in the format of Python.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        reports = [
            Path(frame.filename).name in ("watchdog.py", "thread_dumps.py") for frame in frames
        ]
        del frames[[*reports, True].index(True) :]  # the frames of this report are not part of it
        is_idle = not frames or frames[-1].filename.endswith("concurrent/futures/thread.py")
        if not is_idle and names.get(ident) != WATCH:
            stacks.append(f"  Thread {names.get(ident, ident)}:\n" + "".join(frames.format()))
    return "".join(stacks)


def answer_signals() -> IO[bytes] | None:
    """Writes the stacks into a file when the signal comes. Returns the file, which has
    no name; None if this is impossible.
    """
    if (
        NUMBER is None
        or signal.getsignal(NUMBER) != signal.SIG_DFL
        or not Path("/proc/self/fd").exists()
    ):
        return None
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process may be asked
    faulthandler.register(NUMBER, file=file, all_threads=True)
    return file


def identity_of(file: IO[bytes] | None) -> dict[str, Any]:
    """The values that identify this process: its host, its pid there, its start time,
    and the file of its stacks.
    """
    found = os.fstat(file.fileno()) if file is not None else None
    return {
        "host": socket.gethostname(),
        "pids": os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").exists() else "",
        "pid": os.getpid(),
        "since": since[19] if (since := stat_of(os.getpid())) else "",
        "fd": file.fileno() if file is not None else None,
        "file": [found.st_dev, found.st_ino] if found is not None else None,
    }


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, which is the state; [] if there
    is no such process.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def fate_of(identity: Mapping[str, Any]) -> str:
    """The reason why another process of this host cannot answer: it has ended (with its
    exit code, if known), or is stopped.

    It is "" if the process is alive, or if that is unknown: it is on another host, or
    this system has no /proc.
    """
    mine, pid = identity_of(None), identity["pid"]
    if not mine["since"] or any(identity.get(key) != mine[key] for key in ("host", "pids")):
        return ""
    found = stat_of(pid)
    if not found or found[19] != identity["since"]:  # another process may have its pid now
        return "its process has ended"
    if found[0] in ("Z", "X"):  # its parent has not read its exit code yet
        code = os.waitstatus_to_exitcode(int(found[49]))
        end = (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        return f"its process {end}"
    if found[0] in ("T", "t"):
        return f"its process is stopped; `kill -CONT {pid}` on {identity['host']} lets it go on"
    return ""


def stack_of(identity: Mapping[str, Any]) -> str:
    """The stacks of another process of this host, which writes them without its
    interpreter; "" if this fails.
    """
    if identity["fd"] is None or NUMBER is None:
        return ""
    path = Path(f"/proc/{identity['pid']}/fd/{identity['fd']}")
    with suppress(OSError):
        found = path.stat()
        if [found.st_dev, found.st_ino] != identity["file"]:
            return ""  # another process has this pid now, and the signal would kill it
        os.kill(identity["pid"], NUMBER)
        deadline = time.monotonic() + 2
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.2)
            before, text = text, path.read_text(errors="replace")
            if text and text == before:
                break
        return text
    return ""


def answer_no_signals(file: IO[bytes]) -> None:
    """Undoes `answer_signals`."""
    assert NUMBER is not None
    faulthandler.unregister(NUMBER)
    file.close()
