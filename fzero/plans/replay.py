"""`Replay`: the answers of a unit scheduler, remembered from step to step.

A `UnitScheduler` is a function of its requests: the same requests give the same events. Steps make the same requests, so a
`Memory` keeps the answers in a tree. A node is a request, and its parent is the request before it. If the requests of a step
are in the tree, the step only walks it. Otherwise a scheduler is made, which first gets all requests of the step so far.

After `negotiate` and `depart` the events depend on other ranks, too, so nothing after them is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fzero.plans.unit_orders import Event
from fzero.plans.unit_scheduler import UnitScheduler

Request = tuple[Any, ...]
"""The name of a method of `UnitScheduler`, and its arguments."""
MOST_ANSWERS = 1 << 15
"""The most answers that are kept, about 300 bytes each. Steps whose requests never repeat would fill the memory."""


@dataclass(slots=True, eq=False)
class _Answer:
    """The answer to a request."""

    request: Request
    before: _Answer | None
    events: tuple[Event, ...] = ()
    following: dict[Request, _Answer] = field(default_factory=dict)


@dataclass(slots=True)
class Memory:
    """The answers so far of the schedulers of one plan."""

    root: _Answer = field(default_factory=lambda: _Answer((), None))
    num_answers: int = 0


class Replay:
    """A `UnitScheduler` for one accumulation window, which answers from memory where it can.

    Args:
        make: makes a new scheduler for the same rules.
        memory: of the plan.
    """

    def __init__(self, make: Callable[[], UnitScheduler], memory: Memory) -> None:
        self._make, self._memory = make, memory
        self._node: _Answer | None = memory.root  # of the last request; None where no answer is kept any more
        self._scheduler: UnitScheduler | None = None

    @property
    def scheduler(self) -> UnitScheduler:
        """The scheduler itself, after all requests so far."""
        if self._scheduler is None:
            self._scheduler, requests, node = self._make(), list[Request](), self._node
            while node is not None and node.before is not None:
                requests.append(node.request)
                node = node.before
            for request in reversed(requests):
                _answered(self._scheduler, request)
        return self._scheduler

    def ask(self, request: Request) -> tuple[Event, ...]:
        """The events that answer a request."""
        found = self._node.following.get(request) if self._node is not None else None
        if found is None or self._scheduler is not None:
            return self._computed(request)
        self._node = found
        return found.events

    def _computed(self, request: Request) -> tuple[Event, ...]:
        node, memory, scheduler = self._node, self._memory, self.scheduler
        self._node = None  # stays, if the scheduler raises
        events = _answered(scheduler, request)
        if node is None or any(event.kind in ("negotiate", "depart") for event in events):
            return events
        found = node.following.get(request)
        if found is None and memory.num_answers < MOST_ANSWERS:
            found = node.following[request] = _Answer(request, node, events)
            memory.num_answers += 1
        self._node = found
        return events


def _answered(scheduler: UnitScheduler, request: Request) -> tuple[Event, ...]:
    method, *arguments = request
    return getattr(scheduler, method)(*arguments) or ()
