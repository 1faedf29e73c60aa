"""`deepspeed.runtime.lr_schedules`: the schedules, as objects that write the rates of
an optimizer's groups.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from fzero.common.arguments import passed_on
from fzero.config.config import Config
from fzero.config.fields import ConfigError
from fzero.deepspeed.engine.client_optimizers import lr_of
from fzero.deepspeed.engine.optimizer import ConfiguredScheduler

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE, TOTAL_NUM_STEPS = "log", "linear", "total_num_steps"


class _AlsoConfigured(type):
    """Makes `isinstance` true for the scheduler that an engine made of the
    configuration's block of this name.
    """

    def __instancecheck__(cls, found: object) -> bool:
        made = globals().get(found.kind) if type(found) is ConfiguredScheduler else None
        return super().__instancecheck__(found) if made is None else issubclass(made, cls)


class _Schedule(ConfiguredScheduler, metaclass=_AlsoConfigured):
    """A schedule by its name in a configuration; a list among its parameters has a
    value for each group.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int, **params: Any) -> None:
        groups = optimizer.param_groups
        params = {
            key: list(value) if isinstance(value, tuple) else value for key, value in params.items()
        }
        try:
            block: Any = Config.load(
                {"scheduler": {"type": self._type(), "params": params}}
            ).scheduler
            blocks = block.for_groups(len(groups))
        except ConfigError as error:
            raise ConfigError(str(error).replace("scheduler.params", self._type())) from None
        rates = [block.rate(lr_of(group)) for block, group in zip(blocks, groups, strict=True)]
        super().__init__(optimizer, rates, block.momentum())
        if last_batch_iteration != -1:
            self.step(last_batch_iteration)

    @classmethod
    def _type(cls) -> str:
        return next(c.__name__ for c in cls.__mro__ if c.__name__ in VALID_LR_SCHEDULES)


class LRRangeTest(_Schedule):
    """Rates that grow from `lr_range_test_min_lr`, to find the largest one that trains."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(**passed_on(locals()))

    def step(self, batch_iteration: int | None = None) -> None:  # type: ignore[override]
        """Advances by one update, or to the one after `batch_iteration`."""
        super().step(batch_iteration)


class OneCycle(_Schedule):
    """Rates that go up and down once and then decay; the momentum goes the other way."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(**passed_on(locals()))

    def step(self, batch_iteration: int | None = None) -> None:  # type: ignore[override]
        """Advances by one update, or to the one after `batch_iteration`."""
        super().step(batch_iteration)


class WarmupLR(_Schedule):
    """Rates that grow from `warmup_min_lr` to `warmup_max_lr` (None: the group's) and
    stay there.
    """

    def __init__(
        self, optimizer: Any, warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None, warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        if warmup_max_lr is None:
            warmup_max_lr = [lr_of(group) for group in optimizer.param_groups]
        super().__init__(**passed_on(locals()))


class WarmupDecayLR(WarmupLR):
    """Rates that grow as `WarmupLR`'s, and then fall to 0 at `total_num_steps`."""

    def __init__(
        self, optimizer: Any, total_num_steps: int, warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001, warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        if warmup_max_lr is None:
            warmup_max_lr = [lr_of(group) for group in optimizer.param_groups]
        _Schedule.__init__(self, **passed_on(locals()))


class WarmupCosineLR(_Schedule):
    """Rates that grow to the group's own, and then fall along a cosine to
    `cos_min_ratio` of it at `total_num_steps`.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(**passed_on(locals()))


_ARGUMENTS: dict[str, tuple[Any, Any]] = {
    LR_SCHEDULE: (str, None),
    "lr_range_test_min_lr": (float, 0.001),
    "lr_range_test_step_rate": (float, 1.0),
    "lr_range_test_step_size": (int, 1000),
    "lr_range_test_staircase": (bool, False),
    "cycle_first_step_size": (int, 1000),
    "cycle_first_stair_count": (int, -1),
    "cycle_second_step_size": (int, -1),
    "cycle_second_stair_count": (int, -1),
    "decay_step_size": (int, 1000),
    "cycle_min_lr": (float, 0.01),
    "cycle_max_lr": (float, 0.1),
    "decay_lr_rate": (float, 0.0),
    "cycle_min_mom": (float, 0.8),
    "cycle_max_mom": (float, 0.9),
    "decay_mom_rate": (float, 0.0),
    "warmup_min_lr": (float, 0),
    "warmup_max_lr": (float, 0.001),
    "warmup_num_steps": (int, 1000),
    "warmup_type": (str, WARMUP_LOG_RATE),
    "warmup_min_ratio": (float, 0.01),
    "cos_min_ratio": (float, 0.01),
}


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the parameters of the schedules to a command line."""
    group = parser.add_argument_group("Convergence Tuning", "the learning rate's schedule")
    for name, (kind, default) in _ARGUMENTS.items():
        group.add_argument(f"--{name}", type=kind, default=default)
    group.add_argument("--cycle_momentum", default=False, action="store_true")
    return parser
