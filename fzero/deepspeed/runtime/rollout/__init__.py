"""`deepspeed.runtime.rollout`: prompts in, prompts and answers out, of the model that
an engine trains.
"""

from __future__ import annotations

from typing import Any

from fzero.deepspeed.engine.engine import Engine
from fzero.deepspeed.runtime.rollout.base import (
    RolloutBatch,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)
from fzero.deepspeed.runtime.rollout.hybrid_engine_rollout import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
)


def build_rollout(
    rollout_cfg: Any, student_engine: Engine | None = None, tokenizer: Any = None, **kwargs: Any
) -> RolloutEngine:
    """The rollout engine that a configuration names; `"hybrid_engine"` is the only one.

    Args:
        rollout_cfg: a `RolloutConfig`, or another object with an attribute `engine`;
            `HybridEngineRollout` reads the others.
        student_engine, tokenizer: both are required; the tokenizer has `pad_token_id`
            or `eos_token_id`.
    """
    if rollout_cfg.engine != "hybrid_engine":
        raise ValueError(
            f"RolloutConfig.engine: must be 'hybrid_engine', got {rollout_cfg.engine!r}; for an "
            f"inference server take the weights from fzero.generation.server_weights"
        )
    if student_engine is None or tokenizer is None:
        missing = "student_engine" if student_engine is None else "tokenizer"
        raise ValueError(
            f"build_rollout: needs student_engine and tokenizer, got no {missing}; pass both"
        )
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)


__all__ = [
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "build_rollout",
]
