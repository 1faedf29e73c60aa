"""What if a job does not end in order, or its agent is killed? The *keeper*, a small process, ends what is left of it.

    python -I -S keeper.py MARK SECONDS FOLDER

The keeper holds the end of a pipe that closes with the job, or with the agent. Then it asks every process whose environment
has the mark to end, which are the ranks and all that they have started, and kills after so many seconds what is left. Then it
removes the folder, if one is named, in which the agent kept what would go with it. It is run as a file of its own, without
anything that would have to be imported first.
"""

import os
import shutil
import signal
import sys
import time


def marked(mark: bytes) -> list[int]:
    """The processes that were started with a line of their environment, but this one."""
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
    """Asks all of a job to end; kills after so many seconds what is left, and what that has started meanwhile."""
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
    if not sys.stdin.buffer.read():  # an agent that ends in order says so
        end(sys.argv[1].encode(), float(sys.argv[2]))
        if sys.argv[3]:
            shutil.rmtree(sys.argv[3], ignore_errors=True)
