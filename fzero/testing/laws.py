"""`Law`, `try_law`: a law as data, and its check by hypothesis.

A law is a row of a table: its sentence, the fix for a fault, a strategy for examples,
and a function that finds a fault in an example; `Laws.law` adds the row of the function
below it. hypothesis draws examples, and shrinks one with a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.errors import Flaky

Subject = TypeVar("Subject")
Example = TypeVar("Example")
FindFault = Callable[[Subject, Example], str | None]
Corners = Callable[[int], tuple[Any, ...]]
"""Examples of this many updates that are always tried after the drawn ones; too large
to be drawn often or shrunk.
"""


class Law(NamedTuple, Generic[Subject, Example]):
    """`find_fault` describes the subject's fault in an example of `examples`, or
    returns None.
    """

    sentence: str
    fix: str
    examples: st.SearchStrategy[Example]
    find_fault: FindFault[Subject, Example]
    corners: Corners


class Laws(list[Law[Subject, Example]]):
    """A table of laws, in the order in which they are tried; `examples` are those of a
    law that names no others.
    """

    def __init__(self, examples: st.SearchStrategy[Any]) -> None:
        super().__init__()
        self._examples = examples

    def law(
        self,
        sentence: str,
        fix: str,
        examples: st.SearchStrategy[Any] | None = None,
        corners: Corners = lambda _: (),
    ) -> Callable[[FindFault[Subject, Any]], FindFault[Subject, Any]]:
        """Adds the law whose faults the decorated function finds."""

        def added(find_fault: FindFault[Subject, Any]) -> FindFault[Subject, Any]:
            self.append(
                Law(
                    sentence,
                    fix,
                    self._examples if examples is None else examples,
                    find_fault,
                    corners,
                )
            )
            return find_fault

        return added


def try_law(
    law: Law[Subject, Example], subject: Subject, name: str, max_examples: int, num_updates: int = 0
) -> None:
    """Raises if an example shows that the law is broken; `num_updates` is for the
    corners.
    """
    faults: list[tuple[str, Exception | None]] = []

    def holds_in(example: Example, title: str) -> None:
        cause = None
        try:
            fault = law.find_fault(subject, example)
        except Exception as error:  # the subject is the user's code
            fault, cause = f"it raises {type(error).__name__}: {error}", error
        if fault:
            text = f"{name}: {law.sentence}. Found that {fault}. {title}: {example}. {law.fix}"
            faults.append((text, cause))
            raise AssertionError(text) from cause

    # Derandomized: a check that passes today passes tomorrow. Nothing is kept on disk.
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(law.examples)
    def holds(example: Example) -> None:
        holds_in(example, "Smallest example")

    try:
        holds()
    except (AssertionError, Flaky):
        # a subject with memory or random numbers may pass when it is tried again
        message, reason = faults[-1]
        raise AssertionError(message) from reason
    for corner in law.corners(num_updates):
        holds_in(corner, "Example")
