"""`prepare`: a model that carries its plan, for scripts in DeepSpeed's order: compress,
initialize, train, clean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fzero.compression.added import registered
from fzero.compression.matching import compression
from fzero.compression.plan import CompressionPlan, plan_of
from fzero.compression.students import start_of_student
from fzero.config.config import Config, ConfigError


def prepare(
    model: nn.Module,
    cfg: Config | Mapping[str, Any] | str,
    *,
    teacher: nn.Module | None = None,
    seed: int = 0,
) -> CompressionPlan:
    """Registers what the block `compression_training` adds to a model's modules, and
    notes the plan in the model.

    `fzero.initialize` applies the plan that it finds in a model. With `layer_reduction`
    the model begins with the layers of its teacher.

    Args:
        model: is changed: it gets scores, masks, ranges, the attribute
            `compression_plan`, and the teacher's tensors.
        teacher: the model whose layers the block `layer_reduction` names.

    Raises:
        ConfigError: as `compression` raises, or the model has another plan, or the
            teacher is missing.
    """
    cfg = Config.load(cfg)
    reduction = cfg.compression_training and cfg.compression_training.layer_reduction
    if reduction and reduction.enabled:
        if teacher is None:
            raise ConfigError(
                "compression_training.layer_reduction: needs the teacher, got teacher_model=None; "
                "pass it, or disable the block"
            )
        model.load_state_dict(start_of_student(model.state_dict(), teacher.state_dict(), reduction))
    plan, before = compression(cfg, model, seed=seed), plan_of(model)
    if before is not None and before != plan:
        raise ConfigError(
            "compression_training: must be applied once to a model, and this one has another plan; "
            "build it anew"
        )
    registered(plan, model)
    model.__dict__["compression_plan"] = plan
    return plan
