"""`notebook_launch`: a function of a notebook in several real processes, which form a
job.

The ranks are forks of the notebook's process. So nothing is pickled on the way in: the
function may be a lambda or a closure, and use classes and variables of the notebook's
cells. On the way out each rank pickles what the function returns.

A fork has only one thread. It must not meet threads that held locks, so a notebook is
refused that has initialized CUDA or joined a process group; and a rank computes with
one thread, because OpenMP's other threads are gone.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from fzero.common.arguments import check_callable, check_whole
from fzero.comms.process_group import is_joined, shutdown
from fzero.comms.rendezvous import launched
from fzero.launch.environment import one_host_defaults

T = TypeVar("T")


def notebook_launch(fn: Callable[..., T], *args: Any, num_procs: int = 2) -> list[T]:
    """Calls `fn(*args)` in `num_procs` processes with gloo, and returns what each
    returned, by rank.

    `fzero.make_train_step` and `fzero.join` find the job in each process. Lines that a
    rank prints appear behind its number. What a rank changes stays in it: only what it
    returns comes back.

    Args:
        fn: any function; it is not pickled.
        args: its arguments; not pickled either.
        num_procs: ranks on the CPU, each with one thread.

    Raises:
        ValueError: the notebook has initialized CUDA or joined a process group, is a
            rank itself, or cannot fork.
        RuntimeError: a rank failed, with its traceback, or returned what cannot be
            pickled: a lambda, a generator, a step, an open file. Return numbers,
            tensors on the CPU, or containers of them (a `TrainState` is one).
    """
    check_callable("fn", fn, "a function that each rank calls")
    check_whole("num_procs", num_procs, 1)
    _check_here()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with _started(fn, args, num_procs, port) as ranks:
        _follow(ranks)
        for rank in ranks:
            rank.process.join()
            rank.show()
        return [rank.result for rank in ranks]


def _check_here() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError(
            f"notebook_launch: needs processes that fork, which {sys.platform} has not; start a "
            f"script by `fzero`"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ValueError(
            "notebook_launch: CUDA is initialized in this notebook, and a fork cannot use it; "
            "restart the kernel and touch CUDA only inside fn"
        )
    if launched() is not None:
        raise ValueError(
            "notebook_launch: this process is a rank of a job itself; call fn, or start the "
            "notebook alone"
        )
    if is_joined():
        raise ValueError(
            "notebook_launch: this process has joined a process group; call fzero.shutdown() first"
        )


@dataclass(slots=True)
class _Rank:
    """A rank as the notebook sees it.

    Attributes:
        output: the file descriptor from which its lines are read; -1 once they have
            ended.
        answer: brings what it returned.
        is_done: whether that has come.
        partial: an incomplete line.
    """

    number: int
    process: BaseProcess
    output: int
    answer: Connection
    is_done: bool = False
    result: Any = None
    partial: bytes = field(default=b"")

    def show(self) -> None:
        """Prints the lines that are there."""
        while self.output >= 0:
            try:
                read = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return
            if not read:
                self.close()
            *lines, self.partial = (self.partial + read).split(b"\n")
            lines += [self.partial] if not read and self.partial else []
            for line in lines:
                print(f"[rank {self.number}] {line.decode(errors='replace')}", flush=True)

    def close(self) -> None:
        if self.output >= 0:
            os.close(self.output)
        self.output = -1

    def take(self) -> None:
        """Takes what the rank sends at its end."""
        try:
            outcome, value = pickle.loads(self.answer.recv_bytes())
        except EOFError:
            self.process.join()
            self.show()
            code = self.process.exitcode
            raise RuntimeError(
                f"notebook_launch: rank {self.number} ended with exit code {code} and returned "
                f"nothing"
            ) from None
        if outcome == "error":
            self.show()
            raise RuntimeError(f"notebook_launch: rank {self.number} failed:\n{value}")
        self.is_done, self.result = True, value


@contextmanager
def _started(
    fn: Callable[..., Any], args: tuple[Any, ...], num_procs: int, port: int
) -> Iterator[list[_Rank]]:
    """Inside, the ranks run; at the end none is left."""
    context, ranks = multiprocessing.get_context("fork"), list[_Rank]()
    try:
        for number in range(num_procs):
            (read, write), (answer, sender) = os.pipe(), context.Pipe(duplex=False)
            job: dict[str, object] = {
                "RANK": number,
                "LOCAL_RANK": number,
                "WORLD_SIZE": num_procs,
                "LOCAL_WORLD_SIZE": num_procs,
            }
            job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = context.Process(
                target=_run, args=(fn, args, job, write, sender), name=f"rank {number}"
            )
            process.start()
            os.close(write)
            sender.close()
            os.set_blocking(read, False)
            ranks.append(_Rank(number, process, read, answer))
        yield ranks
    finally:
        for rank in ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.close()
            rank.answer.close()


def _follow(ranks: list[_Rank]) -> None:
    """Prints what ranks print until each has returned; raises for the first that fails."""
    while not all(rank.is_done for rank in ranks):
        sources: dict[Any, _Rank] = {rank.output: rank for rank in ranks if rank.output >= 0}
        sources |= {rank.answer: rank for rank in ranks if not rank.is_done}
        ready = wait(list(sources))
        for source in ready:
            if isinstance(source, int):
                sources[source].show()
        for source in ready:
            if isinstance(source, Connection):
                sources[source].take()


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    job: dict[str, object],
    write: int,
    sender: Connection,
) -> None:
    """The process of a rank."""
    for stream in (1, 2):
        os.dup2(write, stream)
    sys.stdout = sys.stderr = os.fdopen(write, "w", buffering=1)
    os.environ |= {name: str(value) for name, value in job.items()}
    os.environ |= one_host_defaults(os.environ, [name for _, name in socket.if_nameindex()])
    torch.set_num_threads(1)
    try:
        answer = ("result", fn(*args))
        try:
            sent = pickle.dumps(answer)
        except Exception as error:
            raise TypeError(
                f"what fn returned cannot be sent back ({error}); return numbers, tensors, or "
                f"containers of them"
            ) from error
        shutdown()
    except BaseException:  # an exit, too: its rank must be named
        sent = pickle.dumps(("error", traceback.format_exc()))
    sys.stdout.flush()
    sender.send_bytes(sent)
