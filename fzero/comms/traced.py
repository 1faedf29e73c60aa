"""`TracedAxis`: the collectives as nodes of a captured graph.

The methods are traced into a graph and never run as Python. On gloo the nodes are
all-to-alls and a sum in rank order; on NCCL they are the backend's own collectives.

Shapes: P padded elements = W·S, S elements of a shard, W ranks.
"""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.comms.axes import AbstractAxis, ProcessAxis

_ops = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class TracedAxis:
    """A rank on an axis, described by values that a graph can hold: numbers and names."""

    size: int
    rank: int
    group_name: str
    is_nccl: bool
    name: str = "data"

    @classmethod
    def of(cls, axis: ProcessAxis | AbstractAxis, device: torch.device) -> Self:
        """The traced form of an axis."""
        if isinstance(axis, AbstractAxis):
            return cls(axis.size, axis.rank, axis.name, axis.backend == "nccl", axis.name)
        group = axis.group or (dist.group.WORLD if axis.size > 1 else None)
        return cls(
            axis.size,
            axis.rank,
            "" if group is None else group.group_name,
            device.type == "cuda",
            axis.name,
        )

    def all_gather(self, shard_S: Tensor) -> Tensor:
        """The shards of all ranks in rank order, S → P. *Collective:* sends (W-1)/W ·
        P.
        """
        if self.size == 1 or not shard_S.numel():
            return shard_S
        if self.is_nccl:
            return _wait(_ops.all_gather_into_tensor(shard_S, self.size, self.group_name))
        return self._all_to_all(shard_S.repeat(self.size))

    def reduce_scatter(self, full_P: Tensor) -> Tensor:
        """This rank's shard of the sum over ranks, P → S. *Collective:* sends (W-1)/W ·
        P.
        """
        if self.size == 1 or not full_P.numel():
            return full_P
        if self.is_nccl:
            return _wait(_ops.reduce_scatter_tensor(full_P, "sum", self.size, self.group_name))
        return in_order(torch.split(self._all_to_all(full_P), full_P.numel() // self.size))

    def all_reduce(self, full_P: Tensor) -> Tensor:
        """The sum over ranks, in rank order. *Collective:* sends 2(W-1)/W · P."""
        if self.size == 1 or not full_P.numel():
            return full_P
        if self.size == 2 or self.is_nccl:
            return _wait(_ops.all_reduce(full_P, "sum", self.group_name))
        return self.all_gather(self.reduce_scatter(full_P))

    def stack(self, x: Tensor) -> Tensor:
        """The small tensors of all ranks along a new first dimension. *Collective:*
        sends (W-1) · numel.
        """
        if self.size == 1:
            return x[None]
        rows = _wait(_ops.all_gather_into_tensor(x.reshape(-1), self.size, self.group_name))
        return rows.view(self.size, *x.shape)

    def all_to_all(self, rows_WN: Tensor) -> Tensor:
        """Rank r gets row r of every rank, in rank order. *Collective:* sends (W-1) ·
        N.
        """
        if self.size == 1 or not rows_WN.numel():
            return rows_WN
        return self._all_to_all(rows_WN.reshape(-1)).view(rows_WN.shape)

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """`sent[r]` elements for each rank r -> `received[r]` elements of each, in rank
        order. *Collective:* sends the elements that are not for this rank.
        """
        if self.size == 1:
            return x
        return _wait(_ops.all_to_all_single(x, received, sent, self.group_name))

    def _all_to_all(self, x: Tensor) -> Tensor:
        numels = [x.numel() // self.size] * self.size
        return _wait(_ops.all_to_all_single(x, numels, numels, self.group_name))


def in_order(summands: Sequence[Tensor]) -> Tensor:
    """The sum from the first summand to the last. If they are in rank order, it has the
    same bits as in a job of processes.
    """
    return functools.reduce(operator.add, summands)


def _wait(x: Tensor) -> Tensor:
    waited: Tensor = _ops.wait_tensor(x)
    return waited


def collective_that_raised(error: BaseException) -> str | None:
    """The name of the graph node that an error comes from, if the node is a collective
    or waits for one.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        operator = frame.f_locals.get("self")
        if getattr(operator, "namespace", None) == _ops.name:
            return str(operator._opname)  # type: ignore[union-attr]
    return None
