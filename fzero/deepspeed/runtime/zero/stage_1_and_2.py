"""DeepSpeed's rule of thumb for the bytes of model states in stage 2. `print(engine.train_step.plan)` prints the exact ones."""

from fzero.deepspeed.engine.optimizer import ZeroOptimizer12 as DeepSpeedZeroOptimizer
from fzero.deepspeed.estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    model_to_params,
)

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "model_to_params",
]
