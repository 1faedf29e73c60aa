"""A pool of real gloo processes, kept for the whole test session.

`ranks(world_size, function, *args)` calls `function(*args)` on the first `world_size`
of four processes, joined in a process group, and returns what each rank returned. The
function must be importable (top level of a test module). Where a rank ends or hangs,
the call raises, and the next one finds new processes.

The first processes are copies of this one, made before any test has run, so that they
need not import what it has imported. Later ones come from a server, for a process in
which tests have run may not be copied: its threads would be missing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, Literal, NoReturn

MOST_RANKS = 4
TIMEOUT = timedelta(seconds=120)
"""Of a collective."""
GRACE = timedelta(seconds=30)
"""After it, until ranks are taken to hang."""


class RankError(AssertionError):
    """A rank raised; the message holds the traceback of every rank that did. `errors`
    has one entry for each rank.
    """

    def __init__(self, errors: list[Exception | None], tracebacks: list[str]) -> None:
        super().__init__(
            "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(tracebacks) if text)
        )
        self.errors = errors


def server() -> ForkServerContext:
    """Starts processes that have imported torch and fzero already; arguments as of
    `multiprocessing`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fzero.step", "fzero.checkpoint.saving"])
    return context


class RankPool:
    def __init__(self, method: Literal["fork", "forkserver"] = "forkserver") -> None:
        self._start(method)

    def _start(self, method: Literal["fork", "forkserver"]) -> None:
        context: Any = server() if method == "forkserver" else multiprocessing.get_context("fork")
        self._store: Any = None
        self._group, self._size = 0, 0  # a new process group is made for each number
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(MOST_RANKS):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            copied = self._pipes if method == "fork" else []
            process = context.Process(
                target=_serve, args=(theirs, rank, sys.path, copied), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.processes.append(process)

    def _port(self) -> int:
        """The port of the store where ranks meet, whose thread starts with the first
        call.
        """
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def __call__(
        self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        if world_size != self._size:
            self._group, self._size = self._group + 1, world_size
        pipes, request = (
            self._pipes[:world_size],
            (self._port(), world_size, self._group, function, args, kwargs),
        )
        for pipe in pipes:
            # of a rank that has ended since the last call; `wait` finds it below
            with suppress(OSError):
                pipe.send_bytes(pickle.dumps(request))
        # One rank's error makes the others fail as well, so all of them answer.
        answers: dict[Connection, tuple[Any, Exception | None, str]] = {}
        while len(answers) < world_size:
            arrived = wait(
                [pipe for pipe in pipes if pipe not in answers],
                timeout=(TIMEOUT + GRACE).total_seconds(),
            )
            for pipe in arrived:
                with suppress(EOFError):
                    answers[pipe] = pickle.loads(pipe.recv_bytes())
            missing = [rank for rank, pipe in enumerate(pipes) if pipe not in answers]
            if not arrived or not answers.keys() >= {*arrived}:
                self._start_anew(
                    f"{function.__name__}: {'ended' if arrived else 'hang'}: ranks {missing}"
                )
        values, errors, tracebacks = zip(*(answers[pipe] for pipe in pipes), strict=True)
        if any(tracebacks):
            self._size = 0  # an error makes the group unusable
            raise RankError(list(errors), list(tracebacks))
        return list(values)

    def _start_anew(self, why: str) -> NoReturn:
        """New processes, so that tests which come later do not fail for what happened
        in this one.
        """
        time.sleep(0.1)  # a process is gone a little after its pipe
        codes = [process.exitcode for process in self.processes]
        self.close(seconds=0.0)
        self._start("forkserver")
        raise RankError([None] * MOST_RANKS, [f"{why}; exit codes {codes}"])

    def close(self, seconds: float = 2.0) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # of a rank that has ended
                pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(seconds)
            process.kill()


def _serve(pipe: Connection, rank: int, path: list[str], copied: list[Connection]) -> None:
    for other in copied:
        other.close()  # so that the end of the process that calls is the end of the pipe
    sys.path[:] = path
    import torch
    import torch.distributed as dist
    import tripwire

    from fzero import shutdown

    faulthandler.enable()  # a rank that is ended by a signal writes the stacks of its threads
    # of quarantine.c, under `make memcheck`
    quarantine_check = getattr(ctypes.CDLL(None), "quarantine_check", None)
    torch.set_num_threads(1)
    gc.freeze()  # collections need not walk through what is loaded by now
    store, joined = None, 0
    while True:
        request = pickle.loads(pipe.recv_bytes())
        if request is None:
            break
        port, world_size, group, function, args, kwargs = request
        store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
        value, error, text = None, None, ""
        try:
            if joined != group:
                if dist.is_initialized():
                    dist.destroy_process_group()
                prefix = dist.PrefixStore(str(group), store)
                dist.init_process_group(
                    "gloo", store=prefix, rank=rank, world_size=world_size, timeout=TIMEOUT
                )
                joined = group
            value = function(*args, **kwargs)
        except Exception as raised:
            text = traceback.format_exc()
            error = raised if _can_be_sent(raised) else RuntimeError(repr(raised))
            _forget_frames(raised)
            shutdown()  # so that the others do not wait for this rank
            joined = 0
        os.environ["PYTEST_CURRENT_TEST"] = f"{function.__module__}.{function.__name__}"
        if quarantine_check:
            quarantine_check()
        # if memory is corrupted, this rank ends here, and the call of this function raises
        tripwire.look()
        pipe.send_bytes(pickle.dumps((value, error, text)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget_frames(error: BaseException | None) -> None:
    """Drops what the frames of an error hold: a collective under way there would keep
    the connections open.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__
    gc.collect()


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
