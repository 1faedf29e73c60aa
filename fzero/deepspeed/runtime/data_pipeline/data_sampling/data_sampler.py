"""`deepspeed.runtime.data_pipeline.data_sampling.data_sampler`: which samples are in
which batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fzero.config.config import Config
from fzero.deepspeed.engine.data_efficiency import efficiency_of, sampler_of

__all__ = ["DeepSpeedDataSampler"]


class DeepSpeedDataSampler:
    """The samples of one rank's micro-batches, of the block `data_efficiency`; for a
    script's own `DataLoader`.

    Args:
        data_efficiency_config: the block.
        one_epoch_total_samples: of the dataset.
        micro_batch_size: of one rank.
        data_parallel_rank, data_parallel_size: select this rank's part.
        data_parallel_group, global_rank, drop_last: have no effect: nothing is sent,
            and batches are whole.
        gradient_accumulation_steps: micro-batches of one rank in a batch.

    Attributes:
        consumed_samples: on all ranks.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        cfg = Config.load({"data_efficiency": dict(data_efficiency_config)})
        self.sampler = sampler_of(cfg, one_epoch_total_samples)
        self.total_samples = one_epoch_total_samples * efficiency_of(cfg).data_sampling.num_epochs
        self.micro_batch_size, self.gradient_accumulation_steps = (
            micro_batch_size,
            gradient_accumulation_steps,
        )
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.consumed_samples = 0

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.data_parallel_size * self.gradient_accumulation_steps

    @property
    def current_difficulties(self) -> dict[str, int]:
        return self.sampler.difficulties(self.consumed_samples // self.global_batch_size)

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]]
    ) -> None:
        """Sets functions from the step, counted from 1, to the difficulty, by metric."""
        admissions = {
            name: replace(own, schedule=schedule_func_dict.get(name, own.schedule))
            for name, own in self.sampler.admissions.items()
        }
        self.sampler = replace(self.sampler, admissions=admissions)

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        together = self.micro_batch_size * self.data_parallel_size
        while self.consumed_samples + together <= self.total_samples:
            batch, part = divmod(
                self.consumed_samples // together, self.gradient_accumulation_steps
            )
            start = (
                self.data_parallel_rank * self.gradient_accumulation_steps + part
            ) * self.micro_batch_size
            samples = self.sampler(batch, size=self.global_batch_size)[
                start : start + self.micro_batch_size
            ]
            yield samples.tolist()
            self.consumed_samples += together

    def state_dict(self) -> dict[str, Any]:
        return {
            "consumed_samples": self.consumed_samples,
            "current_difficulties": self.current_difficulties,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.consumed_samples = state_dict["consumed_samples"]
