"""`ResumableLoader`: torch's `DataLoader` and `DistributedSampler` with a position: an
epoch, and its batches so far.

To resume, indices are skipped; no skipped sample is loaded. The order of an epoch does
not depend on the number of ranks, so a job of another size can resume too, at the
beginning of any batch of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler


class EpochSampler(DistributedSampler[Any]):
    """torch's sampler, which knows whether a script has set its epoch."""

    is_set = False

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, whose order the next iteration draws. From here on only this
        call changes it.
        """
        super().set_epoch(epoch)
        self.is_set = True


class ResumableLoader:
    """This rank's batches of a dataset, epoch after epoch: each `iter` yields the rest
    of one epoch.

    A script may set the epoch, `loader.data_sampler.set_epoch(epoch)`. Then each epoch
    has the order that was set last.

    Args:
        dataset: with a length.
        batch_size: samples of one batch on one rank.
        rank, world_size: select this rank's part of each epoch.
        drop_last: whether a last batch that is not full is dropped. First, samples are
            repeated until all ranks have equally many; so an epoch has as many batches
            as DeepSpeed's.
        shuffle: whether each epoch has another order, which depends on `seed`.
        collate_fn, num_workers, pin_memory: as for `torch.utils.data.DataLoader`.

    Attributes:
        data_sampler: selects this rank's indices.
        epoch: the present epoch, or the next one.
        num_given: the number of its batches that have been yielded.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        check_indexed(dataset)
        self.dataset, self.batch_size, self.world_size = dataset, batch_size, world_size
        self.data_sampler = EpochSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed
        )
        self._batches = BatchSampler(self.data_sampler, batch_size, drop_last)
        self._how = {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}
        self.epoch, self.num_given = 0, 0

    def __len__(self) -> int:
        """Batches of a full epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        sampler, is_over = self.data_sampler, self.num_given >= len(self)
        following = sampler.epoch if sampler.is_set else self.epoch + is_over
        if is_over or following != self.epoch:
            self.epoch, self.num_given = following, 0
        sampler.epoch = self.epoch
        left = list(islice(self._batches, self.num_given, None))
        # Without its own generator a DataLoader advances the process's random state at each start,
        # so also on resuming.
        own = torch.Generator().manual_seed(sampler.seed + self.epoch)
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=left,
            generator=own,
            **self._how,  # type: ignore[arg-type]
        )
        for batch in loader:
            self.num_given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position, the same on all ranks: the epoch, and the number of its samples
        yielded on all ranks together.
        """
        return {"epoch": self.epoch, "samples": self.num_given * self.batch_size * self.world_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from the position of another loader of the same dataset.

        Raises:
            ValueError: that position is inside a batch of this loader.
        """
        if "samples" not in state:
            raise ValueError(
                "training_data: must resume the loader of the checkpoint, which "
                "data_efficiency.data_sampling made, and the block is off now; enable it"
            )
        samples, together = state["samples"], self.batch_size * self.world_size
        if samples % together:
            raise ValueError(
                f"training_data: must resume at the beginning of a batch of all ranks, a multiple "
                f"of {together} samples (batches of {self.batch_size} on {self.world_size} ranks), "
                f"got {samples}; choose another batch size or number of ranks"
            )
        self.epoch = self.data_sampler.epoch = state["epoch"]
        self.num_given = samples // together


def check_indexed(dataset: Dataset[Any]) -> None:
    """Raises for a dataset without length and indices."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"training_data: must be a dataset with a length and indices, got "
            f"{type(dataset).__name__}, which cannot be divided among ranks; make a DataLoader of "
            f"it that gives each rank its own samples, and leave training_data out"
        )


class RepeatingLoader:
    """A loader that restarts at its end, for scripts that count steps and not epochs.

    >>> batches = iter(RepeatingLoader([1, 2]))
    >>> [next(batches) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        for _ in range(2):
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = iter(self.loader)
        raise ValueError(
            "RepeatingLoader: the loader must yield at least one batch, and is empty; pass another"
        )
