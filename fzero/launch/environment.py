"""The environment of ranks: an environment file, variables forwarded to other hosts,
and defaults.

A variable that the user has set takes precedence over a default, and one of the
environment file over both. Values travel as templates (`string.Template`), because
`$NAME` in the environment file is the variable of the host where ranks start: `${NAME}`
is replaced there, and `$$` is a dollar sign.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template

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
"""Prefixes of the variables that are forwarded to other hosts. Values may be secret
(MLFLOW_TRACKING_PASSWORD), so they are never part of a command, which `ps` shows."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""For glibc: a rank keeps freed memory, so that buffers of collectives, which are
allocated in each step, are not returned to the kernel and zeroed each time. 32 MiB is
glibc's highest mmap threshold; at most 256 MiB are kept."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # valid variable names of a shell


QUOTED = re.compile(r"'[^']*'|\"(\\.|[^\"\\])*\"")
TOKEN = re.compile(
    (
        rf"\\(?P<literal>[$\"\\`])|\$(?:\{{(?P<braced>{NAME.pattern})\}}|(?P<bare>{NAME.pattern}))|(?P<command>`|\$[({{])|\$"
    ),
    re.A,
)
"""The special text that a shell reads inside double quotes: `\\$`, `$NAME`, `${NAME}`,
commands and arithmetic.
"""


def parse_env_file(text: str, *, source: str = "environment file") -> dict[str, str]:
    """The variables of lines `NAME=VALUE`, each value a template; blank lines and those
    that begin with `#` are skipped.

    Values are read as DeepSpeed's launcher has a shell read them: `$NAME` and `${NAME}`
    are replaced, `\\$` is a dollar sign, and spaces stay. Quotes around a value are
    removed; inside single ones all stays as it is.

    >>> parse_env_file("# for all hosts\\nNCCL_DEBUG=INFO\\nA=b = c\\nB=\\"$HOME/x y\\"\\nC='$HOME'")
    {'NCCL_DEBUG': 'INFO', 'A': 'b = c', 'B': '${HOME}/x y', 'C': '$$HOME'}
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
        try:
            variables[name.strip()] = _template(value.strip())
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    return variables


def _template(value: str) -> str:
    """The value of an environment file as a template."""
    whole = QUOTED.fullmatch(value)
    if whole and value[0] == "'":
        return template(value[1:-1])

    def read(found: re.Match[str]) -> str:
        if found["command"]:
            raise ValueError(
                f"{value!r} has {found['command']}, which a shell would run or compute; write the "
                f"result, or put the value in single quotes to keep it as it is"
            )
        name = found["braced"] or found["bare"]
        return f"${{{name}}}" if name else template(found["literal"] or "$")

    return TOKEN.sub(read, value[1:-1] if whole else value)


def template(value: str) -> str:
    """The template of a value that is taken as it is."""
    return value.replace("$", "$$")


def expanded(templates: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The values of templates on a host, in their order; a variable that is not set is
    empty.

    >>> expanded({"A": "${HOME}/a", "B": "${A}:${NONE}$$1"}, {"HOME": "/root"})
    {'A': '/root/a', 'B': '/root/a:$1'}
    """
    values: dict[str, str] = {}
    for name, value in templates.items():
        values[name] = Template(value).substitute(defaultdict(str, {**environment, **values}))
    return values


def read_env_files(given: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The templates of `given`, or of `.deepspeed_env` (or what DS_ENV_FILE names) at
    home and, over these, here.
    """
    if given is not None:
        return parse_env_file(given.read_text(), source=str(given))
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    variables: dict[str, str] = {}
    for path in dict.fromkeys((Path(os.path.expanduser("~")) / name, Path.cwd() / name)):
        if path.is_file():
            variables |= parse_env_file(path.read_text(), source=str(path))
    return variables


def forwarded(environment: Mapping[str, str], from_file: Mapping[str, str]) -> dict[str, str]:
    """The templates of what other hosts set before they start ranks, if the names are
    valid in a shell.

    >>> forwarded({"NCCL_DEBUG": "INFO", "HOME": "/root", "NCCL_A.B": "1"}, {"A": "1"})
    {'NCCL_DEBUG': 'INFO', 'A': '1'}
    """
    names = [
        name for name in sorted(environment) if name.startswith(FORWARDED) and NAME.fullmatch(name)
    ]
    return {name: template(environment[name]) for name in names} | {**from_file}


def not_forwarded(environment: Mapping[str, str]) -> list[str]:
    """The names that `forwarded` leaves out because they are not valid in a shell, or
    would be run as a command.

    >>> not_forwarded({"NCCL;touch x": "1", "TORCH_A.B": "1", "NCCL_DEBUG": "INFO", "A.B": "1"})
    ['NCCL;touch x', 'TORCH_A.B']
    """
    return [
        name
        for name in sorted(environment)
        if name.startswith(FORWARDED) and not NAME.fullmatch(name)
    ]


def rank_defaults(
    environment: Mapping[str, str], *, num_ranks: int, num_cores: int
) -> dict[str, str]:
    """The defaults of a host for its ranks, for variables not in `environment`:
    threads, and glibc's options for freed memory.

    >>> rank_defaults({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=0"}, num_ranks=2, num_cores=8)
    {'OMP_NUM_THREADS': '4'}
    >>> sorted(rank_defaults({"OMP_NUM_THREADS": "1"}, num_ranks=2, num_cores=8))
    ['MALLOC_MMAP_THRESHOLD_', 'MALLOC_TRIM_THRESHOLD_']
    """
    # more would contend for the same cores
    defaults = {"OMP_NUM_THREADS": str(max(1, num_cores // num_ranks))}
    if "glibc.malloc" not in environment.get("GLIBC_TUNABLES", ""):
        defaults |= ALLOCATOR
    return {name: value for name, value in defaults.items() if name not in environment}


def one_host_defaults(environment: Mapping[str, str], interfaces: Iterable[str]) -> dict[str, str]:
    """The defaults of a job on one host, for variables not in `environment`: its ranks
    listen on this host only.

    >>> one_host_defaults({"NCCL_SOCKET_IFNAME": "eth0"}, ["eth0", "lo"])
    {'GLOO_SOCKET_IFNAME': 'lo'}
    """
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if loopback is None:
        return {}
    # NCCL takes a prefix without "="
    wanted = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    return {name: value for name, value in wanted.items() if name not in environment}
