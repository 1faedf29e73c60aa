"""`CachedScheduler`: the answers of a unit scheduler, remembered from step to step.

A `UnitScheduler` is a function of its requests: the same requests give the same events. Steps make the same requests, so a
`ScheduleCache` keeps the answers in a tree. A node is a request, and its parent is the request before it. If the requests of a
step are in the tree, the step only walks it. Otherwise a scheduler is made, which first gets all requests of the step so far.

After `negotiate` and `depart` the events depend on other ranks, too, so nothing after them is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from fzero.plans.unit_orders import Event
from fzero.plans.unit_scheduler import UnitScheduler

Answering: TypeAlias = Callable[..., tuple[Event, ...] | None]
"""A method of `UnitScheduler` that answers with events; None is no events."""
Request: TypeAlias = tuple[Answering, *tuple[Hashable, ...]]
"""The method and its arguments."""
MOST_ANSWERS = 1 << 15
"""The most answers that are kept, about 300 bytes each. Steps whose requests never repeat would fill the memory."""


@dataclass(slots=True, eq=False)
class _Answer:
    """The answer to a request; the root of the tree has none."""

    request: Request | None
    before: _Answer | None
    events: tuple[Event, ...] = ()
    following: dict[Request, _Answer] = field(default_factory=dict)


@dataclass(slots=True)
class ScheduleCache:
    """The answers so far of the schedulers of one plan."""

    root: _Answer = field(default_factory=lambda: _Answer(None, None))
    num_answers: int = 0


class CachedScheduler:
    """A `UnitScheduler` for one accumulation window, which answers from the cache where it can.

    Args:
        make: makes a new scheduler for the same rules.
        cache: the cache of the plan.
    """

    def __init__(self, make: Callable[[], UnitScheduler], cache: ScheduleCache) -> None:
        self._make, self._cache = make, cache
        self._node: _Answer | None = cache.root  # the node of the last request; None once no answer is kept
        self._scheduler: UnitScheduler | None = None

    @property
    def scheduler(self) -> UnitScheduler:
        """The scheduler itself, after all requests so far."""
        if self._scheduler is None:
            self._scheduler, requests, node = self._make(), list[Request](), self._node
            while node is not None and node.request is not None:
                requests.append(node.request)
                node = node.before
            for method, *arguments in reversed(requests):
                method(self._scheduler, *arguments)
        return self._scheduler

    def answer(self, request: Request) -> tuple[Event, ...]:
        """The events that answer a request."""
        found = self._node.following.get(request) if self._node is not None else None
        if found is None or self._scheduler is not None:
            return self._computed(request)
        self._node = found
        return found.events

    def _computed(self, request: Request) -> tuple[Event, ...]:
        node, cache, scheduler = self._node, self._cache, self.scheduler
        self._node = None  # stays, if the scheduler raises
        method, *arguments = request
        events = method(scheduler, *arguments) or ()
        if node is None or any(event.kind in ("negotiate", "depart") for event in events):
            return events
        found = node.following.get(request)
        if found is None and cache.num_answers < MOST_ANSWERS:
            found = node.following[request] = _Answer(request, node, events)
            cache.num_answers += 1
        self._node = found
        return events
