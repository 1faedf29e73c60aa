"""`analyze`: numbers of every sample of a dataset, by workers that load and measure
batches; `measure` is its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from fzero.data.metrics import Metric

__all__ = ["analyze", "measure"]

Progress = Callable[[int, int], None]
Array = NDArray[Any]


@dataclass(frozen=True)
class _Measured:
    """Collates samples, and measures the batch; runs in the workers."""

    functions: tuple[Callable[[Any], Any], ...]
    collate_fn: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> tuple[int, list[Array | None]]:
        batch = self.collate_fn(samples)
        return len(samples), [_array(function(batch)) for function in self.functions]


def _array(value: Any) -> Array | None:
    if value is None:
        return None
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def measure(
    dataset: Dataset[Any],
    functions: Sequence[Callable[[Any], Any]],
    *,
    indices: Sequence[int],
    batch_size: int = 1,
    workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, list[Array | None]]]:
    """The number of samples of each batch, and what the functions give for it.

    Args:
        functions: the functions of a collated batch; they run where the batch is
            loaded.
        indices: the samples, in this order.
        workers: processes that load and measure; 0 is this one.
        progress: `progress(done, of)` is called after each batch.
    """
    batches = [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    measured = _Measured(tuple(functions), collate_fn or default_collate)
    done = 0
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=measured,
    )
    for num, values in loader:
        done += num
        yield num, values
        if progress is not None:
            progress(done, len(indices))


def analyze(
    dataset: Dataset[Any],
    functions: Mapping[str, Callable[[Any], Any]],
    *,
    batch_size: int = 1,
    workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Metric]:
    """The metrics of a dataset by name, for a `CurriculumSampler`;
    `fzero.data.write_metric` writes their files.

    Args:
        functions: each gives, for a collated batch, one whole number per sample (B,).
        batch_size, workers, collate_fn, progress: see `measure`.

    Raises:
        ValueError: the dataset is empty, or a function gives another number of values,
            or values that are not whole.

    >>> analyze(
    ...     [[1, 2], [3], []], {"length": lambda batch: [len(x) for x in batch]}, collate_fn=list
    ... )["length"].order.tolist()
    [2, 1, 0]
    """
    num = len(dataset)  # type: ignore[arg-type]
    if not num:
        raise ValueError("analyze: the dataset must have samples, and is empty; pass another")
    found: dict[str, list[Array]] = {name: [] for name in functions}
    how: dict[str, Any] = {
        "batch_size": batch_size,
        "workers": workers,
        "collate_fn": collate_fn,
        "progress": progress,
    }
    for size, values in measure(dataset, list(functions.values()), indices=range(num), **how):
        for name, own in zip(functions, values, strict=True):
            found[name].append(checked(name, own, size))
    return {name: Metric.of(np.concatenate(own)) for name, own in found.items()}


def checked(name: str, values: Array | None, size: int) -> Array:
    """The values of a batch (size,).

    Raises:
        ValueError: they are not one whole number per sample.
    """
    given = "None" if values is None else f"{values.dtype} of shape {values.shape}"
    if values is None or values.size != size or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"analyzer: metric {name!r} must give one whole number for each of the {size} samples "
            f"of a batch, got {given}; return a tensor (batch,), rounded"
        )
    return values.reshape(-1)
