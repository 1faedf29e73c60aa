"""How do the ranks of a job run in one process, and give the bits that as many processes would?

Each rank is a thread. One runs at a time, until it needs what another has not sent yet; then the next one that can go on
does. So every rank runs the code of a job, and only what carries messages differs. Random numbers are those of a process
of its own: the state of torch's generator on the CPU is put by when a rank stops, and put back when it goes on. Kernels use
as many threads as in the thread that called, for their sums are cut by that number.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class StuckError(RuntimeError):
    """A rank waits for a message that nobody will send."""


class Hub:
    """Where `size` ranks of one process leave messages for each other.

    Between two ranks messages arrive in the order in which they were sent, and are expected in the order in which they
    were asked for, whenever they are looked at.

    >>> def swap(rank: int) -> str:
    ...     hub.send(rank, 1 - rank, f"of rank {rank}")
    ...     return hub.receive(hub.expect(1 - rank, rank))
    >>> hub = Hub(2)
    >>> hub.run(swap)
    ['of rank 1', 'of rank 0']
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._clear()

    def _clear(self) -> None:
        self._mail: dict[tuple[int, int, int], Any] = {}  # by source, target and number
        self._num_sent: Counter[tuple[int, int]] = Counter()
        self._num_expected: Counter[tuple[int, int]] = Counter()
        self._num_asides: Counter[int] = Counter()
        self._waits_for: dict[int, tuple[int, int, int]] = {}
        self._runs = [True] * self.size
        self._is_stuck = False

    def run(self, function: Callable[[int], T]) -> list[T]:
        """What `function(rank)` returns on every rank, in order.

        Raises what the first rank raised that was not stuck for another's sake, when all have ended.
        """
        self._clear()
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []
        # OpenMP keeps its number for each thread, so that a new one would take that of the environment.
        num_threads = torch.get_num_threads()
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, function, results, errors, num_threads), daemon=True)
            for rank in range(self.size)
        ]
        process_rng = torch.get_rng_state()
        for thread in threads:
            thread.start()
        self._turns[0].release()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._is_stuck = True  # for ranks that an interrupt leaves behind
            torch.set_rng_state(process_rng)
        if errors:
            rank, error = min(errors, key=lambda found: isinstance(_origin(found[1]), StuckError))
            error.add_note(f"fzero: raised on rank {rank} of {self.size}, which run in lockstep")
            raise error
        return results

    def send(self, source: int, target: int, value: Any) -> None:
        """Leaves a message. What is sent must not change afterwards."""
        self._mail[source, target, self._num_sent[source, target]] = value
        self._num_sent[source, target] += 1

    def expect(self, source: int, target: int) -> tuple[int, int, int]:
        """The next message from `source` to `target`, to be received once."""
        number = self._num_expected[source, target]
        self._num_expected[source, target] += 1
        return source, target, number

    def receive(self, message: tuple[int, int, int]) -> Any:
        """The value of a message that `expect` named. Others run until it is there.

        Raises:
            StuckError: it will not come.
        """
        while message not in self._mail:
            self._wait(message)
            if self._is_stuck and message not in self._mail:
                source, target, _ = message
                why = "waits for others, too" if self._runs[source] else "has ended, or raised an error"
                raise StuckError(f"rank {target} waits for rank {source}, which {why}")
        return self._mail.pop(message)

    def aside(self, rank: int, value: int) -> list[int] | None:
        """Every rank's number, beside the messages in order; None when the others do not ask, too.

        >>> hub = Hub(2)
        >>> hub.run(lambda rank: hub.aside(rank, 10 + rank))
        [[10, 11], [10, 11]]
        """
        self._num_asides[rank] += 1
        number = -self._num_asides[rank]  # of no other message
        others = [other for other in range(self.size) if other != rank]
        self._mail |= {(rank, other, number): value for other in others}
        try:
            found = {other: self.receive((other, rank, number)) for other in others}
        except StuckError:
            return None
        return [found.get(other, value) for other in range(self.size)]

    def _wait(self, message: tuple[int, int, int]) -> None:
        rank = message[1]
        self._waits_for[rank] = message
        rng = torch.get_rng_state()
        self._pass_on(rank)
        self._turns[rank].acquire()
        torch.set_rng_state(rng)
        del self._waits_for[rank]

    def _pass_on(self, rank: int) -> None:
        """Lets the next rank go on that can: the first after `rank`."""
        following = [other % self.size for other in range(rank + 1, rank + 1 + self.size)]
        running = [other for other in following if self._runs[other]]
        ready = [r for r in running if r not in self._waits_for or self._waits_for[r] in self._mail]
        self._is_stuck |= not ready
        for other in (ready or running)[:1]:
            self._turns[other].release()

    def _run_rank(
        self,
        rank: int,
        function: Callable[[int], T],
        results: list[Any],
        errors: list[tuple[int, BaseException]],
        num_threads: int,
    ) -> None:
        self._turns[rank].acquire()
        try:
            torch.set_num_threads(num_threads)
            results[rank] = function(rank)
        except BaseException as error:
            errors.append((rank, error))
        self._runs[rank] = False
        self._pass_on(rank)


def _origin(error: BaseException) -> BaseException:
    return error.__cause__ or error
