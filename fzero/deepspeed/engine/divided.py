"""`Divided`: one rank's part of a parameter that is divided before an engine exists
(DeepSpeed's `zero.Init`).

Shape letters: N elements, P padded = W·S, S shard, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.pending import Pending
from fzero.comms.records import Label
from sharding import Partition
from sharding.views import pad, take_shard

INIT = Label("init")


def nothing() -> None:
    """In a file, the place of what only this process has."""


@dataclass(slots=True, eq=False)
class Divided:
    """One rank's part of a parameter that is divided over an axis.

    Args:
        shape: the full shape.
        axis: the ranks.
        shard_S: this rank's elements, padding included, on any device.
        device: where the full values are made.
    """

    shape: torch.Size
    axis: RankAxis
    shard_S: Tensor
    device: torch.device

    @classmethod
    def of(cls, full: Tensor, axis: RankAxis, *, source: int | None = 0) -> Divided:
        """This rank's part of a tensor.

        *Collective* with a source: every rank; the source sends N elements to each
        other rank.

        Args:
            full: on the device where full values are made; with a source it is
                overwritten by that rank's values.
            source: the rank whose values count; None where they are equal.
        """
        full = full.detach().contiguous()
        if source is not None:
            full = collectives.broadcast(full, axis, source=source, label=INIT)
        partition = Partition(full.numel(), axis.size)
        shard_S = take_shard(pad(full.reshape(-1), partition), partition, axis.rank).clone()
        return cls(full.shape, axis, shard_S, full.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """A parameter that was saved with its values is an ordinary one."""
        return nothing, ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def own(self) -> Tensor:
        """This rank's elements without padding (1-d), a view."""
        start, stop = Partition(self.numel, self.axis.size).bounds(self.axis.rank)
        return self.shard_S[: max(0, min(stop, self.numel) - start)]

    def start_gather(self) -> Pending:
        """Starts to make the padded values (P). *Collective:* every rank; each sends
        (W-1)/W · P elements.
        """
        return collectives.start_all_gather(
            self.shard_S.to(self.device), None, self.axis, label=INIT
        )

    def full(self, pending: Pending | None = None) -> Tensor:
        """The full values, from a gather that was started, or is now. *Collective*, as
        `start_gather`.
        """
        padded_P = (self.start_gather() if pending is None else pending).wait()
        return padded_P[: self.numel].view(self.shape)
