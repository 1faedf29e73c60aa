"""`deepspeed.compression.compress`: before training `init_compression`, after it
`redundancy_clean`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fzero.compression.cleaning import clean, shrunk
from fzero.compression.plan import plan_of
from fzero.compression.prepared import prepare
from fzero.compression.students import start_of_student
from fzero.config.compression import CompressionTraining
from fzero.config.config import Config, ConfigError
from fzero.config.files import read
from fzero.deepspeed.engine.divided_params import gathered, shaped
from fzero.deepspeed.engine.engine import Engine
from fzero.deepspeed.engine.param_views import engine_of

__all__ = ["init_compression", "redundancy_clean", "student_initialization"]

Source = Mapping[str, Any] | str | Config


def init_compression(
    model: nn.Module,
    deepspeed_config: Source,
    teacher_model: nn.Module | None = None,
    mpu: Any = None,
) -> nn.Module:
    """Prepares a model for compressed training, and returns it. Its modules stay;
    trained scores, masks and ranges are added.

    *Collective* with `layer_reduction` where `zero.Init` has divided a model: every
    rank; both models are gathered whole.

    Args:
        model: also one that `zero.Init` has divided, which stays so.
        deepspeed_config: a mapping in DeepSpeed's schema, or the path of a file.
        teacher_model: needed with `layer_reduction`.
        mpu: must be None, because no rank is model-parallel.
    """
    _check_mpu(mpu)
    cfg = Config.load(_block(deepspeed_config))
    params = [
        *model.parameters(),
        *(teacher_model.parameters() if teacher_model is not None else ()),
    ]
    block = cfg.compression_training or CompressionTraining()
    inside: Any = gathered(params, 0) if block.layer_reduction.enabled else shaped(model)
    with inside:
        prepare(model, cfg, teacher=teacher_model)
    return model


def redundancy_clean(
    model: nn.Module | Engine, deepspeed_config: Source, mpu: Any = None
) -> nn.Module:
    """A copy of a model with its compression made permanent, and smaller matrices where
    `related_modules` says so.

    DeepSpeed changes the model itself; use what this returns. *Collective* for a
    divided model, and an engine's: every rank.

    Args:
        model: one after `init_compression`, on its own or under an engine; or an
            engine.
        deepspeed_config: that of `init_compression`.
        mpu: must be None.
    """
    _check_mpu(mpu)
    engine = model if isinstance(model, Engine) else engine_of(next(model.parameters()))
    module = engine.module if engine is not None else model
    assert isinstance(module, nn.Module)
    plan = plan_of(module)
    if plan is None:
        if not Config.load(_block(deepspeed_config)).compresses:
            return module
        raise ConfigError(
            "redundancy_clean: needs a model after init_compression, got one without its plan; "
            "call init_compression before training"
        )
    if engine is None:
        with gathered(module.parameters(), None):
            return shrunk(module, clean(module.state_dict(), plan))
    weights = clean(engine.train_step.gather(engine.state), plan)
    with engine.gathered():  # so that parameters have their shapes
        return shrunk(module, weights)


def student_initialization(
    student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Source
) -> None:
    """Copies the layers of a teacher that the block `layer_reduction` names into a
    student, buffers included.
    """
    block = Config.load(_block(deepspeed_config)).compression_training or CompressionTraining()
    with gathered([*student_model.parameters(), *teacher_model.parameters()], 0):
        student_model.load_state_dict(
            start_of_student(
                student_model.state_dict(), teacher_model.state_dict(), block.layer_reduction
            )
        )


def _block(source: Source) -> Source:
    """The configuration with the block alone: the other keys are for `initialize`."""
    if isinstance(source, Config):
        return source
    given = read(source) if isinstance(source, str) else source
    return {key: value for key, value in given.items() if key == "compression_training"}


def _check_mpu(mpu: Any) -> None:
    if mpu is not None:
        raise ValueError(
            f"mpu: must be None, because no rank is model-parallel, got {type(mpu).__name__}; "
            f"leave it out"
        )
