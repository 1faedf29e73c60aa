"""`deepspeed.moe`: questions about mixtures of experts, which fzero has none of."""

from __future__ import annotations

from fzero.deepspeed.moe import utils

__all__ = ["utils"]
