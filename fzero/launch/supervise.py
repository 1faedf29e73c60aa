"""`supervise`: runs the commands of a job on many hosts, forwards their output, and
ends all at the first failure.

The standard input of each command is a pipe, the leash of its agents: they end when the
pipe closes, also if this process is killed. A failure is reported once, for the rank
that failed first.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from fzero.launch.agent import REPORT, SECONDS_TO_END, Failure
from fzero.launch.forwarder import Forwarder
from fzero.launch.launchers import Command

GRACE = 3.0  # seconds to wait for reports of other hosts, so that the first failure is reported


def ends_with_us() -> tuple[str, ...]:
    """The prefix of a command that must get SIGTERM when this process dies, also by
    SIGKILL.
    """
    return ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()


class Supervised:
    """The running commands of a job, and the failures that they have reported."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.failures: list[Failure] = []
        self.commands = commands
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[threading.Thread] = []
        self.shown = Forwarder(sys.stderr)

    def start(self) -> None:
        for command in self.commands:
            # pdsh, mpirun and srun hold the leash of their commands, and would not notice that this
            # process was killed.
            prefix = () if command.line is not None else ends_with_us()
            process = subprocess.Popen(
                (*prefix, *command.words),
                env=os.environ | {**command.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # Ctrl-C must reach only this process, which ends the others
                start_new_session=True,
            )
            self.processes.append(process)
            if command.line is not None:
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # it has ended, and says why
                    process.stdin.write(command.line + "\n")
                    process.stdin.flush()
            for stream, to in (process.stdout, sys.stdout), (process.stderr, self.shown):
                reader = threading.Thread(target=self._pass_on, args=(stream, to), daemon=True)
                reader.start()
                self.readers.append(reader)

    def _pass_on(self, stream: IO[str], to: IO[str] | Forwarder) -> None:
        for line in stream:
            _, report, failure = line.partition(REPORT)
            if report:
                found = json.loads(failure)
                self.failures.append(Failure(**found | {"lines": tuple(found["lines"])}))
            else:
                # our own reader has closed the pipe; the job goes on
                with suppress(BrokenPipeError):
                    to.write(line)
                    to.flush()

    def wait(self, num_needed: int, until: Callable[[], bool]) -> None:
        """Returns when all commands have ended, or so many have failed that fewer than
        `num_needed` are left, or at `until`.
        """
        while self._runs() and not until():
            # An agent reports a failure before it ends; pdsh, which has many, ends after the last
            # of them.
            num_failed = max(
                len(self.failures), sum(bool(process.poll()) for process in self.processes)
            )
            if num_failed > self.num_hosts - num_needed:
                return
            time.sleep(0.1)

    @property
    def num_hosts(self) -> int:
        return sum(len(command.hosts) for command in self.commands)

    def end(self, *, grace: float) -> None:
        """Ends what still runs: asked by the leash and by SIGTERM, killed after a time."""
        self._until_ended(grace)
        for command, process in zip(self.commands, self.processes):
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            if process.poll() is None and command.line is None:
                _signal(process, signal.SIGTERM)
        self._until_ended(SECONDS_TO_END + 5)
        for process in self.processes:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
            process.wait()
        for reader in self.readers:
            reader.join(timeout=2)
        self.shown.finish()

    def _until_ended(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._runs() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _runs(self) -> bool:
        return any(process.poll() is None for process in self.processes)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def supervise(commands: Sequence[Command], *, num_needed: int | None = None) -> int:
    """Runs the commands of a job until its end; returns the exit code of the rank that
    failed first, or 0.

    Args:
        commands: as a launcher composes them.
        num_needed: with fewer hosts the job is ended; by default it needs all.
    """
    job = Supervised(commands)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    got: list[int] = []

    # Only noted: an error raised by a handler is lost where it meets a finalizer.
    before = {
        number: signal.signal(number, lambda number, _: got.append(number)) for number in numbers
    }
    try:
        job.start()
        job.wait(job.num_hosts if num_needed is None else num_needed, until=lambda: bool(got))
        codes = [process.poll() for process in job.processes]
        job.end(grace=GRACE if not got and (any(codes) or job.failures) else 0)
        if got:
            return 128 + got[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if num_needed is not None and codes.count(0) >= num_needed:
        return 0  # hosts were lost, and the others have done the work
    if job.failures:
        failure = min(
            job.failures, key=lambda failure: (failure.follows, failure.code == 0, failure.time)
        )
        print(failure.after(job.shown), file=sys.stderr, flush=True)
        return failure.exit_code
    return _unreported(commands, codes)


def _unreported(commands: Sequence[Command], codes: Sequence[int | None]) -> int:
    """The code of a command that failed without a word of an agent: its host, or the
    program itself, is to blame.
    """
    for command, code in zip(commands, codes):
        if code:
            is_lost = command.words[0] == "ssh" and code == 255
            why = "the connection was lost or could not be made" if is_lost else "see above"
            what = (
                f"{command.words[0]} to {', '.join(command.hosts)} ended with code {code} ({why})"
            )
            print(f"fzero: {what}, so the job has been ended", file=sys.stderr, flush=True)
            return code if code > 0 else 128 - code
    return 0
