"""`PLATFORMS`, `tested_versions`: on which machines and versions fzero was run, for
`fzero env`, `fzero test` and the docs.
"""

from __future__ import annotations

import platform
import re
from typing import NamedTuple


class Platform(NamedTuple):
    """A kind of machine, whether fzero runs there (`works`, `not tested`, `does not`),
    and what is known.
    """

    name: str
    status: str
    note: str


PLATFORMS = (
    Platform("Linux, CPU (gloo)", "works", "x86-64, one machine: every test"),
    Platform(
        "Linux, one GPU (CUDA)",
        "works",
        "one H200 with PyTorch 2.11: laws, speeds and 456 tests; `fzero test` and `make gpu` try a "
        "card",
    ),
    Platform("Linux, several GPUs (NCCL)", "not tested", "rules checked on pretended devices"),
    Platform(
        "Linux, several machines",
        "not tested",
        "several agents on one machine are; ssh, pdsh, mpirun, srun are composed",
    ),
    Platform(
        "Slurm", "not tested", "variables of srun are read; an sbatch file is in recipes/nodes.md"
    ),
    Platform("WSL 2", "not tested", "it is Linux: the same paths"),
    Platform("macOS", "not tested", "CPU only; files past the page cache need Linux"),
    Platform("Windows", "does not", "the launcher needs POSIX processes; use WSL 2"),
)
"""The table of docs/start.md."""

TORCH, PYTHON = ("2.11", "2.14"), ("3.11", "3.13")
"""The first and the last version that the tests have run on."""


def untested_versions(torch: str, python: str) -> tuple[str, ...]:
    """The versions among these that no test has run on.

    >>> untested_versions("2.13.0+cpu", "3.12.1"), untested_versions("2.15.0", "3.14.0")
    ((), ('torch 2.15.0 (tested: 2.11 to 2.14)', 'python 3.14.0 (tested: 3.11 to 3.13)'))
    """
    asked = (("torch", torch, TORCH), ("python", python, PYTHON))
    return tuple(
        f"{name} {version} (tested: {first} to {last})"
        for name, version, (first, last) in asked
        if not _numbers(first) <= _numbers(version) <= _numbers(last)
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def platform_here(*, has_gpu: bool) -> Platform:
    """The row of `PLATFORMS` that describes this machine."""
    system, release = platform.system(), platform.release().lower()
    if system == "Linux":
        name = "WSL 2" if "microsoft" in release else "Linux, one GPU" if has_gpu else "Linux, CPU"
    else:
        name = {"Darwin": "macOS"}.get(system, "Windows")
    return next(row for row in PLATFORMS if row.name.startswith(name))
