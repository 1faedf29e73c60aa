"""The learning-rate schedules of a configuration: their names, their parameters, and
the functions that they make.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    PlainValidator,
    Tag,
    TypeAdapter,
    model_validator,
)

import fzero.optim as optim
from fzero.config.fields import Beta, Block, ConfigError, Count, Elements, Rate

if TYPE_CHECKING:
    from fzero.optim.lr_schedules import Schedule


_RATE, _RATES = TypeAdapter(Rate), TypeAdapter(tuple[Rate, ...])


def _rates(value: object) -> Any:
    return (_RATES if isinstance(value, list | tuple) else _RATE).validate_python(value)


Rates = Annotated[Any, PlainValidator(_rates)]
"""A number that is at least 0, or a list with one for each parameter group."""


def _one_beta(value: object) -> Any:
    """The number, or the one number that a list repeats; an update has one first beta
    for all groups.
    """
    if not isinstance(value, list | tuple):
        return value
    if len({*value}) != 1:
        raise ValueError("must be the same number for every parameter group")
    return value[0]


Betas = Annotated[Beta, BeforeValidator(_one_beta)]


class WarmupLRParams(Block):
    """`scheduler.params` of WarmupLR."""

    warmup_min_lr: Rates = 0.0
    """A number, or a list with one for each parameter group."""
    warmup_max_lr: Rates | None = None
    """Likewise; None is each group's lr."""
    warmup_num_steps: Count = 1000
    """Number of updates until the full rate; 1 counts as 2."""
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: Literal[-1] = -1
    """Must be -1: a schedule is a function of the state's step."""


class WarmupDecayLRParams(WarmupLRParams):
    """`scheduler.params` of WarmupDecayLR."""

    warmup_max_lr: Rates = 1e-3
    """A number, or a list with one for each parameter group."""
    total_num_steps: Count


class WarmupCosineLRParams(Block):
    """`scheduler.params` of WarmupCosineLR; ratios are of each group's lr."""

    total_num_steps: Count
    warmup_min_ratio: Rate = 0.0
    warmup_num_steps: Count = 1000
    cos_min_ratio: Rate = 1e-4
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: Literal[-1] = -1


class LRRangeTestParams(Block):
    """`scheduler.params` of LRRangeTest."""

    lr_range_test_min_lr: Rates = 1e-3
    """A number, or a list with one for each parameter group."""
    lr_range_test_step_size: Count = 2000
    lr_range_test_step_rate: Rate = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: Literal[-1] = -1


class OneCycleParams(Block):
    """`scheduler.params` of OneCycle. Unlike DeepSpeed's, which sets Adam's second beta
    to 0.99, it does not change that.
    """

    cycle_min_lr: Rates
    """A number, or a list with one for each parameter group."""
    cycle_max_lr: Rates
    """Likewise."""
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: Count = 2000
    cycle_second_step_size: Elements | None = None
    cycle_first_stair_count: Elements = 0
    cycle_second_stair_count: Elements | None = None
    decay_step_size: Elements = 0
    cycle_momentum: bool = True
    """Optimizers with betas: whether the first one goes from `cycle_max_mom` to
    `cycle_min_mom` and back.
    """
    cycle_min_mom: Betas = 0.8
    """A number, or a list with the same one for each parameter group."""
    cycle_max_mom: Betas = 0.9
    """Likewise."""
    decay_mom_rate: Rate = 0.0
    last_batch_iteration: Literal[-1] = -1


class Scheduler(Block):
    """The base of all schedulers: each has a `rate(lr)` by the number of updates, and
    some also a momentum.
    """

    one_each: ClassVar[tuple[str, ...] | None] = None
    """The parameters whose lists have a value for each group; None is all."""

    params: Any

    def for_groups(self, num_groups: int) -> list[Self]:
        """The scheduler of each parameter group: the same, but with the group's own
        value of a list.

        Raises:
            ConfigError: a list has another length.

        >>> both = WarmupLR.model_validate(
        ...     {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}
        ... ).for_groups(2)
        >>> [one.rate(1.0)(1000) for one in both]
        [0.1, 0.2]
        """
        lists = self.listed()
        for key, value in lists.items():
            if len(value) != num_groups:
                raise ConfigError(
                    f"scheduler.params.{key}: must be a number, or have one for each of the "
                    f"{num_groups} parameter groups, got {len(value)}; pass one number, or as many "
                    f"as there are groups"
                )
        return [
            self._having({key: value[i] for key, value in lists.items()}) for i in range(num_groups)
        ]

    def listed(self) -> dict[str, Any]:
        """The parameters that are lists, with a value for each group."""
        return {
            key: value
            for key, value in dict(self.params).items()
            if isinstance(value, list | tuple) and key in (self.one_each or (key,))
        }

    def _having(self, values: dict[str, Any]) -> Self:
        """The scheduler with other values of parameters."""
        if not values:
            return self
        known = self.params
        params = known | values if isinstance(known, dict) else known.model_copy(update=values)
        return self.model_copy(update={"params": params})

    @abstractmethod
    def rate(self, lr: float) -> Schedule:
        """The learning rate of a group whose own is `lr`, by the number of updates."""

    def momentum(self) -> Schedule | None:
        """The first beta by the number of updates, or None where it is constant."""
        return self.cycle_momentum() if isinstance(self, OneCycle) else None


class WarmupLR(Scheduler):
    type: Literal["WarmupLR"]
    params: WarmupLRParams = WarmupLRParams()

    def rate(self, lr: float) -> Schedule:
        p = self.params
        return optim.lr_schedules.warmup_lr(
            lr if p.warmup_max_lr is None else p.warmup_max_lr,
            min_lr=p.warmup_min_lr, warmup_num_steps=p.warmup_num_steps, warmup_type=p.warmup_type,
        )  # fmt: skip


class WarmupDecayLR(Scheduler):
    type: Literal["WarmupDecayLR"]
    params: WarmupDecayLRParams

    def rate(self, lr: float) -> Schedule:
        p = self.params
        return optim.lr_schedules.warmup_decay_lr(
            p.warmup_max_lr, total_num_steps=p.total_num_steps,
            min_lr=p.warmup_min_lr, warmup_num_steps=p.warmup_num_steps, warmup_type=p.warmup_type,
        )  # fmt: skip


class WarmupCosineLR(Scheduler):
    type: Literal["WarmupCosineLR"]
    params: WarmupCosineLRParams

    def rate(self, lr: float) -> Schedule:
        return optim.lr_schedules.warmup_cosine_lr(
            lr, **self.params.model_dump(exclude={"last_batch_iteration"})
        )


class LRRangeTest(Scheduler):
    type: Literal["LRRangeTest"]
    params: LRRangeTestParams = LRRangeTestParams()

    def rate(self, lr: float) -> Schedule:
        p = self.params
        return optim.lr_schedules.lr_range_test(
            p.lr_range_test_min_lr, step_size=p.lr_range_test_step_size,
            step_rate=p.lr_range_test_step_rate, staircase=p.lr_range_test_staircase,
        )  # fmt: skip


class OneCycle(Scheduler):
    type: Literal["OneCycle"]
    params: OneCycleParams

    def rate(self, lr: float) -> Schedule:
        p = self.params
        return self._cycle(p.cycle_min_lr, p.cycle_max_lr, p.decay_lr_rate)

    def cycle_momentum(self) -> Schedule | None:
        """The first beta, which goes the other way than the rate."""
        p = self.params
        if not p.cycle_momentum:
            return None
        return self._cycle(p.cycle_min_mom, p.cycle_max_mom, p.decay_mom_rate, inverse=True)

    def _cycle(
        self, low: float, high: float, decay_rate: float, *, inverse: bool = False
    ) -> Schedule:
        p = self.params
        return optim.lr_schedules.one_cycle(
            low,
            high,
            first_step_size=p.cycle_first_step_size,
            second_step_size=p.cycle_second_step_size,
            first_stair_count=p.cycle_first_stair_count,
            second_stair_count=p.cycle_second_stair_count,
            decay_step_size=p.decay_step_size,
            decay_rate=decay_rate,
            inverse=inverse,
        )


class TorchScheduler(Scheduler):
    """Any other `type` is a class of `torch.optim.lr_scheduler`, stepped once after
    every update.
    """

    one_each: ClassVar[tuple[str, ...] | None] = ("base_lr", "max_lr")

    type: str
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it

    @model_validator(mode="after")
    def _exists(self) -> Self:
        known = [*SCHEDULERS, *optim.lr_schedules.torch_classes()]
        if self.type not in known:
            nearest = difflib.get_close_matches(self.type, known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"no scheduler is named {self.type!r}; did you mean {nearest!r}? (known: "
                f"{', '.join(SCHEDULERS)} and the classes of torch.optim.lr_scheduler)"
            )
        self.for_groups(len(next(iter(self.listed().values()), [0])))[0].rate(1.0)
        return self

    def rate(self, lr: float) -> Schedule:
        return optim.lr_schedules.torch_schedule(self.type, lr, **self.params)


SCHEDULERS: dict[str, type[Scheduler]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def _scheduler_tag(data: Any) -> str:
    given = data.get("type") if isinstance(data, Mapping) else getattr(data, "type", None)
    return given if isinstance(given, str) and given in SCHEDULERS else "torch"


AnyScheduler = Annotated[
    Annotated[WarmupLR, Tag("WarmupLR")]
    | Annotated[WarmupDecayLR, Tag("WarmupDecayLR")]
    | Annotated[WarmupCosineLR, Tag("WarmupCosineLR")]
    | Annotated[LRRangeTest, Tag("LRRangeTest")]
    | Annotated[OneCycle, Tag("OneCycle")]
    | Annotated[TorchScheduler, Tag("torch")],
    Discriminator(_scheduler_tag),
]
