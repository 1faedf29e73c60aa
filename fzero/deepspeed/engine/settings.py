"""`Settings`: DeepSpeed's methods that read an engine's configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fzero.comms.rendezvous import launched
from fzero.deepspeed.engine.deepspeed_config import DeepSpeedConfig
from fzero.deepspeed.engine.settings_table import (
    ATTRIBUTES,
    CONSTANT,
    GIVEN,
    PLACES,
    READ,
    REFUSED,
    look_up,
)
from fzero.deepspeed.formats.files import MODEL, MODEL_OF_RANK, OPTIMIZER_OF_RANK
from sharding.views import torch_dtype

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine

DEEPSPEEDS_OWN = ("_config", "_get_ckpt_name", "_get_optimizer_ckpt_name", "_get_zero_ckpt_name")
"""Names of DeepSpeed's engine that scripts use in spite of their first letter."""


class Settings:
    """The part of an engine that reads its configuration. The rows of `settings_table`
    are methods, too.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @cached_property
    def _config(self) -> DeepSpeedConfig:
        """The configuration under DeepSpeed's names; `engine.config` is what the script
        gave.
        """
        return DeepSpeedConfig(self.engine.config, engine=self.engine)

    @property
    def local_rank(self) -> int:
        """The index of this rank on its machine."""
        me = launched()
        return self.engine.device.index or 0 if me is None else me.local_rank

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the largest flat buffer's parameters and of its accumulated
        gradients.
        """
        dtypes = max(
            self.engine.train_step.plan.flat_buffers, key=lambda buffer: buffer.padded_numel
        ).dtypes
        return torch_dtype(dtypes.param), torch_dtype(dtypes.grad)

    def optimizer_name(self) -> str | None:
        """The name of the configuration's optimizer, in lower case as in DeepSpeed."""
        return (
            str(self.engine.cfg.optimizer.type).lower()
            if "optimizer" in self.engine.cfg.model_fields_set
            else None
        )

    def get_type(self) -> list[str | None]:
        """The optimizer of each group."""
        return [
            str(getattr(one, "type", one)).lower()
            for one in self.engine.train_step.runtime.updater.optimizers
        ]

    def zero_overlap_comm(self) -> bool:
        """As configured; DeepSpeed's default is true in stage 3 only."""
        return bool(
            look_up(
                self.engine.config,
                "zero_optimization.overlap_comm",
                self.engine.train_step.plan.row.shards("params"),
            )
        )

    def is_first_weights_partition_group(self) -> bool:
        """Whether this rank is in the first group that shards the weights among itself."""
        size = int(look_up(self.engine.config, "zero_optimization.mics_shard_size", -1))
        return (
            self.engine.train_step.rank < size
            if size > 0
            else self.engine.train_step.plan.row.shards("params")
        )

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are sent: as configured, or that of 16-bit
        parameters.
        """
        named = self.engine.cfg.communication_data_type or self.engine.cfg.precision.param_dtype
        return torch_dtype(named or "float32")

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """The classes whose computation `torch_autocast` does in 16 bits; DeepSpeed's
        default where none are configured.
        """
        kinds = ("linear.Linear", "conv.Conv1d", "conv.Conv2d", "conv.Conv3d")
        default = [f"torch.nn.modules.{kind}" for kind in kinds]
        return list(
            look_up(self.engine.config, "torch_autocast.lower_precision_safe_modules", default)
        )

    def initial_dynamic_scale(self) -> int:
        return int(2 ** look_up(self.engine.config, "fp16.initial_scale_power", 16))

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The rules of a dynamic loss scale, under DeepSpeed's names."""
        fp16 = self.engine.cfg.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "min_scale": fp16.min_loss_scale,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
        }

    @cached_property
    def sparse_tensor_module_names(self) -> set[str]:
        """The weights whose gradients are sent as sparse tensors: none, also with
        `sparse_gradients`.
        """
        return set()

    # --- names of DeepSpeed's files, which `load_checkpoint` reads; `save_checkpoint` writes others

    def _get_ckpt_name(
        self,
        checkpoints_path: str | Path,
        tag: str | None,
        mp_placeholder: str | None = None,
        pp_placeholder: str | None = None,
    ) -> str:
        """The path of the model file of a checkpoint of DeepSpeed's; in stage 3, of
        this rank's.
        """
        rank = self.engine.train_step.data_rank if pp_placeholder is None else pp_placeholder
        name = (
            MODEL_OF_RANK.format(rank)
            if self.engine.train_step.plan.row.shards("params")
            else MODEL
        )
        if mp_placeholder is not None:
            name = name.replace("mp_rank_00", f"mp_rank_{mp_placeholder}")
        return os.path.join(checkpoints_path, str(tag), name)

    def _get_zero_ckpt_name(self, checkpoints_path: str | Path, tag: str | None) -> str:
        """The path of the file of this rank's optimizer state."""
        prefix = "bf16_" if self.engine.cfg.bf16.enabled else ""
        return os.path.join(
            checkpoints_path,
            str(tag),
            prefix + OPTIMIZER_OF_RANK.format(self.engine.train_step.data_rank),
        )

    def _get_optimizer_ckpt_name(
        self, checkpoints_path: str | Path, tag: str | None, expp_rank: int
    ) -> str:
        """The path of the optimizer's file of a rank that has experts of its own."""
        return os.path.join(
            checkpoints_path, str(tag), f"expp_rank_{expp_rank}_mp_rank_00_optim_states.pt"
        )


def _given(name: str) -> Callable[[Settings], Any]:
    key, default = GIVEN[name]
    return lambda self: look_up(self.engine.config, key, default)


def _read(name: str) -> Callable[[Settings], Any]:
    place, kind = READ[name]
    read = attrgetter(place)
    return (
        (lambda self: read(self.engine)) if kind is None else lambda self: kind(read(self.engine))
    )


def _constant(name: str) -> Callable[[Settings], Any]:
    return lambda self: CONSTANT[name]


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: Settings, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"engine.{name}: must not be called, fzero has none: {REFUSED[name]}")

    return method


for _table, _made in ((GIVEN, _given), (READ, _read), (CONSTANT, _constant), (REFUSED, _refused)):
    for _name in _table:
        setattr(Settings, _name, _made(_name))
for _name, _place in PLACES.items():
    setattr(Settings, _name, property(lambda self, read=attrgetter(_place): read(self.engine)))  # type: ignore[misc]
for _name, _value in ATTRIBUTES.items():
    setattr(Settings, _name, _value)
