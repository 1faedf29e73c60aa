"""Calls of an engine that do not fit its state, and losses that no backward can begin
with.
"""

from __future__ import annotations


class CallError(RuntimeError, AssertionError):
    """A call that does not fit the engine's state. DeepSpeed asserts these, and its
    scripts catch that.
    """


class LossError(ValueError, AssertionError):
    """A loss that no backward can begin with; also an AssertionError, as in DeepSpeed."""
