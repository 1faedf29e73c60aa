"""DeepSpeed's schedulers of data efficiency, for scripts: objects with a present value
around the functions of `fzero.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from fzero.config.data_efficiency import Difficulty, LTDSchedule
from fzero.config.fields import ConfigError, problems_of
from fzero.data.layer_drop import theta


class CurriculumScheduler:
    """The difficulty of a step, which never falls again from the largest one.

    Args:
        config: `min_difficulty`, `max_difficulty`, `schedule_type` and
            `schedule_config`; other keys are ignored.

    Attributes:
        state: DeepSpeed's dict, with `current_difficulty`; before the first step that
            is the smallest one.

    >>> config = {
    ...     "min_difficulty": 8,
    ...     "max_difficulty": 64,
    ...     "schedule_type": "fixed_linear",
    ...     "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
    ... }
    >>> scheduler = CurriculumScheduler(config)
    >>> (
    ...     scheduler.get_current_difficulty(),
    ...     scheduler.update_difficulty(5),
    ...     scheduler.get_current_difficulty(),
    ... )
    (8, 32, 32)
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("schedule_type") not in (
            None,
            "fixed_linear",
            "fixed_root",
            "fixed_discrete",
            "custom",
        ):
            raise RuntimeError("Unsupported curriculum schedule type")
        known = {key: config[key] for key in Difficulty.model_fields if key in config}
        try:
            self._schedule: Callable[[int], int] | None = Difficulty.model_validate(
                known
            ).schedule()
        except ValidationError as error:
            raise ConfigError("\n".join(problems_of(error, "curriculum"))) from None
        except ValueError as error:
            raise ConfigError(f"curriculum: {error}") from None
        self.state: dict[str, Any] = {**known, "current_difficulty": known["min_difficulty"]}

    @property
    def has_schedule(self) -> bool:
        """Whether there is a function to ask; of `custom` the script sets it."""
        return self._schedule is not None

    def get_current_difficulty(self) -> int:
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Sets the function of `schedule_type` custom: from the step, counted from 1,
        to its difficulty.
        """
        self._schedule = schedule_function

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of a step, counted from 1."""
        if self._schedule is None:
            raise ConfigError(
                "curriculum: needs a function for schedule_type 'custom', and none is set; call "
                "engine.set_custom_curriculum_learning_schedule(function) before the first step"
            )
        return self._schedule(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Makes the difficulty of a step the present one, and returns it."""
        if self.get_current_difficulty() < self.state["max_difficulty"]:
            self.set_current_difficulty(self.get_difficulty(global_steps))
        return self.get_current_difficulty()


class ProgressiveLayerDrop:
    """θ(n), which falls from 1 to `theta`.

    >>> drop = ProgressiveLayerDrop(theta=0.5)
    >>> drop.update_state(1000)
    >>> drop.get_state()["progressive_layer_drop"], round(drop.get_theta(), 4)
    (True, 0.6839)
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """The keyword arguments of the model."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        self.current_theta = theta(global_step, limit=self.theta, gamma=self.gamma)


class RandomLTDScheduler:
    """The number of tokens that dropping layers keep, and the layer tokens used so far.

    Args:
        config: the block `random_ltd`, with `global_batch_size`.

    Attributes:
        model_layer_num, random_ltd_layer_num: the numbers of all layers, and of those
            that drop tokens.
        state: DeepSpeed's dict: `current_value` is the number of kept tokens,
            `consumed_layer_tokens` the layer tokens of the steps up to `current_steps`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.model_layer_num, self.random_ltd_layer_num = (
            config["total_layer_num"],
            config["random_ltd_layer_num"],
        )
        self.global_batch_size = config["global_batch_size"]
        self.config_schedule = config["random_ltd_schedule"]
        try:
            self._schedule = LTDSchedule.model_validate(self.config_schedule).schedule()
        except ValidationError as error:
            raise ConfigError("\n".join(problems_of(error, "random_ltd_schedule"))) from None
        self.state: dict[str, Any] = {}
        self.reset_to_init()

    def reset_to_init(self) -> None:
        self.state = {
            "min_value": self._schedule.minimum,
            "max_value": self._schedule.maximum,
            "current_value": self._schedule.minimum,
            "consumed_layer_tokens": 0,
            "current_steps": -1,
        }

    def get_value(self, global_steps: int) -> int:
        """The number of kept tokens after so many updates."""
        return self._schedule(global_steps)

    def get_current_seq(self) -> int:
        return int(self.state["current_value"])

    def set_current_seq(self, seq_length: int) -> None:
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        return int(self.random_ltd_layer_num)

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def layer_tokens(self, kept: int) -> int:
        """The layer tokens of one step in which dropping layers keep so many tokens."""
        full_layers = self.model_layer_num - self.random_ltd_layer_num
        return int(
            self.global_batch_size
            * (kept * self.random_ltd_layer_num + self._schedule.maximum * full_layers)
        )

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """The layer tokens after so many steps."""
        for step in range(train_iters):
            self.update_seq(step)
        return int(self.state["consumed_layer_tokens"])

    def update_seq(self, global_steps: int) -> None:
        """Begins the step after so many updates; the same step is counted once."""
        before = self.state["current_steps"]
        if global_steps not in (before, before + 1):  # a checkpoint was loaded
            self.state["consumed_layer_tokens"] = sum(
                self.layer_tokens(self._schedule(n)) for n in range(global_steps)
            )
        self.state["current_value"] = self._schedule(global_steps)
        if global_steps != before:
            self.state["consumed_layer_tokens"] += self.layer_tokens(self.get_current_seq())
            self.state["current_steps"] = global_steps

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.state |= {key: state_dict[key] for key in self.state}
