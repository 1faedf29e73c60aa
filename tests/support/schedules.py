"""Records the events that executors of the unit scheduler execute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fzero.plans.unit_orders import Event


@contextmanager
def recorded(executor: type) -> Iterator[dict[Any, list[Event]]]:
    """Inside, the events that each `Sequencer` or `DryPass` executes, one of which
    serves one step, in order.
    """
    records: dict[Any, list[Event]] = {}
    original = executor.execute  # type: ignore[attr-defined]

    def execute(work: Any, events: Any) -> None:
        records.setdefault(work, []).extend(events)
        original(work, events)

    with patch.object(executor, "execute", execute):
        yield records
