"""`deepspeed.runtime.rollout`: prompts in, prompts and answers out, of the model that an engine trains."""

from __future__ import annotations

from typing import Any

from fzero.deepspeed.runtime.rollout.base import (
    RolloutBatch,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)
from fzero.deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout, HybridEngineRolloutConfig
from fzero.engine.engine import Engine


def build_rollout(cfg: RolloutConfig, student_engine: Engine, tokenizer: Any) -> RolloutEngine:
    """The rollout engine that a configuration names; `"hybrid_engine"` is the only one.

    Args:
        tokenizer: has `pad_token_id` or `eos_token_id`.
    """
    if cfg.engine != "hybrid_engine":
        raise ValueError(
            f"RolloutConfig.engine: must be 'hybrid_engine', got {cfg.engine!r}; for an inference server take the weights from "
            f"fzero.generation.server_weights"
        )
    return HybridEngineRollout(student_engine, tokenizer, HybridEngineRolloutConfig(cfg.use_graph_capture))


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
