"""DeepSpeed's names for fzero's functions: `import fzero.deepspeed as deepspeed`.

Thin modules in DeepSpeed's own layout, implemented in other rooms. A name that is missing here has no counterpart in fzero.
After `install()` a script's own `import deepspeed` gives this package (`fzero.deepspeed.alias`).
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from typing import NoReturn

from fzero.deepspeed import (
    accelerator,
    checkpoint,
    comm,
    elasticity,
    git_version_info,
    launcher,
    moe,
    ops,
    pipe,
    profiling,
    runtime,
    utils,
)
from fzero.deepspeed.accelerator import get_accelerator
from fzero.deepspeed.alias import install
from fzero.deepspeed.comm import init_distributed
from fzero.deepspeed.engine.engine import Engine
from fzero.deepspeed.engine.initialize import initialize
from fzero.deepspeed.engine.optimizer import ConfiguredScheduler, WrappingOptimizer
from fzero.deepspeed.formats.export import export_deepspeed
from fzero.deepspeed.formats.load import convert_deepspeed, import_deepspeed
from fzero.deepspeed.pipe import PipelineModule
from fzero.deepspeed.runtime import zero
from fzero.deepspeed.runtime.activation_checkpointing import checkpointing
from fzero.deepspeed.runtime.config import ADAM_OPTIMIZER, LAMB_OPTIMIZER, DeepSpeedConfig, DeepSpeedConfigError
from fzero.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from fzero.deepspeed.runtime.engine import DeepSpeedOptimizerCallable, DeepSpeedSchedulerCallable
from fzero.deepspeed.runtime.lr_schedules import add_tuning_arguments
from fzero.deepspeed.utils import OnDevice, log_dist, logger

DeepSpeedEngine = Engine
DeepSpeedOptimizer = WrappingOptimizer
dist = comm
__version__ = version = git_version_info.version
"""The version of DeepSpeed whose keys and methods these are."""
__version_major__, __version_minor__, __version_patch__ = 0, 19, 6
__git_hash__, __git_branch__ = git_version_info.git_hash, git_version_info.git_branch


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--deepspeed`, `--deepspeed_config` and their old spelling to a command line."""
    group = parser.add_argument_group("DeepSpeed", "configuration of training")
    for name in ("deepspeed", "deepscale"):
        text = "for scripts that look at it; fzero does not" if name == "deepspeed" else SUPPRESS
        group.add_argument(f"--{name}", default=False, action="store_true", help=text)
        text = "JSON file, as DeepSpeed has it" if name == "deepspeed" else SUPPRESS
        group.add_argument(f"--{name}_config", default=None, type=str, help=text)
    return parser


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"fzero.deepspeed has no {name!r}: fzero trains with ZeRO 0 to 3 and offload, and has no mixtures of experts, "
        f"tensor parallelism or inference kernels; docs/deepspeed.md lists the names that it has"
    )


__all__ = [
    "ADAM_OPTIMIZER",
    "LAMB_OPTIMIZER",
    "ConfiguredScheduler",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "OnDevice",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "add_tuning_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "convert_deepspeed",
    "dist",
    "elasticity",
    "export_deepspeed",
    "get_accelerator",
    "git_version_info",
    "import_deepspeed",
    "init_distributed",
    "initialize",
    "install",
    "launcher",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "profiling",
    "runtime",
    "utils",
    "version",
    "zero",
]
