"""How are the ranks of one host started, watched and ended? By torchrun's agent, which this module configures.

    python -m fzero.agent --world_info=… --node_rank=1 --master_addr=node1 --master_port=29500 script.py args…

`fzero` runs one in its own process, or one on each host. It prefixes each line of a rank's output with the rank, ends all
ranks of the host when one fails, and says once which one it was. An agent on another host is on a *leash*: it reads its
standard input, which ends when the connection to the one who started it does, and then it ends its ranks. What is left of a
job that did not end in order, and of an agent that is killed, is for its *keeper* (`fzero.keeper`). So nothing is left
running, however the other end died.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fzero import keeper
from fzero.hosts import Host, decode, encode
from fzero.launch_environment import rank_defaults

NUM_LINES = 12  # of a failed rank's log
SECONDS_TO_END = 10  # which ranks have between being asked and being killed
LAST_CALL = 30  # seconds in which further hosts may come, when as many as must be are there
REPORT = "fzero-failure: "  # begins the line that tells a launcher on another host about a failure


@dataclass(frozen=True, slots=True)
class Failure:
    """How the first failed rank of a host ended; the code is that of a shell, 128 + number for a signal."""

    rank: int
    host: str
    code: int
    time: float
    follows: bool
    """Whether the rank only says that another one has died."""
    lines: tuple[str, ...]

    def __str__(self) -> str:
        name = {128 + number: number.name for number in signal.Signals}.get(self.code)
        how = f"was killed by {name}" if name else f"ended with code {self.code}"
        told = "; its last lines:" + "".join(f"\n    {line}" for line in self.lines) if self.lines else ""
        return f"fzero: rank {self.rank} on {self.host} {how}, so the job has been ended{told}"


@dataclass(frozen=True, slots=True)
class Work:
    """What the agent of one host runs; `hosts[node_rank]` is the host."""

    hosts: tuple[Host, ...]
    node_rank: int
    program: tuple[str, ...]
    """A command, which every rank runs."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0 is a free one, on one host."""
    log_dir: str | None = None
    max_restarts: int = 0
    min_nodes: int | None = None
    """With fewer hosts than `hosts` the job goes on, down to this; then the order of hosts is not kept."""
    last_call: int = LAST_CALL
    """Seconds that so few hosts wait for others."""

    @property
    def host(self) -> Host:
        return self.hosts[self.node_rank]

    def arguments(self) -> list[str]:
        """The command line of this module that does the work."""
        options = {
            "world_info": encode(self.hosts),
            "node_rank": self.node_rank,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "log_dir": self.log_dir,
            "max_restarts": self.max_restarts or None,
            "min_nodes": self.min_nodes,
            "last_call": self.last_call if self.last_call != LAST_CALL else None,
        }
        return [*(f"--{name}={value}" for name, value in options.items() if value is not None), "--", *self.program]


def run(work: Work, *, reports: bool = False) -> int:
    """Starts the ranks of a host and waits for them; returns the exit code of the first one that failed, or 0.

    Args:
        reports: a failure is one line for the launcher on another host, instead of a message for people.
    """
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what these tell is told here, once
    host = work.host
    defaults = rank_defaults(os.environ, num_ranks=len(host.slots), num_cores=len(os.sched_getaffinity(0)))
    os.environ.update(defaults)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_END))
    if work.max_restarts:
        # Else ranks that start again find in the agent's store, which stays, the addresses of those before, and gloo fails.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["PYTHONUNBUFFERED"] = "1"  # output is there when it is written, also that of a rank which is then killed
    if not host.takes_first_slots:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.slots))
    with ExitStack() as stack:
        folder = work.log_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="fzero-"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        in_order = stack.enter_context(kept())
        try:
            elastic_launch(launch_config(work, folder), work.program[0])(*work.program[1:])
            in_order()
        except ChildFailedError as error:
            failure = first_failure(error, host.name, folder)
            with suppress(BrokenPipeError):
                print(REPORT + json.dumps(asdict(failure)) if reports else failure, file=sys.stderr, flush=True)
            return failure.code
        except DistNetworkError as error:
            where = f"--master_port {work.master_port} of {work.master_addr}"
            raise OSError(f"{where}: {error}; give a port that is free there and can be reached") from error
        except SignalException as error:
            return 128 + int(error.sigval)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)  # the keeper ends what is left, and is not to be interrupted
    return 0


@contextmanager
def kept() -> Iterator[Callable[[], object]]:
    """Marks what is started inside. Unless the function that it gives is called, the keeper ends what is left of that.

    torchrun ends its ranks and their process groups. What a rank has started in a session of its own is left to the keeper,
    and so are ranks that a second signal kept torchrun from ending, or that the end of this process did.
    """
    os.environ["FZERO_JOB"] = uuid.uuid4().hex
    command = [sys.executable, "-I", "-S", keeper.__file__, f"FZERO_JOB={os.environ['FZERO_JOB']}", str(SECONDS_TO_END)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # no signal of a terminal reaches it, and no end of this session
        env={},
        cwd="/",
    )
    try:
        yield partial(process.communicate, b"in order")
    finally:
        process.communicate()
        del os.environ["FZERO_JOB"]


def launch_config(work: Work, log_dir: str) -> LaunchConfig:
    """torchrun's description of the host's part. Ranks follow the order of hosts, unless they may start again."""
    num_nodes = len(work.hosts)
    # torchrun's static rendezvous keeps the order, and cannot bring agents of several hosts together a second time.
    # On one host it makes the ranks listen at the port that was asked for, where the other takes a free one for them.
    keeps_order = (num_nodes > 1 or work.master_port > 0) and work.min_nodes is None and work.max_restarts == 0
    prefix = f"[{work.host.name} rank ${{rank}}] " if num_nodes > 1 else "[rank ${rank}] "
    return LaunchConfig(
        min_nodes=work.min_nodes or num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=len(work.host.slots),
        run_id=f"fzero-{work.master_port}" if num_nodes > 1 else uuid.uuid4().hex[:8],
        rdzv_backend="static" if keeps_order else "c10d",
        rdzv_endpoint=f"{work.master_addr}:{work.master_port}",
        rdzv_configs={"rank": work.node_rank, "timeout": 300}
        if keeps_order
        else {"timeout": 300, "last_call_timeout": work.last_call},
        max_restarts=work.max_restarts,
        monitor_interval=0.1,
        local_addr=work.master_addr if num_nodes == 1 else work.host.name,
        log_line_prefix_template=prefix,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir, redirects=Std.ALL, tee=Std.ALL),
    )


def first_failure(error: ChildFailedError, host: str, log_dir: str) -> Failure:
    """The failure that the others follow from: not of a rank that the agent ended, nor of one that missed another rank."""

    def told(rank: int, failed: ProcessFailure) -> Failure:
        # torchrun names log files by the local rank; of restarted ranks the last attempt has the highest number.
        paths = sorted(
            Path(log_dir).glob(f"*/attempt_*/{failed.local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime
        )
        lines = paths[-1].read_text(errors="replace").strip().splitlines() if paths else []
        code = failed.exitcode if failed.exitcode >= 0 else 128 - failed.exitcode
        follows = any("fzero.collectives.CollectiveError" in line for line in lines[-NUM_LINES:])
        return Failure(rank, host, code, float(failed.timestamp), follows, tuple(lines[-NUM_LINES:]))

    failures = [told(rank, failed) for rank, failed in error.failures.items()]  # in the order in which they were seen
    return min(failures, key=lambda failure: (failure.code == 128 + signal.SIGTERM, failure.follows))


def watch_leash() -> bool:
    """Ends this agent as SIGTERM does, as soon as standard input ends. False, and nothing, where that is no pipe or socket:
    who started the agent by hand, or in a pod, whose input is /dev/null, holds no leash."""
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    leash = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # what ranks read, so that none takes the end from us

    def wait() -> None:
        while os.read(leash, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent of one host, on the leash of the launcher that started it."""
    parser = argparse.ArgumentParser(prog="fzero.agent", description="Starts the ranks of one host; `fzero` calls it.")
    parser.add_argument("--world_info", required=True, type=decode)
    parser.add_argument("--node_rank", required=True, type=int)
    parser.add_argument("--master_addr", required=True)
    parser.add_argument("--master_port", required=True, type=int)
    parser.add_argument("--log_dir")
    parser.add_argument("--max_restarts", type=int, default=0)
    parser.add_argument("--min_nodes", type=int)
    parser.add_argument("--last_call", type=int, default=LAST_CALL)
    parser.add_argument("program", nargs="+")
    given = vars(parser.parse_args(arguments))
    work = Work(hosts=given.pop("world_info"), program=tuple(given.pop("program")), **given)
    print(f"fzero: {work.host.name} starts {len(work.host.slots)} ranks ({socket.gethostname()})", flush=True)
    return run(work, reports=watch_leash())


if __name__ == "__main__":
    sys.exit(main())
