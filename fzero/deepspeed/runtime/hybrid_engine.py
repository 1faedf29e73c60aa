"""`deepspeed.runtime.hybrid_engine`: every engine generates between updates."""

from __future__ import annotations

from fzero.deepspeed.engine.engine import Engine as DeepSpeedHybridEngine

__all__ = ["DeepSpeedHybridEngine"]
