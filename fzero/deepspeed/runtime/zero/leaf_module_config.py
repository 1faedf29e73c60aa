"""`deepspeed.runtime.zero.leaf_module_config`: the block `leaf_module`."""

from __future__ import annotations

from fzero.config.deepspeed_models import (
    LEAF_CLASSES as DEFAULT_LEAF_MODULE_CLASSES,
    DeepSpeedZeroLeafModuleConfig,
)

DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES",
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    "DeepSpeedZeroLeafModuleConfig",
]
