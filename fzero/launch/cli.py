"""`fzero [run] [flags] script.py args…`: starts a training script on one machine or
many, with DeepSpeed's flags.

`choose_hosts` selects hosts and slots, `work_of` the work of their agents. Then this
process is the agent of its own ranks (`fzero.launch.agent`), or a launcher composes
commands (`fzero.launch.launchers`) that are printed (--dry_run) or run together
(`fzero.launch.supervise`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import torch

from fzero.common.flags import Parser
from fzero.comms.hangs.failures import timeout_of
from fzero.comms.rendezvous import DEFAULT_PORT
from fzero.launch import agent
from fzero.launch.agent import LAST_CALL, AgentWork
from fzero.launch.deepspeed_flags import (
    ELASTIC_RESTARTS,
    add_flags,
    check_flags,
    elastic_hosts,
    is_quiet,
    pid_file,
    rank_words,
)
from fzero.launch.environment import (
    expanded,
    forwarded,
    not_forwarded,
    rank_defaults,
    read_env_files,
)
from fzero.launch.hostfile import Host, choose, parse_filter, parse_hostfile
from fzero.launch.launchers import HAVE_AGENTS, LAUNCHERS, PROGRAMS, Command, LaunchJob
from fzero.launch.preflight import check
from fzero.launch.rendezvous import SECRET
from fzero.launch.supervise import supervise

HOSTFILE = Path("/job/hostfile")
NPROC = ("--nproc_per_node", "--nproc-per-node")
"""torchrun's name for --num_procs."""
ALSO = dict.fromkeys(("world", "world_size", "ranks"), "--num_procs")
"""Other names for flags, from `fzero plan`, torchrun and the documentation, for which
the error suggests the flag here.
"""


class LaunchError(ValueError):
    """The job cannot be started; the message has the flag, the rule and the fix."""


def parser() -> argparse.ArgumentParser:
    """The flags of `fzero run`, each with _ or - between its words."""
    made = Parser(
        also=ALSO,
        prog="fzero run",
        allow_abbrev=False,
        description="Starts a script in one process for each device, on one machine or on many.",
        usage="fzero [run] [flags] [-m] script.py [args of the script …]",
        epilog="example: fzero run --num_procs 2 train.py --steps 100",
    )

    def add(name: str, *others: str, **how: object) -> None:
        hyphens = [name.replace("_", "-")] if "_" in name else []
        made.add_argument(*others, name, *hyphens, dest=name[2:], **how)  # type: ignore[arg-type]

    # the ranks of a host, and their program
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        metavar="N",
        help="ranks per host, on the first N devices",
    )
    add("--num_procs", *NPROC, type=int, metavar="N", help="the same, for machines without devices")
    where = f"where rank 0 listens (free on one machine, {DEFAULT_PORT} on many)"
    add("--master_port", type=port, metavar="P", help=where)
    add("--module", "-m", action="store_true", help="the script is the name of a module")
    add("--no_python", action="store_true", help="the script is a program of its own")
    add(
        "--as_deepspeed",
        action="store_true",
        help="`import deepspeed` is fzero.deepspeed in the ranks",
    )
    add("--enable_each_rank_log", metavar="DIR", help="keep what each rank writes in this folder")
    # the choice of hosts, and lost ones
    lines = f"lines of 'host slots=N' (default {HOSTFILE}, if it is there)"
    add("--hostfile", "-H", type=Path, metavar="FILE", help=lines)
    add("--include", "-i", default="", metavar="FILTER", help="only these: 'host:slot,slot@host'")
    add("--exclude", "-e", default="", metavar="FILTER", help="all but these")
    add("--num_nodes", type=int, metavar="N", help="only the first N hosts")
    add("--nnodes", metavar="MIN:MAX", help="go on with as few hosts as MIN when some are lost")
    seconds = (
        f"with --nnodes: seconds that the hosts which are there wait for the others (default "
        f"{LAST_CALL})"
    )
    add("--wait_for_hosts", type=int, default=LAST_CALL, metavar="S", help=seconds)
    seconds = "seconds that a collective waits for a rank (FZERO_TIMEOUT, default 600)"
    add("--timeout", type=float, metavar="S", help=seconds)
    add(
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the ranks again, N times, when one fails",
    )
    add("--master_addr", metavar="HOST", help="where rank 0 listens (default: the first host)")
    add(
        "--node_rank",
        type=int,
        metavar="K",
        help="with --no_ssh: which of the hosts this machine is",
    )
    # starting the hosts
    add(
        "--no_ssh",
        action="store_true",
        help="start the ranks of this host alone; start the others yourself",
    )
    add("--no_ssh_check", action="store_true", help="do not look at the hosts before the start")
    add("--ssh_port", type=port, metavar="P")
    add("--force_multi", action="store_true", help="use the launcher also for a single host")
    add("--launcher", choices=LAUNCHERS, default="ssh")
    add(
        "--launcher_args",
        default="",
        metavar="ARGS",
        help="more arguments for ssh, pdsh, mpirun or srun, in one word",
    )
    add(
        "--env_file",
        type=Path,
        metavar="FILE",
        help="lines of NAME=VALUE for every rank (default .deepspeed_env)",
    )
    add(
        "--autotuning",
        choices=("tune", "run"),
        help="find the fastest configuration (fzero tune), and run with it",
    )
    add("--dry_run", action="store_true", help="print the commands and run nothing")
    add_flags(add)
    made.add_argument("script")
    made.add_argument("args", nargs=argparse.REMAINDER)
    return made


def port(text: str) -> int:
    """The number of a port.

    >>> port("70000")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: must be from 1 to 65535, got '70000'; leave it out for the default
    """
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(
            f"must be from 1 to 65535, got {text!r}; leave it out for the default"
        )
    return int(text)


def say(line: str) -> None:
    """Prints a message to the user on stderr."""
    print(f"fzero: {line}", file=sys.stderr, flush=True)


def _speaker(given: argparse.Namespace) -> Callable[[str], None]:
    """`say`, or nothing where only errors are to be reported."""
    return (lambda line: None) if is_quiet(given) else say


def choose_hosts(given: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts and slots of the job; this machine where there is no hostfile."""
    if given.num_gpus is not None and given.num_procs is not None:
        what = "both are the ranks of a host"
        raise LaunchError(
            f"--num_gpus and --num_procs exclude each other: {what}; give one of them"
        )
    if given.num_procs is not None and given.num_procs < 1:
        raise LaunchError(f"--num_procs {given.num_procs}: must be at least 1")
    slots_per_host: int | None = given.num_gpus if given.num_procs is None else given.num_procs
    chosen = {"include": given.include, "exclude": given.exclude, "slots_per_host": slots_per_host}
    path: Path = given.hostfile or HOSTFILE
    say = _speaker(given)
    if path.is_dir():
        raise LaunchError(
            f"--hostfile {path}: is a folder; give a file with lines of 'host slots=N'"
        )
    if path.is_file():
        return choose(
            parse_hostfile(path.read_text(), source=str(path)), num_nodes=given.num_nodes, **chosen
        )
    if (given.num_nodes or 1) > 1:
        why = f"needs a hostfile, and there is none at {path}"
        raise LaunchError(f"--num_nodes {given.num_nodes}: {why}; give --hostfile")
    if given.hostfile:
        say(f"there is no hostfile {path}: running on this machine alone")
    num_devices = torch.cuda.device_count()
    if num_devices == 0 and slots_per_host is None and not given.include and not given.exclude:
        say("no GPU is here: starting one rank; --num_procs N starts more")
    if num_devices == 0 and given.num_gpus is not None:
        say(
            f"no GPU is here: --num_gpus {given.num_gpus} starts as many processes on the CPU, as "
            f"--num_procs does"
        )
    if num_devices == 0 and given.exclude:
        raise LaunchError(
            f"--exclude {given.exclude}: this machine has no GPU; --num_procs N starts N ranks"
        )
    named = (
        parse_filter(given.include, option="--include").get("localhost")
        if num_devices == 0 and given.include
        else ()
    )
    found = max(
        num_devices,
        1 if slots_per_host is None else slots_per_host,
        *(slot + 1 for slot in named or ()),
    )
    if given.num_gpus is not None and 0 < num_devices < given.num_gpus:
        why = f"this machine has {num_devices}"
        raise LaunchError(
            f"--num_gpus {given.num_gpus}: {why}; --num_procs starts more ranks than that"
        )
    return choose([Host("localhost", tuple(range(found)))], **chosen)


def program_of(given: argparse.Namespace, hosts: tuple[Host, ...]) -> tuple[str, ...]:
    """The command of every rank."""
    if given.no_python and given.module:
        raise LaunchError("--no_python and --module exclude each other: a module is run by python")
    python = (sys.executable, "-u")
    if given.as_deepspeed:
        before = (*python, "-m", "fzero.deepspeed", *(("--no_python",) if given.no_python else ()))
    else:
        before = () if given.no_python else python
    return rank_words(given, (*before, *(("-m",) if given.module else ()), given.script), hosts)


def check_program(given: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Raises LaunchError when the ranks' script, module or program is not on this
    machine.
    """
    script = given.script
    if given.no_python:
        if shutil.which(script, path=environment.get("PATH")) is None:
            raise LaunchError(
                f"--no_python {script}: there is no such program on the PATH; check its name"
            )
    elif given.module:
        paths = [
            os.getcwd(),
            *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)),
            *sys.path,
        ]
        top = script.partition(".")[0]
        with patch.object(sys, "path", paths):
            is_there = top in sys.modules or find_spec(top) is not None
        if not is_there:
            raise LaunchError(
                f"--module {script}: there is no module {top!r} here; check its name and PYTHONPATH"
            )
    elif not Path(script).exists():
        near = get_close_matches(script, [path.name for path in Path().glob("*.py")], 1)
        hint = f"did you mean {near[0]}?" if near else f"the current folder is {os.getcwd()}"
        raise LaunchError(f"there is no script {script}; {hint}")


def fewest_nodes(given: argparse.Namespace, num_hosts: int) -> int | None:
    """The first number of `--nnodes MIN:MAX`, None where the number of hosts is fixed."""
    if given.nnodes is None:
        return elastic_hosts(given)
    smallest, colon, largest = given.nnodes.partition(":")
    if not (
        colon
        and smallest.isdecimal()
        and largest.isdecimal()
        and 1 <= int(smallest) <= int(largest) == num_hosts
    ):
        raise LaunchError(
            f"--nnodes {given.nnodes}: must be MIN:MAX with MAX the number of hosts, {num_hosts}"
        )
    return int(smallest)


def work_of(given: argparse.Namespace, hosts: tuple[Host, ...], *, is_local: bool) -> AgentWork:
    """The work of the agents; on this machine alone, at a free port."""
    if given.max_restarts < 0:
        raise LaunchError(f"--max_restarts {given.max_restarts}: must be 0 or more")
    if given.wait_for_hosts < 0:
        raise LaunchError(f"--wait_for_hosts {given.wait_for_hosts}: must be 0 or more seconds")
    if not 0 <= (given.node_rank or 0) < len(hosts):
        rule = f"must be from 0 to {len(hosts) - 1}"
        raise LaunchError(f"--node_rank {given.node_rank}: {rule}; there are {len(hosts)} hosts")
    log_dir = given.enable_each_rank_log
    return AgentWork(
        hosts=hosts,
        node_rank=given.node_rank or 0,
        program=program_of(given, hosts),
        master_addr=given.master_addr or ("127.0.0.1" if is_local else hosts[0].name),
        master_port=given.master_port or (0 if is_local else DEFAULT_PORT),
        log_dir=log_dir and os.path.abspath(log_dir),
        max_restarts=given.max_restarts or (ELASTIC_RESTARTS if given.elastic_training else 0),
        min_nodes=fewest_nodes(given, len(hosts)),
        last_call=given.wait_for_hosts,
    )


def commands_of(
    given: argparse.Namespace,
    work: AgentWork,
    environment: Mapping[str, str],
    from_file: Mapping[str, str],
) -> tuple[LaunchJob, tuple[Command, ...]]:
    """The job on many hosts, and the commands of its launcher."""
    for name in not_forwarded(environment):
        rule = "a name has letters, digits and _ only, and begins with no digit"
        _speaker(given)(f"the variable {name!r} is not set on other hosts: {rule}")
    variables = forwarded(environment, from_file)
    if work.needs_secret:
        variables[SECRET] = secrets.token_hex(16)
    # then the hosts' cores are assumed to be as many as this machine's
    if given.launcher not in HAVE_AGENTS:
        num_ranks, num_cores = max(len(host.slots) for host in work.hosts), os.cpu_count() or 1
        variables = (
            rank_defaults(
                {**environment, **expanded(from_file, environment)},
                num_ranks=num_ranks,
                num_cores=num_cores,
            )
            | variables
        )
    launcher_args = tuple(shlex.split(given.launcher_args))
    ssh_args = tuple(environment.get("PDSH_SSH_ARGS_APPEND", "").split())
    if given.launcher == "ssh":
        ssh_args, launcher_args = launcher_args, ()
    port = () if given.ssh_port is None else ("-p", str(given.ssh_port))
    job = LaunchJob(work, variables, os.getcwd(), launcher_args, (*port, *ssh_args))
    return job, LAUNCHERS[given.launcher](job)


def start(given: argparse.Namespace) -> int:
    """Starts the job, or prints its commands; returns the exit code of the rank that
    failed first, or 0.
    """
    hosts = choose_hosts(given)
    check_flags(given, hosts)
    from_file = read_env_files(given.env_file, os.environ)
    if given.timeout is not None:
        if not 0 < given.timeout < float("inf"):
            raise LaunchError(f"--timeout {given.timeout}: must be a positive number of seconds")
        from_file["FZERO_TIMEOUT"] = f"{given.timeout:g}"
    here = expanded(from_file, os.environ)
    timeout_of(os.environ | here)  # raises here instead of on every rank
    is_many = len(hosts) > 1 or given.force_multi
    if given.no_ssh and is_many and given.node_rank is None:
        raise LaunchError(
            "--no_ssh: starts one host, so give --node_rank, the number of this one in the hostfile"
        )
    work = work_of(given, hosts, is_local=not is_many)
    if not is_many and (given.launcher != "ssh" or given.launcher_args):
        _speaker(given)(
            "one host needs no launcher: --launcher and --launcher_args have no effect; "
            "--force_multi uses them"
        )
    if not is_many or given.no_ssh:
        if given.dry_run:
            print(
                Command((sys.executable, "-u", "-m", "fzero.launch.agent", *work.arguments()), here)
            )
            return 0
        os.environ.update(here)
        check_program(given, os.environ)
        with pid_file(given):
            return agent.run(work)
    job, commands = commands_of(given, work, os.environ, from_file)
    if given.dry_run:
        print("\n".join(map(str, commands)))
        return 0
    if shutil.which(program := PROGRAMS[given.launcher]) is None:
        fix = "install it, or use another launcher"
        raise LaunchError(f"--launcher {given.launcher}: there is no {program} here; {fix}")
    if given.launcher in HAVE_AGENTS and not given.no_ssh_check:
        check(job)
    with pid_file(given):
        return supervise(commands, num_needed=work.min_nodes)


def main(arguments: list[str]) -> int:
    """Runs `fzero run` with these arguments."""
    try:
        return start(parser().parse_args(arguments))
    except (ValueError, OSError) as error:
        say(str(error))
        sys.exit(2)
