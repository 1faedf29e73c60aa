"""`Batches`: checks a rank's batch, cuts it into micro-batches and casts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch that a step expects on each rank.

    Args:
        world_size: number of ranks, for messages.
        num_micro_steps: micro-batches in a batch.
        micro_batch: samples of a micro-batch on each rank; None where nothing is configured.
        dtype: floating tensors are cast to it.
    """

    world_size: int
    num_micro_steps: int
    micro_batch: int | None
    dtype: torch.dtype | None

    def split(self, batch: Any) -> Iterator[Any]:
        """The micro-batches of a step: the next ones of an iterator, or equal parts of the leading dimension."""
        if isinstance(batch, Iterator):
            for index in range(self.num_micro_steps):
                try:
                    micro_batch = next(batch)
                except StopIteration:
                    raise ValueError(
                        f"batch: the iterator must give {self.num_micro_steps} micro-batches "
                        f"(gradient_accumulation_steps), ended after {index}; drop the last incomplete step"
                    ) from None
                self._check(micro_batch, self.micro_batch)
                yield micro_batch
            return
        if self.micro_batch is not None:
            self._check(batch, self.micro_batch * self.num_micro_steps)
        if self.num_micro_steps == 1:
            yield batch
            return
        leaves, treespec = optree.tree_flatten(plain(batch), none_is_leaf=True)
        for parts in zip(*map(self._parts, leaves), strict=True):
            yield treespec.unflatten(parts)

    def cast(self, batch: Any) -> Any:
        """The batch in the dtype that the configuration asks for."""
        if self.dtype is None:
            return batch
        return map_tensors(lambda x: x.to(self.dtype) if x.is_floating_point() else x, batch)

    def _parts(self, x: Any) -> Sequence[Any]:
        if x is None or isinstance(x, bool | int | float | str) or (isinstance(x, Tensor) and x.ndim == 0):
            return [x] * self.num_micro_steps
        if not isinstance(x, Tensor):
            raise ValueError(
                f"batch: a {type(x).__name__} cannot be divided into the {self.num_micro_steps} micro-batches "
                f"(gradient_accumulation_steps); pass tensors in tuples, lists and dicts, or an iterator of micro-batches"
            )
        if x.shape[0] % self.num_micro_steps:
            raise ValueError(
                f"batch: the leading dimension of every tensor must be a multiple of the {self.num_micro_steps} "
                f"micro-batches (gradient_accumulation_steps), got shape {tuple(x.shape)}; pass an iterator of micro-batches"
            )
        return x.chunk(self.num_micro_steps)

    def _check(self, batch: Any, expected: int | None) -> None:
        """Raises ValueError where all tensors have the same leading dimension, and it is not the configured one."""
        sizes = {x.shape[0] for x in optree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim > 0}
        if expected is not None and len(sizes) == 1 and sizes != {expected}:
            raise ValueError(
                f"batch: must hold {expected} samples on each rank (from train_batch_size, "
                f"train_micro_batch_size_per_gpu, gradient_accumulation_steps and {self.world_size} ranks), got "
                f"{sizes.pop()}; change the loader or the configuration"
            )


def map_tensors(function: Any, batch: Any) -> Any:
    """The batch with `function(x)` for each tensor x; other leaves are unchanged."""
    return optree.tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, plain(batch), none_is_leaf=True)


def without_memory(batch: Any, device: torch.device) -> Any:
    """The batch with empty tensors of the same shapes on `device`, for a `FakeTensorMode`."""
    return map_tensors(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), batch)


def plain(batch: Any) -> Any:
    """A mapping as a dict, because optree does not look into other mappings."""
    return dict(batch) if isinstance(batch, Mapping) else batch
