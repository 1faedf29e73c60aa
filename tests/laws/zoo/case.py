"""One configuration of the zoo: how a model and its batch are made, and what is known
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

ROWS, NUM_STEPS, WORLD_SIZE = 12, 3, 2
"""A batch has the rows of all steps; a step takes ROWS / NUM_STEPS of them, divided
among WORLD_SIZE ranks.
"""
LENGTH, WIDTH, VOCABULARY, NUM_CLASSES, IMAGE, SAMPLES = 8, 16, 32, 2, 16, 400


class Case(NamedTuple):
    """A model, and what is known of it.

    Args:
        make: returns the module and a batch of ROWS rows, `module(**batch)` or
            `module(*batch)`, which it draws from PyTorch's generator.
        refused: a pattern of the error that each of `refused_in` must raise, where the
            model is not trained.
        refused_in: the stages that refuse it; the others train it.
        known: a fault of fzero that is not mended yet: the test must fail.
        rounds: why numbers differ from those of the plain loop by rounding. "" asks for
            the same bits.
        tolerance: the largest difference then.
    """

    make: Callable[[], tuple[nn.Module, Any]]
    refused: str = ""
    refused_in: tuple[int, ...] = (0, 1, 2, 3)
    known: str = ""
    rounds: str = ""
    tolerance: float = 1e-6


Cases = Mapping[str, Case]
