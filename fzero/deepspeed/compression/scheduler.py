"""`deepspeed.compression.scheduler`: when techniques begin is a function of the number
of updates here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["compression_scheduler"]


class compression_scheduler:
    """Has no effect: a step knows the number of its updates, and a technique is on from
    its offset on.

    Attributes:
        training_steps: the number of calls of `step`.
    """

    def __init__(self, model: nn.Module, compression_config: Mapping[str, Any]) -> None:
        self.model, self.compression_config, self.training_steps = model, compression_config, 0

    def step(self, step_zero_check: bool = False) -> None:
        """Counts a step, and changes nothing else."""
        self.training_steps += not step_zero_check
