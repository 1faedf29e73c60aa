"""Which environment do ranks get? An environment file, what is forwarded to other hosts, and defaults for CPU ranks.

A variable that the user has set always wins over a default, and one of the environment file over both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

FORWARDED = (
    "CUDA_DEVICE_",
    "DEEPSPEED_TIMEOUT",
    "FZERO_TIMEOUT",
    "FZERO_TUNE",
    "GLOO",
    "MALLOC_",
    "MLFLOW",
    "MV2",
    "NCCL",
    "OMP_",
    "PYTHON",
    "TORCH_",
    "UCX",
)
"""Variables whose names begin so are set on other hosts as they are here. Their values may be secret (MLFLOW_TRACKING_PASSWORD),
and are never part of a command, which `ps` shows."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""For glibc: memory that a rank frees stays with it, so that buffers of collectives, made anew in each step, are not given
back and zeroed by the kernel each time. 32 MiB is the highest mmap threshold glibc takes; at most 256 MiB stay."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The names that a shell takes."""


def parse_env_file(text: str, *, source: str = "environment file") -> dict[str, str]:
    """The variables of lines `NAME=VALUE`; blank lines and those that begin with `#` are skipped, values are taken as they are.

    >>> parse_env_file("# for all hosts\\nNCCL_DEBUG=INFO\\nA=b = c")
    {'NCCL_DEBUG': 'INFO', 'A': 'b = c'}
    >>> parse_env_file("NCCL_DEBUG")
    Traceback (most recent call last):
    ValueError: environment file, line 1: 'NCCL_DEBUG' is not 'NAME=VALUE'
    """
    variables = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.removeprefix("export ").partition("=")
        if not equals or not NAME.fullmatch(name.strip()):
            raise ValueError(f"{source}, line {number}: {content!r} is not 'NAME=VALUE'")
        variables[name.strip()] = value.strip()
    return variables


def read_env_files(given: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `given`, or of `.deepspeed_env` (or what DS_ENV_FILE names) at home and, over these, here."""
    if given is not None:
        return parse_env_file(given.read_text(), source=str(given))
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    variables: dict[str, str] = {}
    for path in dict.fromkeys((Path(os.path.expanduser("~")) / name, Path.cwd() / name)):
        if path.is_file():
            variables |= parse_env_file(path.read_text(), source=str(path))
    return variables


def forwarded(environment: Mapping[str, str], from_file: Mapping[str, str]) -> dict[str, str]:
    """What other hosts set before they start ranks: variables whose names a shell takes.

    >>> forwarded({"NCCL_DEBUG": "INFO", "HOME": "/root", "NCCL_A.B": "1"}, {"A": "1"})
    {'NCCL_DEBUG': 'INFO', 'A': '1'}
    """
    names = [name for name in sorted(environment) if name.startswith(FORWARDED) and NAME.fullmatch(name)]
    return {name: environment[name] for name in names} | {**from_file}


def not_forwarded(environment: Mapping[str, str]) -> list[str]:
    """The names that `forwarded` leaves out because a shell would not take them, or would take them for a command.

    >>> not_forwarded({"NCCL;touch x": "1", "TORCH_A.B": "1", "NCCL_DEBUG": "INFO", "A.B": "1"})
    ['NCCL;touch x', 'TORCH_A.B']
    """
    return [name for name in sorted(environment) if name.startswith(FORWARDED) and not NAME.fullmatch(name)]


def rank_defaults(environment: Mapping[str, str], *, num_ranks: int, num_cores: int) -> dict[str, str]:
    """What a host sets for its ranks where `environment` does not: threads, and how glibc keeps freed memory.

    >>> rank_defaults({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=0"}, num_ranks=2, num_cores=8)
    {'OMP_NUM_THREADS': '4'}
    >>> sorted(rank_defaults({"OMP_NUM_THREADS": "1"}, num_ranks=2, num_cores=8))
    ['MALLOC_MMAP_THRESHOLD_', 'MALLOC_TRIM_THRESHOLD_']
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, num_cores // num_ranks))}  # more would contend for the same cores
    if "glibc.malloc" not in environment.get("GLIBC_TUNABLES", ""):
        defaults |= ALLOCATOR
    return {name: value for name, value in defaults.items() if name not in environment}


def one_host_defaults(environment: Mapping[str, str], interfaces: Iterable[str]) -> dict[str, str]:
    """What a job on one host sets for its ranks where `environment` does not, so that they listen to this host alone.

    >>> one_host_defaults({"NCCL_SOCKET_IFNAME": "eth0"}, ["eth0", "lo"])
    {'GLOO_SOCKET_IFNAME': 'lo'}
    """
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if loopback is None:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}  # NCCL takes a prefix without "="
    return {name: value for name, value in wanted.items() if name not in environment}
