"""DeepSpeed's names for fzero's functions: `import fzero.deepspeed as deepspeed`.

Thin modules in DeepSpeed's own layout, on top of `engine`, `formats`, `integrations`,
`topology` and `estimators`, which have names of fzero's own. Modules that only pass
names on are rows of `table`. All is imported at its first use. A name that is missing
here has no counterpart in fzero. After `install()` a script's own `import deepspeed`
gives this package (`fzero.deepspeed.alias`).
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from typing import TYPE_CHECKING

from fzero.deepspeed.exports import make_modules, names_of
from fzero.deepspeed.table import MODULES, PACKAGE

make_modules()

if TYPE_CHECKING:
    from fzero.deepspeed import (
        accelerator as accelerator,
        checkpoint as checkpoint,
        comm as comm,
        elasticity as elasticity,
        git_version_info as git_version_info,
        launcher as launcher,
        moe as moe,
        ops as ops,
        pipe as pipe,
        profiling as profiling,
        runtime as runtime,
        utils as utils,
    )
    from fzero.deepspeed.accelerator import get_accelerator as get_accelerator
    from fzero.deepspeed.alias import install as install
    from fzero.deepspeed.comm import init_distributed as init_distributed
    from fzero.deepspeed.engine.dataloader import ResumableLoader
    from fzero.deepspeed.engine.engine import Engine
    from fzero.deepspeed.engine.initialize import initialize as initialize
    from fzero.deepspeed.engine.optimizer import (
        ConfiguredScheduler as ConfiguredScheduler,
        WrappingOptimizer,
    )
    from fzero.deepspeed.formats.export import export_deepspeed as export_deepspeed
    from fzero.deepspeed.formats.load import (
        convert_deepspeed as convert_deepspeed,
        import_deepspeed as import_deepspeed,
    )
    from fzero.deepspeed.runtime import zero as zero
    from fzero.deepspeed.runtime.activation_checkpointing import checkpointing as checkpointing
    from fzero.deepspeed.runtime.config import (
        ADAM_OPTIMIZER as ADAM_OPTIMIZER,
        LAMB_OPTIMIZER as LAMB_OPTIMIZER,
        DeepSpeedConfig as DeepSpeedConfig,
        DeepSpeedConfigError as DeepSpeedConfigError,
    )
    from fzero.deepspeed.runtime.engine import (
        DeepSpeedOptimizerCallable as DeepSpeedOptimizerCallable,
        DeepSpeedSchedulerCallable as DeepSpeedSchedulerCallable,
    )
    from fzero.deepspeed.runtime.lr_schedules import add_tuning_arguments as add_tuning_arguments
    from fzero.deepspeed.runtime.pipe.module import PipelineModule as PipelineModule
    from fzero.deepspeed.utils import OnDevice as OnDevice, log_dist as log_dist, logger as logger

    DeepSpeedDataLoader, DeepSpeedEngine, DeepSpeedOptimizer, dist = (
        ResumableLoader,
        Engine,
        WrappingOptimizer,
        comm,
    )
else:
    find, listed, __all__ = names_of("fzero.deepspeed", PACKAGE)
    __all__ = sorted([*__all__, *MODULES, "add_config_arguments", "version"])

    def __dir__():
        return sorted({*listed(), *__all__})

    def __getattr__(name):
        try:
            return find(name)
        except AttributeError:
            raise AttributeError(
                f"fzero.deepspeed has no {name!r}: fzero trains with ZeRO 0 to 3 and offload, and "
                f"has no mixtures of experts, tensor parallelism or inference kernels; "
                f"docs/deepspeed.md lists the names that it has"
            ) from None


__version__ = version = "0.19.8"
"""The newest version of DeepSpeed whose names these are; those of 0.19.6 are here, too."""
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__, __git_branch__ = "fzero", "fzero"


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--deepspeed`, `--deepspeed_config` and their old spelling to a command
    line.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration of training")
    for name in ("deepspeed", "deepscale"):
        text = "for scripts that look at it; fzero does not" if name == "deepspeed" else SUPPRESS
        group.add_argument(f"--{name}", default=False, action="store_true", help=text)
        text = "JSON file, as DeepSpeed has it" if name == "deepspeed" else SUPPRESS
        group.add_argument(f"--{name}_config", default=None, type=str, help=text)
    return parser
