"""`PipelineStages`: what a step of one stage of a pipeline asks of the other stages (`fzero.pipeline.stages` answers)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fzero.comms.axes import RankAxis
from fzero.comms.records import CommRecord
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState


class PipelineStages(Protocol):
    """The ranks of the other stages of a pipeline, with which a stage begins and ends a step (`fzero.pipeline.stages`)."""

    @property
    def world(self) -> RankAxis: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    def stores(self, tensor: str, /) -> bool:
        """Whether this stage stores a tensor of the state in checkpoints. (Others may hold the same.)"""
        ...

    def micro_batches(self, run: StepRuntime, state: TrainState[Tensor], batch: Any, /) -> list[Any]:
        """This rank's micro-batches. Returns when all ranks have their own."""
        ...

    def joined(self, parts: Sequence[Tensor], device: torch.device, /) -> list[Tensor]:
        """The contributions of all stages' flat buffers to the norm, from those of this stage, for this rank's shard."""
        ...

    def first_name(self, name: str | None, /) -> str | None:
        """The first of the names of all stages, in the order of the layers."""
        ...

    def evaluate(self, run: StepRuntime, state: TrainState[Tensor], batch: Any, /) -> Tensor:
        """The mean loss, without gradients."""
        ...

    def first_state(self, run: StepRuntime, state: TrainState[Tensor], /) -> TrainState[Tensor]:
        """The first state with equal copies of tied layers."""
        ...

    def observed(self, observe: Callable[[CommRecord], None], /) -> Self:
        """The same stages, whose collectives are also reported to `observe`."""
        ...

    def all_of(self, own: Mapping[str, Tensor], /, *, keep: bool) -> dict[str, Tensor]:
        """The tensors of all stages, by name."""
        ...

    def streamed(
        self, names: dict[str, str], forms: dict[str, Any], own: Iterator[Mapping[str, Tensor]], /
    ) -> tuple[dict[str, str], dict[str, Any], Iterator[Mapping[str, Tensor]]]:
        """The keys, forms and tensors of all stages. The first stage gets the tensors, a few at a time."""
        ...
