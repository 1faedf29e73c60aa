"""`LAUNCHERS`: the commands that start a job on many hosts; one function per launcher,
from a job to printable commands.

ssh and pdsh start an agent (`fzero.launch.agent`) on each host, which starts its ranks;
mpirun and srun start the ranks themselves, which read rank and world size from the
environment (`fzero.launched`). Nothing is run here.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fzero.launch import feed
from fzero.launch.agent import AgentWork
from fzero.launch.environment import expanded
from fzero.launch.hostfile import Host

ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""A host that does not answer for 15 seconds is given up."""

READS = (
    "import json, os, sys; from collections import defaultdict; from string import Template; "
    "[os.environ.update({name: Template(value).substitute(defaultdict(str, os.environ))}) for "
    "name, value in "
    'json.loads(open(0, "rb", 0, closefd=False).readline()).items()]; '
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""The program that runs before an agent: sets the variables in the first line of its
input (templates, as `expanded` reads them), and reads no further."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, what it adds to the environment, the first line of its input, and the
    hosts it reaches.

    `str` is what one may paste into a shell.

    >>> print(Command(("echo", "a b"), environment={"X": "1"}))
    X=1 echo 'a b'
    >>> print(Command(("ssh", "a"), line="{}"))
    { printf '%s\\n' '{}'; cat; } | ssh a
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    line: str | None = None  # if there is one, the command ends when its input ends

    def __str__(self) -> str:
        sets = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        feeds = (
            "" if self.line is None else f"{{ printf '%s\\n' {shlex.quote(self.line)}; cat; }} | "
        )
        return feeds + " ".join([*sets, shlex.join(self.words)])


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """A job on several hosts; `work.node_rank` is ignored."""

    work: AgentWork
    environment: Mapping[str, str]
    """The templates of variables for other hosts (`fzero.launch.environment`):
    forwarded ones, those of the environment file, and the secret of the job. They are
    never part of a command: agents read them from their input, mpirun and srun from
    their own environment."""
    folder: str  # the working directory of the ranks, which must exist on every host
    launcher_args: tuple[str, ...] = ()
    ssh_args: tuple[str, ...] = ()  # options of ssh, also under pdsh and for checks
    python: str = sys.executable

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.work.hosts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def num_ranks(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    def agent(self, node_rank: int, *, written: str | None = None) -> str:
        """The shell command that starts the agent of one host; `written` replaces the
        number of the host.
        """
        agent = [
            "-u",
            "-m",
            "fzero.launch.agent",
            *replace(self.work, node_rank=node_rank).arguments(),
        ]
        command = (
            f"cd {shlex.quote(self.folder)} && exec "
            f"{shlex.join([self.python, '-I', '-S', '-c', READS, *agent])}"
        )
        if written is None:
            return command
        return command.replace("%", "%%").replace(
            f"--node_rank={node_rank}", f"--node_rank={written}", 1
        )

    @property
    def line(self) -> str:
        """The first line of an agent's input."""
        return json.dumps({**self.environment})

    def of_ranks(self) -> dict[str, str]:
        """The environment of ranks that are started without an agent, which get the
        values of this host.
        """
        values = expanded(self.environment, os.environ)
        return {
            **values,
            "MASTER_ADDR": self.work.master_addr,
            "MASTER_PORT": str(self.work.master_port),
        }


def ssh_words(job: LaunchJob) -> tuple[str, ...]:
    """ssh with the options of every connection."""
    return ("ssh", "-o", "BatchMode=yes", *ALIVE, *job.ssh_args)


def ssh(job: LaunchJob) -> tuple[Command, ...]:
    """One connection to each host."""
    return tuple(
        Command(
            (*ssh_words(job), *job.launcher_args, name, job.agent(number)), {}, (name,), job.line
        )
        for number, name in enumerate(job.names)
    )


def pdsh(job: LaunchJob) -> tuple[Command, ...]:
    """One pdsh, which runs ssh for each host, and writes its name for %h and its number
    for %n.

    Its own way to start ssh would give the agents no input.
    """
    words = (
        "pdsh",
        "-R",
        "exec",
        "-N",
        "-S",
        "-f",
        "1024",
        "-w",
        ",".join(job.names),
        *job.launcher_args,
    )
    connects = [
        word.replace("%", "%%") for word in (job.python, "-I", "-S", feed.__file__, *ssh_words(job))
    ]
    return (
        Command(
            (*words, *connects, "%h", job.agent(0, written="%n")),
            {"FZERO_INPUT": job.line},
            job.names,
        ),
    )


def openmpi(job: LaunchJob) -> tuple[Command, ...]:
    """mpirun of Open MPI. Ranks are not bound to cores, because binding would put all
    threads of a rank on one core.
    """
    _check_ranks_without_agent(job, "openmpi")
    where = ",".join(f"{host.name}:{len(host.slots)}" for host in job.hosts)
    exports = [word for name in job.of_ranks() for word in ("-x", name)]
    words = [
        "mpirun",
        "-n",
        str(job.num_ranks),
        "--host",
        where,
        "--map-by",
        "slot",
        "--bind-to",
        "none",
    ]
    return _of_ranks(job, *words, "--wdir", job.folder, *exports)


def mvapich(job: LaunchJob) -> tuple[Command, ...]:
    """mpirun of MVAPICH, and of other relatives of MPICH (Hydra)."""
    _check_ranks_without_agent(job, "mvapich")
    per_host = _equal_slots(job, "mvapich")
    words = [
        "mpirun",
        "-np",
        str(job.num_ranks),
        "-ppn",
        str(per_host),
        "-hosts",
        ",".join(job.names),
    ]
    return _of_ranks(job, *words, "-wdir", job.folder, "-genvlist", ",".join(job.of_ranks()))


def slurm(job: LaunchJob) -> tuple[Command, ...]:
    """srun, inside an allocation or making one. Variables are passed in the
    environment: --export would split them at commas.
    """
    _check_ranks_without_agent(job, "slurm")
    per_host = _equal_slots(job, "slurm")
    words = [
        "srun",
        f"--nodes={len(job.hosts)}",
        f"--ntasks={job.num_ranks}",
        f"--ntasks-per-node={per_host}",
    ]
    words += [
        f"--nodelist={','.join(job.names)}",
        f"--chdir={job.folder}",
        "--export=ALL",
        "--kill-on-bad-exit=1",
    ]
    return _of_ranks(job, *words, "--label")


def _of_ranks(job: LaunchJob, *words: str) -> tuple[Command, ...]:
    """One command that starts all ranks itself."""
    return (Command((*words, *job.launcher_args, *job.work.program), job.of_ranks(), job.names),)


LAUNCHERS: Mapping[str, Callable[[LaunchJob], tuple[Command, ...]]] = {
    launcher.__name__: launcher for launcher in (ssh, pdsh, openmpi, mvapich, slurm)
}
PROGRAMS = {"ssh": "ssh", "pdsh": "pdsh", "openmpi": "mpirun", "mvapich": "mpirun", "slurm": "srun"}
HAVE_AGENTS = ("ssh", "pdsh")


def _check_ranks_without_agent(job: LaunchJob, launcher: str) -> None:
    for host in job.hosts:
        if not host.takes_first_slots:
            raise ValueError(
                f"--launcher {launcher}: host {host.name!r} is to use slots {[*host.slots]}, and "
                f"ranks that {launcher} starts "
                "take the first ones; set CUDA_VISIBLE_DEVICES yourself, or use --launcher ssh"
            )
    work = job.work
    of_agents = {
        "--max_restarts": work.max_restarts,
        "--nnodes": work.min_nodes,
        "--enable_each_rank_log": work.log_dir,
    }
    if unknown := [option for option, value in of_agents.items() if value]:
        fix = f"leave out {', '.join(unknown)}, or use --launcher ssh"
        raise ValueError(f"--launcher {launcher}: starts ranks without torchrun, so {fix}")


def _equal_slots(job: LaunchJob, launcher: str) -> int:
    counts = {host.name: len(host.slots) for host in job.hosts}
    if len({*counts.values()}) > 1:
        raise ValueError(
            f"--launcher {launcher}: needs as many slots on every host, got {counts}; use "
            f"--launcher ssh"
        )
    return next(iter(counts.values()))
