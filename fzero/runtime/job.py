"""`Job`: what a step asks of all ranks of the job.

Where each rank's plan is that of the whole model, `WholeModel` of
`fzero.runtime.step_runtime` answers. If the ranks divide the layers of a model among
them, each rank's runtime is that of its own layers, and another `Job` (that of
`fzero.pipeline.stages`) adds what the other ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from fzero.comms.axes import RankAxis
from fzero.comms.records import CommRecord
from fzero.plans.plan import Plan
from fzero.state import TrainState

Streamed = tuple[dict[str, str], dict[str, Any], Iterator[Mapping[str, Tensor]]]


class Job(Protocol):
    """All ranks of a job, as seen from one of them. Its collectives are of the ranks
    that hold other parts of the model.
    """

    @property
    def world(self) -> RankAxis:
        """All ranks."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether each rank's plan is that of the whole model."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors of the whole model in order, where other ranks hold
        some of them; else empty.
        """
        ...

    def stores(self, tensor: str, /) -> bool:
        """Whether this rank's part of the model stores a tensor of the state in
        checkpoints. (Other parts may hold the same.)
        """
        ...

    def norm_parts(self, parts: Sequence[Tensor], device: torch.device, /) -> Sequence[Tensor]:
        """The contributions of the whole model's flat buffers to the norm, from those
        of this rank's part, for its shard.
        """
        ...

    def first_name(self, name: str | None, /) -> str | None:
        """The first of the names that the parts of the model have found, in the order
        of the model.
        """
        ...

    def first_state(self, plan: Plan, state: TrainState[Tensor], /) -> TrainState[Tensor]:
        """The first state, in which the copies of a tensor that several parts hold are
        equal.
        """
        ...

    def all_tensors(
        self, own: dict[str, Tensor], /, *, to: Literal["all", "rank0"]
    ) -> dict[str, Tensor]:
        """The tensors of the whole model by name, from those of this rank's part."""
        ...

    def streamed(
        self, names: dict[str, str], forms: dict[str, Any], own: Iterator[Mapping[str, Tensor]], /
    ) -> Streamed:
        """The keys, forms and tensors of the whole model. Rank 0 gets the tensors, a
        few at a time.

        Args:
            names: the keys of this part's state dict, each with the name of its tensor.
            forms: (shape, dtype) of these tensors by name, as plain values.
            own: these tensors, those of one flat buffer after the other.
        """
        ...

    def observed(self, observe: Callable[[CommRecord], None], /) -> Self:
        """The same job, whose collectives are also reported to `observe`."""
        ...
