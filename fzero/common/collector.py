"""`collector_paused`: Python's garbage collector is off while a function makes many
objects that all stay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, or in a function that it decorates, the collector does not run; it would
    follow all new objects again and again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
