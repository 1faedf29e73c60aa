"""`deepspeed.runtime`: DeepSpeed's modules of training, in its places."""

from __future__ import annotations

from fzero.deepspeed.runtime import (
    activation_checkpointing,
    base_optimizer,
    config,
    config_utils,
    data_pipeline,
    dataloader,
    engine,
    lr_schedules,
    pipe,
    progressive_layer_drop,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "config",
    "config_utils",
    "data_pipeline",
    "dataloader",
    "engine",
    "lr_schedules",
    "pipe",
    "progressive_layer_drop",
    "utils",
    "zero",
]
