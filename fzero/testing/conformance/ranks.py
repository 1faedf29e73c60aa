"""`Ranks`: gloo processes that try laws one after the other; new ones after a law that
does not hold.

A system of others may hang, or end its process: a law has a time, and what is left of
the ranks is killed then.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from fzero.testing.conformance.laws import LAWS, Broken, Lab, Law, NotApplicable
from fzero.testing.conformance.training import Refused, System

Mark = Literal["right", "wrong", "refused", "-"]
_WORST_FIRST: tuple[Mark, ...] = ("wrong", "refused", "right", "-")


class Result(NamedTuple):
    """Of a law on a system: the worst mark of all stages; `-` where it does not apply.

    Attributes:
        note: says what was found, in the first of the stages.
        stages: those with this mark; none, if they are not known.
    """

    system: str
    law: str
    mark: Mark
    note: str = ""
    stages: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        """Whether the law is broken or refused."""
        return self.mark in ("wrong", "refused")

    @property
    def where(self) -> str:
        """The stages with this mark, in words."""
        if not self.stages:
            return "in some stage"
        return f"stage{'s' * (len(self.stages) > 1)} {', '.join(map(str, self.stages))}"


class Ranks:
    """Processes that try the laws of one system.

    Args:
        seconds: after which a law counts as hanging.
    """

    def __init__(self, system: System, world_size: int, *, seconds: float = 60.0) -> None:
        self._system, self._size, self._seconds = system, world_size, seconds
        self._folder = Path(tempfile.mkdtemp(prefix="fzero-laws-"))
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["fzero.testing.conformance", *system.preload])
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._num_groups = 0

    def try_law(self, law: Law) -> Result:
        """The worst mark of all stages."""
        began, name = time.monotonic(), self._system.name
        if self._system.in_one_process and law.needs_processes:
            return Result(name, law.name, "-", "the ranks are simulated in one process")
        found = {stage: self._try_in(stage, law) for stage in self._system.stages}
        mark, note = min(found.values(), key=lambda one: _WORST_FIRST.index(one[0]))
        stages = tuple(stage for stage, (own, _) in found.items() if own == mark)
        return Result(name, law.name, mark, note, stages, time.monotonic() - began)

    def _try_in(self, stage: int, law: Law) -> tuple[Mark, str]:
        folder = self._folder / f"{law.name}_{stage}"
        folder.mkdir()
        mark, note = self._ask(law, stage, folder, self._size, is_second=False)
        if mark == "right" and law.then is not None:
            self._end()
            mark, note = self._ask(law, stage, folder, self._size - 1, is_second=True)
            self._end()
        shutil.rmtree(folder, ignore_errors=True)
        return mark, note

    def _ask(
        self, law: Law, stage: int, folder: Path, num_ranks: int, *, is_second: bool
    ) -> tuple[Mark, str]:
        if not self._processes:
            self._start(1 if self._system.in_one_process else num_ranks)
        for rank, pipe in enumerate(self._pipes):
            with suppress(OSError):
                pipe.send((self._system, law.name, is_second, stage, rank, num_ranks, folder))
        num_asked = len(self._pipes) - law.num_lost
        answers: dict[int, tuple[Mark, str]] = {}
        ends = time.monotonic() + self._seconds
        while len(answers) < num_asked:
            waiting = [
                pipe for rank, pipe in enumerate(self._pipes[:num_asked]) if rank not in answers
            ]
            ready = wait(waiting, timeout=max(0.0, ends - time.monotonic()))
            for rank in [rank for rank, pipe in enumerate(self._pipes) if pipe in ready]:
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join()
                    code = self._processes[rank].exitcode
                    answers[rank] = "wrong", f"rank {rank} ends with exit code {code}"
            if not ready:
                break
        found = list(answers.values())
        worst = next((one for one in found if one[0] == "wrong"), None)
        worst = worst or next((one for one in found if one[0] != "right"), None)
        if len(answers) < num_asked:
            silent = sorted({*range(num_asked)} - answers.keys())
            why = f"; another says: {worst[1]}" if worst else ""
            worst = "wrong", f"rank {silent[0]} hangs for {self._seconds:.0f} s{why}"
        if worst is not None or law.num_lost:
            self._end()  # collectives may be out of step
        return worst or ("right", "")

    def _start(self, num_ranks: int) -> None:
        self._num_groups += 1
        store = str(self._folder / f"store_{self._num_groups}")
        log = str(self._folder / "log")
        for rank in range(num_ranks):
            ours, theirs = self._context.Pipe()
            about = (theirs, rank, num_ranks, store, log, self._seconds)
            process = self._context.Process(target=_serve, args=about, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._processes.append(process)
            self._pipes.append(ours)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def close(self) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)


def try_laws(
    system: System, laws: Iterable[Law], num_ranks: int = 2, *, seconds: float = 60.0
) -> Iterator[Result]:
    """The result of each law, as it is tried.

    Args:
        num_ranks: at least 2 processes.
        seconds: after which a law counts as hanging.
    """
    if num_ranks < 2:
        raise ValueError(
            f"ranks: must be at least 2, for laws of what ranks do together, got {num_ranks}; pass "
            f"2"
        )
    ranks = Ranks(system, num_ranks, seconds=seconds)
    try:
        for law in laws:
            yield ranks.try_law(law)
    finally:
        ranks.close()


def check_system(
    system: System,
    laws: Iterable[Law] = (),
    *,
    num_ranks: int = 2,
    seconds: float = 60.0,
    refused: Collection[str] = (),
) -> None:
    """Raises if a system breaks a law of data-parallel training, on real processes.

    Args:
        system: its `make` must be importable: ranks are new processes.
        laws: which to try; none means all of `LAWS`.
        seconds: after which a law counts as hanging.
        refused: the names of laws that the system may refuse by an error.

    Raises:
        AssertionError: names each broken law, and what was found.
    """
    faults = [
        f"{result.law} ({result.where}): {result.note}"
        for result in try_laws(system, laws or LAWS.values(), num_ranks, seconds=seconds)
        if result.mark == "wrong" or (result.mark == "refused" and result.law not in refused)
    ]
    if faults:
        raise AssertionError(f"{system.name} breaks {len(faults)} laws:\n" + "\n".join(faults))


def _serve(
    pipe: Connection, rank: int, num_ranks: int, store: str, log: str, seconds: float
) -> None:
    """A rank: answers each law with a mark and a note."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=seconds / 2),
    )
    while True:
        try:
            system, name, is_second, stage, own_rank, world_size, folder = pipe.recv()
        except EOFError:
            os._exit(0)
        lab = Lab(system, stage, own_rank, world_size, folder)
        pipe.send(try_here(name, lab, is_second=is_second))


def try_here(name: str, lab: Lab, *, is_second: bool = False) -> tuple[Mark, str]:
    """The mark of a law on this rank."""
    import_module("fzero.testing.conformance")  # all laws
    law = LAWS[name]
    part = law.then if is_second else law.try_
    assert part is not None
    try:
        part(lab)
    except Broken as error:
        return "wrong", str(error)
    except NotApplicable as error:
        return "-", str(error)
    except Refused as error:
        return "refused", str(error)
    except BaseException as error:  # torch.distributed.checkpoint's are no Exceptions
        text = f"{type(error).__name__}: {error}".strip()
        return ("refused" if str(error) else "wrong"), text
    return "right", ""
