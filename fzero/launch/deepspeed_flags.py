"""The flags of DeepSpeed's launcher that concern how a rank is started, and what each
does here.

`add_flags` adds them to a parser, `check_flags` refuses those that cannot be honoured,
and `rank_words` makes the command of every rank. `${local_rank}` in a command is the
rank's number on its host: torchrun's agent replaces it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from fzero.launch import bind_cores
from fzero.launch.bind_cores import parse_cores, share
from fzero.launch.hostfile import Host
from fzero.launch.launchers import HAVE_AGENTS

LOCAL_RANK = "--local_rank"
ELASTIC_RESTARTS = 100
"""DeepSpeed's number of restarts with --elastic_training."""
LEVELS = ("debug", "info", "warning", "error", "critical")
PIDS = Path("/tmp")
"""The folder of DeepSpeed's pid files; programs that start it look there."""


class Add(Protocol):
    """Adds a flag to a parser, also with hyphens."""

    def __call__(self, name: str, *others: str, **how: object) -> None: ...


def add_flags(add: Add) -> None:
    """The flags of DeepSpeed's launcher that `fzero run` has for its scripts."""
    passes = (
        "end the arguments with --local_rank=N (for scripts that have the word --local_rank, "
        "and --as-deepspeed)"
    )
    add("--local_rank", action="store_true", help=passes)
    add("--no_local_rank", action="store_true", help="do not")
    add(
        "--bind_cores_to_rank",
        action="store_true",
        help="each rank of a host has its own share of the cores",
    )
    add(
        "--bind_core_list", metavar="CORES", help="the cores to share, such as 0-3,8 (default: all)"
    )
    add(
        "--save_pid",
        action="store_true",
        help=f"write the pid of this process to {PIDS}/<pid>.deepspeed",
    )
    add(
        "--log_level",
        choices=LEVELS,
        default="info",
        help="from warning on, only errors are reported",
    )
    add("--quiet", "-q", action="store_true", help="the same as --log_level error")
    restarts = f"start failed ranks again ({ELASTIC_RESTARTS} times), also on fewer hosts"
    add("--elastic_training", action="store_true", help=restarts)
    add(
        "--min_elastic_nodes",
        type=int,
        metavar="N",
        help="with --elastic_training: the fewest hosts (default 1)",
    )
    add(
        "--max_elastic_nodes",
        type=int,
        metavar="N",
        help="with --elastic_training: the number of hosts",
    )
    add("--venv_script", metavar="FILE", help=argparse.SUPPRESS)


def check_flags(given: argparse.Namespace, hosts: Sequence[Host]) -> None:
    """Raises a ValueError for a flag that cannot be honoured."""
    if given.venv_script is not None:
        raise ValueError(
            f"--venv_script {given.venv_script}: is not needed: every host runs this python, "
            f"{sys.executable}; activate its environment here, and leave the flag out"
        )
    if given.local_rank and given.no_local_rank:
        raise ValueError("--local_rank and --no_local_rank exclude each other; give one of them")
    if given.bind_core_list is not None:
        if not given.bind_cores_to_rank:
            raise ValueError(
                f"--bind_core_list {given.bind_core_list}: needs --bind_cores_to_rank beside it; "
                f"add it"
            )
        try:
            cores = parse_cores(given.bind_core_list)
        except ValueError as error:
            raise ValueError(f"--bind_core_list: {error}") from None
        for host in hosts:
            share(cores, len(host.slots), 0)
    elif given.bind_cores_to_rank and len(hosts) == 1:
        share(range(len(os.sched_getaffinity(0))), len(hosts[0].slots), 0)
    if given.bind_cores_to_rank and given.launcher not in HAVE_AGENTS and len(hosts) > 1:
        raise ValueError(
            f"--bind_cores_to_rank: {given.launcher} binds ranks itself; say how in "
            f"--launcher_args, or use --launcher ssh"
        )
    _check_elastic(given, len(hosts))


def _check_elastic(given: argparse.Namespace, num_hosts: int) -> None:
    limits = {
        "--min_elastic_nodes": given.min_elastic_nodes,
        "--max_elastic_nodes": given.max_elastic_nodes,
    }
    named = [f"{flag} {value}" for flag, value in limits.items() if value is not None]
    if named and not given.elastic_training:
        raise ValueError(
            f"{' and '.join(named)}: needs --elastic_training beside it; add it, or use --nnodes "
            f"MIN:MAX"
        )
    if given.elastic_training and given.nnodes is not None:
        raise ValueError(
            "--elastic_training and --nnodes exclude each other: both name the hosts; give one of "
            "them"
        )
    if given.max_elastic_nodes not in (None, -1, num_hosts):
        raise ValueError(
            f"--max_elastic_nodes {given.max_elastic_nodes}: must be the number of hosts, "
            f"{num_hosts}: no other host may join; leave it out, or choose hosts with --num_nodes"
        )
    if given.min_elastic_nodes not in (None, -1) and not 1 <= given.min_elastic_nodes <= num_hosts:
        raise ValueError(
            f"--min_elastic_nodes {given.min_elastic_nodes}: must be from 1 to {num_hosts}"
        )


def elastic_hosts(given: argparse.Namespace) -> int | None:
    """The fewest hosts of `--elastic_training`; None without it."""
    if not given.elastic_training:
        return None
    return 1 if given.min_elastic_nodes in (None, -1) else int(given.min_elastic_nodes)


def rank_words(
    given: argparse.Namespace, words: Sequence[str], hosts: Sequence[Host]
) -> tuple[str, ...]:
    """The command of every rank, from that of the script and its arguments.

    Args:
        words: the program and the script, without the script's arguments.
        hosts: the hosts; those with other numbers of slots share their cores among the
            most that one has.
    """
    is_by_agent = given.launcher in HAVE_AGENTS or len(hosts) == 1
    passes = is_by_agent and passes_local_rank(given)
    bound: tuple[str, ...] = ()
    if given.bind_cores_to_rank:
        most = max(len(host.slots) for host in hosts)
        python = (sys.executable, "-I", "-S", os.path.abspath(bind_cores.__file__))
        bound = (*python, given.bind_core_list or "all", str(most), "${local_rank}")
    return (*bound, *words, *((f"{LOCAL_RANK}=${{local_rank}}",) if passes else ()), *given.args)


def passes_local_rank(given: argparse.Namespace) -> bool:
    """Whether the script gets `--local_rank=N`: as in DeepSpeed for its scripts, and
    where a script's text has the flag.
    """
    if given.no_local_rank or given.elastic_training:
        return False
    if given.local_rank or getattr(given, "as_deepspeed", False):
        return True
    with suppress(OSError, UnicodeDecodeError):
        return not (given.module or given.no_python) and LOCAL_RANK in Path(given.script).read_text(
            "utf-8"
        )
    return False


def is_quiet(given: argparse.Namespace) -> bool:
    """Whether only errors are reported."""
    return bool(given.quiet) or LEVELS.index(given.log_level) >= LEVELS.index("warning")


@contextmanager
def pid_file(given: argparse.Namespace) -> Iterator[None]:
    """Inside, the file of `--save_pid` exists.

    Raises:
        ValueError: there is one already.
    """
    if not given.save_pid:
        yield
        return
    path = PIDS / f"{os.getpid()}.deepspeed"
    try:
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        raise ValueError(f"--save_pid: there is a file {path} already; remove it") from None
    print(f"launcher pid: {os.getpid()}", flush=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
