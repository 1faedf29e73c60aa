"""`CurriculumLoader`: this rank's micro-batches of a dataset, in the order of a
`CurriculumSampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset

from fzero.data.sampler import CurriculumSampler

__all__ = ["CurriculumLoader"]


class CurriculumLoader:
    """The micro-batches of one rank, batch after batch, until `num_epochs` times as
    many samples are drawn as the dataset has.

    Rank r takes the r-th part of each batch of all ranks, and cuts that into its
    micro-batches. So the samples of a batch do not depend on the number of ranks.

    Args:
        dataset: with a length and indices.
        sampler: gives the indices of batches.
        batch_size: samples of one micro-batch on one rank.
        num_micro: micro-batches of one batch on one rank.
        rank, world_size: select this rank's part.
        post_process: `post_process(batch, sampler_state)` gives the batch that the
            loader yields; `sampler_state["current_difficulties"]` holds the difficulty
            of each metric.
        collate_fn, num_workers, pin_memory: as for `torch.utils.data.DataLoader`.

    Raises:
        ValueError: a number is out of range, the sampler is of another dataset, or
            there is not one whole batch.

    Attributes:
        sampler: may be replaced between two batches.
        num_given: the number of micro-batches that have been yielded.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: CurriculumSampler,
        *,
        batch_size: int,
        num_micro: int = 1,
        rank: int = 0,
        world_size: int = 1,
        num_epochs: int = 1,
        post_process: Callable[[Any, Mapping[str, Any]], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.sampler, self.post_process_func = dataset, sampler, post_process
        self.batch_size, self.num_micro, self.rank, self.world_size = (
            batch_size,
            num_micro,
            rank,
            world_size,
        )
        self.num_epochs, self.num_given = num_epochs, 0
        self._how = {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}
        self._check()

    def _check(self) -> None:
        for name in ("batch_size", "num_micro", "num_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"CurriculumLoader: {name} must be at least 1, got {getattr(self, name)}; "
                    f"raise it"
                )
        if self.rank not in range(self.world_size):
            raise ValueError(
                f"CurriculumLoader: rank must be of 0 … {self.world_size - 1}, got {self.rank}; "
                f"pass this process's rank among the world_size ranks that share a batch"
            )
        if (num := len(self.dataset)) != self.sampler.num_samples:  # type: ignore[arg-type]
            raise ValueError(
                f"CurriculumLoader: sampler must be of the dataset's {num} samples, got one of "
                f"{self.sampler.num_samples}; make it with len(dataset)"
            )
        if not len(self):
            raise ValueError(
                f"CurriculumLoader: the dataset must fill a batch of {self.global_batch_size} "
                f"samples on all ranks, and has {num} in {self.num_epochs} epochs; give more "
                f"samples, or a smaller batch"
            )

    @property
    def data_sampler(self) -> CurriculumSampler:
        """DeepSpeed's name of `sampler`."""
        return self.sampler

    @property
    def global_batch_size(self) -> int:
        """Samples of one batch on all ranks."""
        return self.batch_size * self.num_micro * self.world_size

    def __len__(self) -> int:
        """Micro-batches of a rank in all epochs."""
        return self.sampler.num_samples * self.num_epochs // self.global_batch_size * self.num_micro

    def indices(self, micro: int) -> list[int]:
        """The samples of this rank's micro-batch with a number, counted from 0."""
        batch, part = divmod(micro, self.num_micro)
        start = (self.rank * self.num_micro + part) * self.batch_size
        found: list[int] = self.sampler(batch, size=self.global_batch_size)[
            start : start + self.batch_size
        ].tolist()
        return found

    def __iter__(self) -> Iterator[Any]:
        """The rest of the micro-batches; after the last one it begins anew."""
        if self.num_given >= len(self):
            self.num_given = 0
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=_Numbered(self),
            **self._how,  # type: ignore[arg-type]
        )
        for batch in loader:
            state = self.sampler_state()
            self.num_given += 1
            yield batch if self.post_process_func is None else self.post_process_func(batch, state)

    def sampler_state(self) -> dict[str, Any]:
        """What DeepSpeed's sampler has as its state, as far as it has a meaning here:
        of the next micro-batch.
        """
        batch = self.num_given // self.num_micro
        return {
            "curriculum_step": batch + 1,
            "current_difficulties": self.sampler.difficulties(batch),
            "consumed_samples": self.num_given * self.batch_size * self.world_size,
        }

    def state_dict(self) -> dict[str, int]:
        """The position, the same on all ranks: finished batches, micro-batches of the
        next one, and the size of a batch.
        """
        batch, micro = divmod(self.num_given, self.num_micro)
        size = {"size": self.global_batch_size, "num_micro": self.num_micro}
        return {"batch": batch, "micro": micro, **size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from the position of another loader, on any number of ranks.

        Raises:
            ValueError: the batches have another size, or the position is inside a batch
                that other ranks have divided.
        """
        if state.get("size") != self.global_batch_size:
            raise ValueError(
                f"training_data: must resume with batches of the same size on all ranks together, "
                f"got {self.global_batch_size} and a checkpoint of "
                f"{state.get('size', 'another loader')}; keep train_batch_size and data_efficiency"
            )
        if state["micro"] and state["num_micro"] != self.num_micro:
            raise ValueError(
                f"training_data: must resume at the beginning of a batch where its micro-batches "
                f"are others, and the checkpoint was saved after {state['micro']} of "
                f"{state['num_micro']}; save after an update"
            )
        self.num_given = state["batch"] * self.num_micro + state["micro"]


class _Numbered:
    """The indices of the micro-batches that are left, made when they are asked for."""

    def __init__(self, loader: CurriculumLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader) - self._loader.num_given

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._loader.indices, range(self._loader.num_given, len(self._loader)))
