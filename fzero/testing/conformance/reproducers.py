"""Programs that show where a system of others breaks a law, without fzero:
`torchrun --nproc-per-node 2 FILE`. A failed assertion is the fault.
"""

from __future__ import annotations

from typing import NamedTuple


class Reproducer(NamedTuple):
    """A program of at most 20 lines, whose last assertion fails on some rank.

    Attributes:
        tried: how the documentation recommends to do it, and what was tried.
        fault: a piece of what the program prints.
    """

    tried: str
    fault: str
    program: str


REPRODUCERS: dict[tuple[str, str], Reproducer] = {}
"""By system and law."""
