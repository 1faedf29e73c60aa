"""DeepSpeed's rule of thumb for the bytes of model states in stage 3.
`print(engine.train_step.plan)` prints the exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fzero.deepspeed.engine.optimizer import ZeroOptimizer3 as DeepSpeedZeroOptimizer_Stage3
from fzero.deepspeed.estimators import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    model_to_params,
)
from fzero.deepspeed.runtime.zero.partition_parameters import GatheredParameters


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, all parameters are full, and the model runs by itself, any number of
    times per rank. Yields the model.

    *Collective:* every rank, to enter and to leave.
    """
    with GatheredParameters(model.parameters()):
        yield model


__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
    "unwrap_model_for_generation",
]
