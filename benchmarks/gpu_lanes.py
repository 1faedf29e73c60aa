"""A lane of `gpu.py`: rows that run one after the other in a process, which is started
anew when a row has failed or hangs.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS_TO_START = 60
"""Of a process before its first row: it imports torch."""


def forget_compiled(folder: Path) -> None:
    """Removes what was compiled: a compiler that was killed leaves locks and empty
    files, on which later ones wait or fail.
    """
    shutil.rmtree(folder, ignore_errors=True)


def started(mark: str) -> list[int]:
    """The processes that are there whose environment has this entry."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [process for process in found if process != os.getpid()]


def end_all(mark: str) -> None:
    """Ends all processes of a mark, also those with a session or a process group of
    their own: ranks, and compilers.
    """
    until = time.time() + 10
    while (left := started(mark)) and time.time() < until:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


Found = tuple[str, dict[str, Any]]


class Lane:
    """`poll` again and again; it returns what is new of rows."""

    def __init__(
        self,
        name: str,
        command: list[str],
        limits: dict[str, float],
        files: dict[str, Path],
        environment: dict[str, str],
        until: float,
    ) -> None:
        self.name, self.command, self.limits, self.files, self.until = (
            name,
            command,
            limits,
            files,
            until,
        )
        self.mark = f"{os.environ['GPU_RUN']} {name}"
        self.environment = environment | {"GPU_LANE": self.mark}
        self.left, self.num_at_start = list(limits), len(limits)
        self.process: subprocess.Popen[bytes] | None = None
        self.log, self.begun_at, self.seen = next(iter(files.values())).with_suffix(".log"), 0.0, ""

    @property
    def is_done(self) -> bool:
        return not self.left and self.process is None

    def poll(self) -> Iterator[Found]:
        if self.process is None:
            if self.left:
                yield from self._start()
            return
        # asked first, so that all it has written is read
        has_ended = self.process.poll() is not None
        while self.left and (row := self._read(self.left[0])).get("ended"):
            self.begun_at = time.time()
            yield self.left.pop(0), row
        if has_ended:
            if self.left and (
                "begun" in self._read(self.left[0]) or len(self.left) == self.num_at_start
            ):
                yield from self._cut(f"exit {self.process.returncode}: {self._last_line()}")
            self.process = None
            return
        if not self.left:
            return
        row, now = self._read(self.left[0]), time.time()
        limit = self.limits[self.left[0]] + (0 if "begun" in row else SECONDS_TO_START)
        if now > self.until:
            yield from self.end("no time was left")
        elif now > row.get("begun", self.begun_at) + limit:
            self._end_process()
            yield from self._cut(f"took more than {limit:.0f} s")
        elif row and (text := json.dumps(row)) != self.seen:
            self.seen = text
            yield self.left[0], {"not_run": "it was in it"} | row

    def end(self, why: str) -> Iterator[Found]:
        """Ends what runs; keeps what its row has measured."""
        self._end_process()
        if self.left:
            name, row = self.left[0], self._read(self.left[0])
            if "passed" in row:
                yield (
                    name,
                    row | {"error": why, "seconds": time.time() - row["begun"], "ended": True},
                )
            elif "begun" in row:
                yield (
                    name,
                    row | {"not_run": why, "seconds": time.time() - row["begun"], "ended": True},
                )
        self.left, self.process = [], None

    def _start(self) -> Iterator[Found]:
        if time.time() > self.until:
            self.left = []
            return
        self.begun_at, self.num_at_start = time.time(), len(self.left)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.command, "--rows", ";".join(self.left)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )
        yield from ()

    def _cut(self, why: str) -> Iterator[Found]:
        """The row under way has not ended by itself: what it kept, why it ended, and
        the last lines of its process.
        """
        name = self.left.pop(0)
        row = self._read(name)
        seconds = time.time() - row.get("begun", self.begun_at)
        text = self.log.read_text(errors="replace")[-6000:]
        yield (
            name,
            {"passed": False}
            | row
            | {"error": why, "traceback": text, "seconds": seconds, "ended": True},
        )

    def _end_process(self) -> None:
        """Ends the process and all that it started. Its threads' stacks go to the log
        first.
        """
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        end_all(f"GPU_LANE={self.mark}")
        if self.process is not None:
            self.process.wait()
            self.process = None
        forget_compiled(Path(self.environment["TORCHINDUCTOR_CACHE_DIR"]))

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.files[name].read_text())
        except OSError:
            return {}
        return found

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
        return lines[-1][:500]
