"""The ranks of a job in one process, in lockstep. The results have the same bits as
with one process per rank.

Each rank is a thread, and one thread runs at a time. When it needs a message that has
not been sent yet, the next rank that can continue runs. Each rank has its own random
numbers: the states of torch's generators, of the CPU and of the ranks' device, are
saved when a rank stops, and restored when it continues. So are the levels of
forward-mode derivatives, which PyTorch counts by process. All ranks launch work on the
caller's stream. Kernels use as many threads as in the calling thread, because that
decides how their sums are split.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

from fzero.common.random_states import random_states, set_random_states

T = TypeVar("T")
CPU = torch.device("cpu")


class StuckError(RuntimeError):
    """A rank waits for a message that no rank will send."""


class Hub:
    """Carries messages between `size` ranks of one process.

    `sees(source, value)` is called with every message that a rank sends.

    The n-th call of `expect` for a source and a target names the n-th message sent
    between them, in whatever order they are received.

    >>> def swap(rank: int) -> str:
    ...     hub.send(rank, 1 - rank, f"of rank {rank}")
    ...     return hub.receive(hub.expect(1 - rank, rank))
    >>> hub = Hub(2)
    >>> hub.run(swap)
    ['of rank 1', 'of rank 0']
    """

    def __init__(
        self,
        size: int,
        device: torch.device = CPU,
        sees: Callable[[int, Any], None] | None = None,
    ) -> None:
        self.size, self._device, self._sees = size, device, sees
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._clear()

    def _clear(self) -> None:
        self._mail: dict[tuple[int, int, int], Any] = {}  # (source, target, number) -> value
        self._num_sent: Counter[tuple[int, int]] = Counter()
        self._num_expected: Counter[tuple[int, int]] = Counter()
        self._num_asides: Counter[int] = Counter()
        self._waits_for: dict[int, tuple[int, int, int]] = {}
        self._runs = [True] * self.size
        self._is_stuck = False

    def run(self, function: Callable[[int], T]) -> list[T]:
        """The results of `function(rank)` on every rank, in order.

        When all have ended, it raises the first error. Errors of ranks that only waited
        for another rank count last.
        """
        self._clear()
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []
        # OpenMP keeps the number of its threads per thread: a new thread would use the number from
        # the environment.
        num_threads = torch.get_num_threads()
        # The current stream belongs to the thread.
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                torch.set_num_threads(num_threads)
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    results[rank] = function(rank)
            except BaseException as error:
                errors.append((rank, error))
            self._runs[rank] = False
            self._pass_on(rank)

        threads = [
            threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.size)
        ]
        process_rng = random_states(self._device)
        try:
            with _shared_dual_level():
                for thread in threads:
                    thread.start()
                self._turns[0].release()
                for thread in threads:
                    thread.join()
        finally:
            self._is_stuck = True  # after an interrupt, ends the ranks that still wait
            set_random_states(process_rng, self._device)
        if errors:
            rank, error = min(
                errors, key=lambda found: isinstance(found[1].__cause__ or found[1], StuckError)
            )
            error.add_note(f"fzero: raised on rank {rank} of {self.size}, which run in lockstep")
            raise error
        return results

    def send(self, source: int, target: int, value: Any) -> None:
        """Sends a message. Its value must not change afterwards."""
        if self._sees is not None:
            self._sees(source, value)
        self._mail[source, target, self._num_sent[source, target]] = value
        self._num_sent[source, target] += 1

    @property
    def num_left(self) -> int:
        """Messages that no rank received."""
        return len(self._mail)

    def expect(self, source: int, target: int) -> tuple[int, int, int]:
        """The next message from `source` to `target`, to be received once."""
        number = self._num_expected[source, target]
        self._num_expected[source, target] += 1
        return source, target, number

    def receive(self, message: tuple[int, int, int]) -> Any:
        """The value of a message that `expect` named. Other ranks run until it arrives;
        a StuckError if it will not.
        """
        while message not in self._mail:
            self._wait(message)
            if self._is_stuck and message not in self._mail:
                source, target, _ = message
                why = "also waits" if self._runs[source] else "has ended, or raised an error"
                raise StuckError(f"rank {target} waits for rank {source}, which {why}")
        return self._mail.pop(message)

    def exchange_via_store(self, rank: int, value: int) -> list[int] | None:
        """Every rank's number, outside of the order of messages; None if another rank
        does not call it.

        >>> hub = Hub(2)
        >>> hub.run(lambda rank: hub.exchange_via_store(rank, 10 + rank))
        [[10, 11], [10, 11]]
        """
        self._num_asides[rank] += 1
        number = -self._num_asides[rank]  # a number that `send` never uses
        others = [other for other in range(self.size) if other != rank]
        self._mail |= {(rank, other, number): value for other in others}
        try:
            found = {other: self.receive((other, rank, number)) for other in others}
        except StuckError:
            return None
        return [found.get(other, value) for other in range(self.size)]

    def _wait(self, message: tuple[int, int, int]) -> None:
        if _symbolic_trace.CURRENT_PATCHER is not None:
            raise ValueError(
                "simulate: ranks in lockstep must not wait for each other while PyTorch traces "
                "(torch.func.linearize, make_fx), because its tracer is the process' own, and one "
                "did; use torch.func.jvp instead of linearize, real processes, or a stage below 3"
            )
        rank = message[1]
        self._waits_for[rank] = message
        rng, levels = random_states(self._device), _set_jvp_levels((-1, 0))
        self._pass_on(rank)
        self._turns[rank].acquire()
        set_random_states(rng, self._device)
        _set_jvp_levels(levels)
        del self._waits_for[rank]

    def _pass_on(self, rank: int) -> None:
        """Lets the first rank after `rank` that can continue run."""
        following = [other % self.size for other in range(rank + 1, rank + 1 + self.size)]
        running = [other for other in following if self._runs[other]]
        ready = [r for r in running if r not in self._waits_for or self._waits_for[r] in self._mail]
        self._is_stuck |= not ready
        for other in (ready or running)[:1]:
            self._turns[other].release()


def _set_jvp_levels(levels: tuple[int, int]) -> tuple[int, int]:
    """Sets the level of `torch.autograd.forward_ad` (-1 outside) and the number of
    `torch.func.jvp` around the present code; returns the former ones.
    """
    former = forward_ad._current_level, eager_transforms.JVP_NESTING
    forward_ad._current_level, eager_transforms.JVP_NESTING = levels
    return former


@contextmanager
def _shared_dual_level() -> Iterator[None]:
    """Inside, threads that take turns share PyTorch's one level of forward mode: it
    begins with the first thread that enters it, and ends with the last that leaves it.
    """
    num_inside, enter, leave = 0, forward_ad.enter_dual_level, forward_ad.exit_dual_level

    def enter_dual_level() -> int:
        nonlocal num_inside
        # PyTorch refuses a second level of one thread
        if not num_inside or forward_ad._current_level >= 0:
            enter()  # type: ignore[no-untyped-call]
        num_inside, forward_ad._current_level = num_inside + 1, 0
        return 0

    def exit_dual_level(*, level: int | None = None) -> None:
        nonlocal num_inside
        num_inside -= 1
        if num_inside:
            forward_ad._current_level = -1
        else:
            leave(level=level)  # type: ignore[no-untyped-call]

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_dual_level, exit_dual_level
    try:
        yield
    finally:
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
