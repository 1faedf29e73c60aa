"""A zoo of models: tiny ones of every class of transformers that builds on the CPU, and
oddities in plain PyTorch.
"""

import zoo.research  # noqa: F401 - enters its oddities
from zoo.case import NUM_STEPS, ROWS, WORLD_SIZE, Case
from zoo.hub import HUB
from zoo.oddities import ODDITIES

ZOO: dict[str, Case] = {**ODDITIES, **HUB}

__all__ = ["HUB", "NUM_STEPS", "ROWS", "WORLD_SIZE", "ZOO", "Case"]
