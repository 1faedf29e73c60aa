"""`deepspeed.checkpoint`: helpers for files. Checkpoints themselves:
docs/deepspeed_checkpoints.md.
"""

from __future__ import annotations

from fzero.deepspeed.checkpoint import ds_to_universal, utils
from fzero.deepspeed.checkpoint.utils import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)

__all__ = [
    "ds_to_universal",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "utils",
]
