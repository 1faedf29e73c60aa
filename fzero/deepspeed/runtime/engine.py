"""`deepspeed.runtime.engine`: the engine, and the types of functions that make an
optimizer or a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from fzero.deepspeed.engine.engine import Engine as DeepSpeedEngine
from fzero.deepspeed.engine.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]
MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000

__all__ = [
    "MEMORY_OPT_ALLREDUCE_SIZE",
    "DeepSpeedEngine",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "NoopTimer",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
]
