"""The *reaper*, a small process that ends the remaining processes of a job that failed,
or whose agent was killed.

    python -I -S reaper.py MARK SECONDS FOLDER

The reaper reads a pipe that closes with the job or the agent. Then it sends SIGTERM to
every process with the mark in its environment (the ranks, and all that they have
started), and kills the remaining ones after SECONDS. Then it removes FOLDER, the
agent's temporary folder, if one is given. It is run as a script and imports nothing
else.
"""

import os
import shutil
import signal
import sys
import time


def marked(mark: bytes) -> list[int]:
    """The other processes that have this line in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:  # it has ended, or is another user's
                continue
    return found


def end(mark: bytes, seconds: float) -> None:
    """Sends SIGTERM to all processes of a job; after `seconds` kills the remaining
    ones, also those started meanwhile.
    """
    deadline, number = time.monotonic() + seconds, signal.SIGTERM
    asked: set[int] = set()
    while left := marked(mark):
        if time.monotonic() > deadline:
            number, asked = signal.SIGKILL, set()
        for process in {*left} - asked:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue
        asked |= {*left}
        time.sleep(0.1)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    if not sys.stdin.buffer.read():  # after a normal end the agent writes to the pipe
        end(sys.argv[1].encode(), float(sys.argv[2]))
        if sys.argv[3]:
            shutil.rmtree(sys.argv[3], ignore_errors=True)
