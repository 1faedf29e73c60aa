"""DeepSpeed's names for fzero's functions: `import fzero.deepspeed as deepspeed`.

Thin modules in DeepSpeed's own layout, implemented in other rooms. A name that is missing here has no counterpart in fzero.
After `install()` a script's own `import deepspeed` gives this package (`fzero.deepspeed.alias`).
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn

from fzero.deepspeed import accelerator, checkpointing, comm, ops, runtime, utils, zero
from fzero.deepspeed.accelerator import get_accelerator
from fzero.deepspeed.alias import install
from fzero.deepspeed.comm import init_distributed
from fzero.deepspeed.utils import log_dist, logger
from fzero.engine.engine import Engine
from fzero.engine.initialize import initialize
from fzero.engine.optimizer import ConfiguredScheduler, EngineOptimizer

DeepSpeedEngine = Engine
DeepSpeedOptimizer = EngineOptimizer
__version__ = "0.19.6"
"""The version of DeepSpeed whose keys and methods these are."""

__version_major__, __version_minor__, __version_patch__ = 0, 19, 6
__git_hash__ = __git_branch__ = "[none]"


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config` to a command line."""
    group = parser.add_argument_group("DeepSpeed", "configuration of training")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="for scripts that look at it; fzero does not"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="JSON file, as DeepSpeed has it")
    return parser


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"fzero.deepspeed has no {name!r}: fzero trains with ZeRO 0 to 3 and offload, and has no pipelines, mixtures of experts, "
        f"tensor parallelism or inference kernels; docs/deepspeed.md lists the names that it has"
    )


__all__ = [
    "ConfiguredScheduler",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]
