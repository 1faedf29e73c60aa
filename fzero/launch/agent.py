"""The agent of one host: starts, watches and ends its ranks, through torchrun's agent,
which this module configures.

    python -m fzero.launch.agent --world_info=… --node_rank=1 --master_addr=node1 --master_port=29500 script.py args…

`fzero` runs one agent in its own process, or one on each host. The agent prefixes each
line of a rank's output with the rank, ends all ranks of the host when one fails, and
reports once which one it was. An agent on another host is on a *leash*: its standard
input ends with the connection to the launcher, and then it ends its ranks. (The first
line of that input, variables and the secret of the job, has been read before:
`fzero.launch.launchers.READS`.) The *reaper* (`fzero.launch.reaper`) ends processes
that remain after a failed job or a killed agent. So nothing is left running, however
the launcher ended.
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
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fzero.comms.rendezvous import agent_store
from fzero.launch import reaper
from fzero.launch.environment import one_host_defaults, rank_defaults
from fzero.launch.forwarder import Forwarder
from fzero.launch.hostfile import Host, decode, encode
from fzero.launch.rendezvous import BACKEND, SECRET, Secret

NUM_LINES = 12  # lines shown of a failed rank's log
NUM_SEARCHED = 2000  # last lines of the log that are searched for the error
SECONDS_TO_END = 10  # between SIGTERM and SIGKILL for a rank
LAST_CALL = 30  # seconds to wait for more hosts once the minimum is there
# prefix of the line that reports a failure to a launcher on another host
REPORT = "fzero-failure: "


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a host's first failed rank; the code is that of a shell, 128 + number
    for a signal.
    """

    rank: int
    host: str
    code: int  # 0 where a rank ended normally while others still waited for it
    time: float
    follows: bool  # whether the rank's error only reports that another rank has died
    lines: tuple[str, ...]
    is_above: bool = False  # whether its error was shown just before

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher."""
        return self.code or 1

    def after(self, shown: Forwarder) -> Failure:
        """The failure without the lines, where these are the error that was shown last."""
        return (
            replace(self, lines=(), is_above=True)
            if shown.has_shown_last(self.rank, self.lines)
            else self
        )

    def __str__(self) -> str:
        name = {128 + number: number.name for number in signal.Signals}.get(self.code)
        how = f"was killed by {name}" if name else f"ended with code {self.code}"
        how += "" if self.code else ", and others waited for it"
        log = (
            "; its last lines:" + "".join(f"\n    {line}" for line in self.lines)
            if self.lines
            else ""
        )
        log = "; its error is above" if self.is_above else log
        return f"fzero: rank {self.rank} on {self.host} {how}, so the job has been ended{log}"


LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class AgentWork:
    """The work of one host's agent; `hosts[node_rank]` is the host."""

    hosts: tuple[Host, ...]
    node_rank: int
    program: tuple[str, ...]  # the command of every rank
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 chooses a free port, on one host
    log_dir: str | None = None
    max_restarts: int = 0
    min_nodes: int | None = None
    """The job continues with fewer hosts than `hosts`, down to this number; the order
    of hosts is not kept then.
    """
    last_call: int = LAST_CALL  # seconds that the minimum of hosts waits for more

    @property
    def host(self) -> Host:
        return self.hosts[self.node_rank]

    @property
    def starts_again(self) -> bool:
        """Whether ranks may start a second time."""
        return self.min_nodes is not None or self.max_restarts > 0

    @property
    def needs_secret(self) -> bool:
        """Whether the agents must authenticate each other: those of several hosts whose
        ranks may start again.
        """
        return len(self.hosts) > 1 and self.starts_again

    def arguments(self) -> list[str]:
        """The arguments of this module for the work."""
        options = {
            name: getattr(self, name)
            for name in ("node_rank", "master_addr", "master_port", "log_dir")
        }
        options |= {"max_restarts": self.max_restarts or None, "min_nodes": self.min_nodes}
        options["last_call"] = self.last_call if self.last_call != LAST_CALL else None
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [f"--world_info={encode(self.hosts)}", *given, "--", *self.program]


def run(work: AgentWork, *, reports: bool = False) -> int:
    """Starts the ranks of a host and waits for them; returns the exit code of the first
    one that failed, or 0.

    Args:
        reports: whether to report a failure as one line for a launcher on another host,
            instead of a message for people.
    """
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the agent reports the same, once
    host, secret = work.host, secret_of(work)
    os.environ.update(
        rank_defaults(os.environ, num_ranks=len(host.slots), num_cores=len(os.sched_getaffinity(0)))
    )
    if len(work.hosts) == 1 and work.master_addr in LOOPBACK:
        os.environ.update(
            one_host_defaults(os.environ, [name for _, name in socket.if_nameindex()])
        )
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_END))
    if work.needs_secret:
        # Otherwise restarted ranks find the old ranks' addresses in the agent's store, which
        # persists, and gloo fails.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["PYTHONUNBUFFERED"] = "1"  # so that the output of a killed rank is complete
    if not host.takes_first_slots:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.slots))
    with ExitStack() as stack:
        shown = Forwarder(sys.stderr)
        if not reports:
            # torchrun writes lines of ranks to it
            stack.enter_context(redirect_stderr(shown))  # type: ignore[type-var]
        stack.callback(shown.finish)
        folder = work.log_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="fzero-"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        in_order = stack.enter_context(kept("" if work.log_dir else folder))
        ended = Ended()
        try:
            with patch.object(launcher, "LocalElasticAgent", ended.agent()):
                elastic_launch(launch_config(work, folder, secret), work.program[0])(
                    *work.program[1:]
                )
            in_order()
        except ChildFailedError as error:
            failure = first_failure(error, host.name, folder, ended)
            shown.finish()
            _report(failure.after(shown), reports)
            return failure.exit_code
        except DistNetworkError as error:
            where = f"--master_port {work.master_port} of {work.master_addr}"
            raise OSError(
                f"{where}: {error}; give a port that is free there and reachable"
            ) from error
        except RendezvousError as error:
            raise OSError(f"the hosts did not find each other: {error}") from error
        except SignalException as error:
            # other ranks may have waited for this one
            if reports and (early := ended.first(host.name, folder)):
                _report(early, reports)
            return 128 + int(error.sigval)
        finally:
            _ignore_signals()  # the reaper must not be interrupted
    return 0


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _report(failure: Failure, reports: bool) -> None:
    with suppress(BrokenPipeError):
        print(
            REPORT + json.dumps(asdict(failure)) if reports else failure,
            file=sys.stderr,
            flush=True,
        )


class Ended:
    """The ranks of this host that have ended with code 0, and when; torchrun reports
    only failed ones.
    """

    def __init__(self) -> None:
        self.times: dict[int, tuple[float, int]] = {}  # (time, local rank) by rank

    def agent(self) -> type[LocalElasticAgent]:
        """torchrun's agent, which records normal ends here."""
        ended = self

        class Noting(LocalElasticAgent):
            def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
                handlers = getattr(self._pcontext, "subprocess_handlers", {})
                # before torchrun checks the workers, which may end the others
                for worker in worker_group.workers:
                    if (
                        worker.local_rank in handlers
                        and handlers[worker.local_rank].proc.poll() == 0
                    ):
                        ended.times.setdefault(worker.global_rank, (time.time(), worker.local_rank))
                result: RunResult = super()._monitor_workers(worker_group)
                return result

            def _shutdown(self, *args: Any, **kwargs: Any) -> None:
                if args and args[0] != signal.SIGTERM:
                    # a second Ctrl-C would interrupt this, and the ranks would get SIGTERM
                    _ignore_signals()
                super()._shutdown(*args, **kwargs)

            def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
                ended.times.clear()
                run_id, port = (
                    worker_group.spec.rdzv_handler.get_run_id(),
                    str(worker_group.master_port),
                )
                # ranks inherit them
                os.environ.update(host_variables(worker_group) | agent_store(run_id, port))
                started: dict[int, Any] = super()._start_workers(worker_group)
                return started

        return Noting

    def first(self, host: str, log_dir: str) -> Failure | None:
        """The first rank that ended, as a failure."""
        if not self.times:
            return None
        rank, (when, local_rank) = min(self.times.items(), key=lambda item: item[1])
        return Failure(rank, host, 0, when, False, tuple(_log(log_dir, local_rank)[-NUM_LINES:]))


def host_variables(worker_group: WorkerGroup) -> dict[str, str]:
    """DeepSpeed's variables of a host: the number of its ranks, its number among the
    hosts, and theirs.
    """
    return {
        "LOCAL_SIZE": str(worker_group.spec.local_world_size),
        "CROSS_RANK": str(worker_group.group_rank),
        "CROSS_SIZE": str(worker_group.group_world_size),
    }


@contextmanager
def kept(folder: str) -> Iterator[Callable[[], object]]:
    """Marks processes that are started inside. Yields a function to call after a normal
    end; otherwise the reaper ends the remaining processes, and removes the folder, if
    it is not "".

    torchrun ends its ranks and their process groups. The reaper is for processes that a
    rank has started in another session, and for ranks that torchrun did not end because
    of a second signal or because this process died.
    """
    os.environ["FZERO_JOB"] = uuid.uuid4().hex
    mark = f"FZERO_JOB={os.environ['FZERO_JOB']}"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, mark, str(SECONDS_TO_END), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # shields it from signals of the terminal and from the end of this session
        start_new_session=True,
        env={},
        cwd="/",
    )
    try:
        yield partial(process.communicate, b"in order")
    finally:
        process.communicate()
        del os.environ["FZERO_JOB"]


def launch_config(work: AgentWork, log_dir: str, secret: Secret | None = None) -> LaunchConfig:
    """torchrun's configuration for one host. Ranks follow the order of hosts, unless
    they may start again.
    """
    num_nodes = len(work.hosts)
    # torchrun's static rendezvous keeps the order, but works only once for agents of several hosts.
    keeps_order = num_nodes > 1 and not work.starts_again
    configs = (
        {"rank": work.node_rank}
        if keeps_order
        else {"last_call_timeout": work.last_call, "secret": secret}
    )
    prefix = f"[{work.host.name} rank ${{rank}}] " if num_nodes > 1 else "[rank ${rank}] "
    return LaunchConfig(
        min_nodes=work.min_nodes or num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=len(work.host.slots),
        run_id=secret.name
        if secret
        else f"fzero-{work.master_port}"
        if num_nodes > 1
        else uuid.uuid4().hex[:8],
        rdzv_backend="static" if keeps_order else BACKEND,
        rdzv_endpoint=f"{work.master_addr}:{work.master_port}",
        rdzv_configs={"timeout": 300, **configs},
        max_restarts=work.max_restarts,
        monitor_interval=0.1,
        local_addr=work.master_addr if num_nodes == 1 else work.host.name,
        log_line_prefix_template=prefix,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir, redirects=Std.ALL, tee=Std.ALL),
    )


def first_failure(error: ChildFailedError, host: str, log_dir: str, ended: Ended) -> Failure:
    """The failure that caused the others: not that of a rank ended by the agent, nor of
    one that waited for another rank.

    If all failed ranks waited for another one, it is the first rank that had ended
    normally.
    """

    def failure_of(rank: int, failed: ProcessFailure) -> Failure:
        lines = _log(log_dir, failed.local_rank)
        code = failed.exitcode if failed.exitcode >= 0 else 128 - failed.exitcode
        # The error may name many ranks, a line each.
        follows = any("fzero.comms.axes.CollectiveError" in line for line in lines[-NUM_SEARCHED:])
        return Failure(
            rank, host, code, float(failed.timestamp), follows, tuple(lines[-NUM_LINES:])
        )

    # in the order of detection
    failures = [failure_of(rank, failed) for rank, failed in error.failures.items()]
    first = min(
        failures, key=lambda failure: (failure.code == 128 + signal.SIGTERM, failure.follows)
    )
    return (ended.first(host, log_dir) if first.follows else None) or first


def _log(log_dir: str, local_rank: int) -> list[str]:
    """The lines that a rank has written to stderr."""
    # torchrun names log files by the local rank, and has one per attempt; the last one counts.
    paths = Path(log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log")
    last = max(paths, key=lambda path: path.stat().st_mtime, default=None)
    return last.read_text(errors="replace").strip().splitlines() if last else []


def secret_of(work: AgentWork) -> Secret | None:
    """The secret of the job, if it needs one. Removes it from the environment, because
    ranks do not need it.

    Raises:
        ValueError: the variable is not set.
    """
    text = os.environ.pop(SECRET, None)
    if not work.needs_secret:
        return None
    if text is None:
        raise ValueError(
            f"{SECRET}: is not set. It authenticates agents of several hosts whose ranks may start "
            f"again: export the same value "
            "on every host, for example one output of `openssl rand -hex 16`; no other user must "
            "be able to read it"
        )
    return Secret(text)


def watch_leash() -> bool:
    """Ends this agent as SIGTERM does, as soon as standard input ends. False, and
    nothing, where that is no pipe or socket: who started the agent by hand, or in a
    pod, whose input is /dev/null, holds no leash."""
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    leash = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the ranks' input, so that none of them reads the leash

    def wait() -> None:
        while os.read(leash, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent of one host; it ends when the launcher that started it ends."""
    description = "Starts the ranks of one host; `fzero` calls it."
    parser = argparse.ArgumentParser(prog="fzero.launch.agent", description=description)
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
    work = AgentWork(hosts=given.pop("world_info"), program=tuple(given.pop("program")), **given)
    print(
        f"fzero: {work.host.name} starts {len(work.host.slots)} ranks ({socket.gethostname()})",
        flush=True,
    )
    return run(work, reports=watch_leash())


if __name__ == "__main__":
    sys.exit(main())
