"""`check`: probes all hosts of a job concurrently before anything is started, and
compares their answers.

A host that cannot be reached, lacks the folder or script, or has another version of
python, torch or fzero stops the start. Differing clocks, and more slots than devices,
are warnings.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.table import Table

from fzero.common.text_tables import print_report
from fzero.launch.hostfile import Host
from fzero.launch.launchers import LaunchJob, ssh_words

SECONDS = 30  # for a host to answer
CLOCKS = 2.0  # seconds by which clocks may differ without a warning

PROBE = """
import glob, json, os, platform, sys, time
from importlib.metadata import version
print(json.dumps({"python": platform.python_version(), "torch": version("torch"), "fzero": version("fzero"),
                  "num_devices": len(glob.glob("/dev/nvidia[0-9]*")),
                  "missing": [path for path in sys.argv[1:] if not os.path.exists(path)], "clock": time.time()}))
"""


@dataclass(frozen=True, slots=True)
class HostProbe:
    """The answer of a host to the probe."""

    python: str
    torch: str
    fzero: str
    num_devices: int
    clock_error: float  # seconds by which its clock is ahead of ours, less the time of the probe
    missing: Sequence[str] = ()  # files that it lacks

    @property
    def versions(self) -> tuple[str, str, str]:
        return self.python, self.torch, self.fzero

    @property
    def description(self) -> str:
        return f"python {self.python}, torch {self.torch}, fzero {self.fzero}"


def ask(job: LaunchJob, name: str) -> HostProbe | str:
    """The answer of a host, or the reason why there is none."""
    command = (
        f"cd {shlex.quote(job.folder)} && exec "
        f"{shlex.join([job.python, '-c', PROBE, *script_of(job)])}"
    )
    words = [*ssh_words(job), "-o", f"ConnectTimeout={SECONDS // 2}", name, command]
    asked = time.time()
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {SECONDS} seconds"
    if done.returncode != 0:
        *_, last = ["", *done.stderr.strip().splitlines()]
        return last or f"ssh ended with code {done.returncode}"
    said = json.loads(done.stdout.splitlines()[-1])
    clock, now = said.pop("clock"), time.time()
    return HostProbe(**said, clock_error=max(0.0, clock - now) - max(0.0, asked - clock))


def script_of(job: LaunchJob) -> tuple[str, ...]:
    """The script file of the ranks; empty for a module or a program."""
    program = job.work.program
    return program[2:3] if program[:2] == (job.python, "-u") and program[2] != "-m" else ()


def problems(
    hosts: Sequence[Host], answers: Sequence[HostProbe | str]
) -> tuple[list[str], list[str]]:
    """The problems that stop a start, and those that are only warnings.

    >>> here, there = (
    ...     HostProbe("3.11", "2.13", "0.1", 0, 0.0),
    ...     HostProbe("3.11", "2.12", "0.1", 0, 9.0),
    ... )
    >>> stops, warnings = problems(
    ...     [Host("a", (0,)), Host("b", (0,)), Host("c", (0,))], [here, there, "no route"]
    ... )
    >>> print("\\n".join(stops + warnings))
    c: no route
    b: python 3.11, torch 2.12, fzero 0.1; a has python 3.11, torch 2.13, fzero 0.1
    b: its clock is 9.0 s ahead
    """
    stops = [
        f"{host.name}: {answer}" for host, answer in zip(hosts, answers) if isinstance(answer, str)
    ]
    warnings: list[str] = []
    answers_given = [
        (host, answer) for host, answer in zip(hosts, answers) if isinstance(answer, HostProbe)
    ]
    for host, answer in answers_given:
        first_host, first = answers_given[0]
        stops += [f"{host.name}: there is no script {path}" for path in answer.missing]
        if answer.versions != first.versions:
            stops.append(
                f"{host.name}: {answer.description}; {first_host.name} has {first.description}"
            )
        if abs(answer.clock_error) > CLOCKS:
            ahead = "ahead" if answer.clock_error > 0 else "behind"
            warnings.append(f"{host.name}: its clock is {abs(answer.clock_error):.1f} s {ahead}")
        if 0 < answer.num_devices <= max(host.slots):
            wanted = f"slot {max(host.slots)} is to be used"
            warnings.append(f"{host.name}: {wanted}, and it has {answer.num_devices} devices")
    return stops, warnings


def table(hosts: Sequence[Host], answers: Sequence[HostProbe | str]) -> Table:
    """A line for each host."""
    made = Table("host", "slots", "devices", "python", "torch", "fzero")
    for host, answer in zip(hosts, answers):
        slots = ",".join(map(str, host.slots))
        cells = (
            (answer,) if isinstance(answer, str) else (str(answer.num_devices), *answer.versions)
        )
        made.add_row(host.name, slots, *cells)
    return made


def check(job: LaunchJob) -> None:
    """Probes all hosts of a job concurrently; prints warnings, and the table of hosts
    if there is a problem.

    Raises:
        ValueError: a host that is not ready, with what is wrong with each.
    """
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = list(pool.map(lambda host: ask(job, host.name), job.hosts))
    stops, warnings = problems(job.hosts, answers)
    if stops or warnings:
        print_report(table(job.hosts, answers), stderr=True)
    for line in warnings:
        print(f"fzero: warning: {line}", file=sys.stderr)
    if stops:
        listed = "".join(f"\n  {line}" for line in stops)
        raise ValueError(
            f"hosts are not ready, so nothing was started (--no_ssh_check skips this):{listed}"
        )
