"""`deepspeed.runtime.data_pipeline.data_sampling.data_analyzer`: metrics of a dataset,
as DeepSpeed's files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fzero.common.arguments import passed_on
from fzero.config.config import ConfigError
from fzero.data.analyzer import checked, measure
from fzero.data.index_files import fitting_dtype, read_rows, write_metric, write_rows
from fzero.data.metrics import Metric
from fzero.deepspeed import comm
from fzero.deepspeed.utils.logging import logger

__all__ = ["DataAnalyzer", "DistributedDataAnalyzer"]

MetricType = Literal["single_value_per_sample", "accumulate_value_over_samples"]


class DataAnalyzer:
    """Measures a dataset with `num_workers` jobs (`run_map`), and joins their files
    (`run_reduce`).

    Args:
        dataset: with a length and indices.
        num_workers, worker_id: jobs that divide the dataset, each of which calls
            `run_map`, and the number of this one.
        num_threads: processes of a job.
        num_threads_reduce: has no effect: one job sorts.
        specific_threads: must be empty.
        batch_size, collate_fn: of the batches that metrics are computed of.
        metric_names, metric_functions, metric_types, metric_dtypes: of each metric. A
            function takes a batch; it gives one whole number per sample, or a vector
            that is added up. The dtypes have no effect: files have the smallest one
            that fits.
        save_path: the folder of the files, which all jobs see.
        custom_map_init, custom_map_update, custom_map_finalize, custom_reduce: must be
            None.
        sample_indices: the numbers of the samples, where the dataset's order is
            another; a batch with a field `index` has them itself.
    """

    comm_group: Any = None

    def __init__(
        self,
        dataset: Dataset[Any],
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[MetricType] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if (
            specific_threads
            or custom_map_init
            or custom_map_update
            or custom_map_finalize
            or custom_reduce
        ):
            raise ConfigError(
                "DataAnalyzer: specific_threads and custom functions must be left out, which here "
                "have no files to work on; give metric_functions, or use fzero.data.measure"
            )
        given = {
            "metric_names": metric_names,
            "metric_functions": metric_functions,
            "metric_types": metric_types,
        }
        if len({*map(len, given.values())}) > 1:
            counts = ", ".join(f"{name} {len(x)}" for name, x in given.items())
            raise ConfigError(
                f"DataAnalyzer: must have a name, a function and a type for each metric, got "
                f"{counts}"
            )
        if worker_id not in range(num_workers):
            raise ConfigError(
                f"DataAnalyzer: worker_id must be of 0 … {num_workers - 1}, got {worker_id}; pass "
                f"num_workers, too"
            )
        if not len(dataset):  # type: ignore[arg-type]
            raise ConfigError(
                "DataAnalyzer: the dataset must have samples, and is empty; pass another"
            )
        for kind in metric_types:
            if kind not in ("single_value_per_sample", "accumulate_value_over_samples"):
                raise ConfigError(
                    f"DataAnalyzer: metric_types must be 'single_value_per_sample' or "
                    f"'accumulate_value_over_samples', got {kind!r}"
                )
        self.dataset, self.num_workers, self.worker_id = dataset, num_workers, worker_id
        self.num_threads, self.batch_size, self.collate_fn = num_threads, batch_size, collate_fn
        self.metric_names, self.metric_functions = metric_names, metric_functions
        self.metric_types, self.sample_indices = metric_types, sample_indices
        self.save_path = Path(save_path)

    def run_map(self) -> None:
        """Measures this job's part of the dataset, and writes what it found."""
        num: int = len(self.dataset)  # type: ignore[arg-type]
        own = range(
            num * self.worker_id // self.num_workers, num * (self.worker_id + 1) // self.num_workers
        )
        found: list[list[NDArray[Any]]] = [[] for _ in self.metric_names]
        places: list[NDArray[Any]] = []
        stream = measure(
            self.dataset,
            [_index_of, *self.metric_functions],
            indices=own,
            batch_size=self.batch_size,
            workers=self.num_threads if self.num_threads > 1 else 0,
            collate_fn=self.collate_fn,
            progress=self._shows(),
        )
        done = own.start
        for size, (indices, *values) in stream:
            places.append(
                self._places(done, size) if indices is None else checked("index", indices, size)
            )
            done += size
            for into, name, kind, x in zip(
                found, self.metric_names, self.metric_types, values, strict=True
            ):
                if kind == "single_value_per_sample":
                    into.append(checked(name, x, size))
                elif x is not None:
                    into[:] = [into[0] + x if into else x]
        numbers = np.concatenate(places) if places else np.empty(0, np.int64)
        for into, name in zip(found, self.metric_names, strict=True):
            base = self._part(name, self.worker_id)
            row = np.concatenate([x.reshape(-1) for x in into]) if into else np.empty(0, np.int64)
            write_rows(f"{base}_values", row, [len(row)], np.int64)
            write_rows(f"{base}_samples", numbers, [len(numbers)], np.int64)

    def run_reduce(self) -> None:
        """Joins the files of all jobs into those of each metric."""
        for name, kind in zip(self.metric_names, self.metric_types, strict=True):
            bases = [self._part(name, worker) for worker in range(self.num_workers)]
            values = [read_rows(f"{base}_values").values for base in bases]
            if kind == "accumulate_value_over_samples":
                total = np.sum([x for x in values if len(x)], axis=0)
                dtype = fitting_dtype(int(total.min()), int(total.max()))
                write_rows(
                    self.save_path / name / f"{name}_metric_value", total, [len(total)], dtype
                )
                continue
            in_order, samples = (
                np.concatenate(values),
                np.concatenate([read_rows(f"{base}_samples").values for base in bases]),
            )
            if len(in_order) != len(self.dataset):  # type: ignore[arg-type]
                raise ConfigError(
                    f"DataAnalyzer: the jobs must have measured all {len(self.dataset)} "  # type: ignore[arg-type]
                    f"samples, and found {len(in_order)} for "
                    f"{name!r}; let each of the {self.num_workers} workers call run_map"
                )
            write_metric(self.save_path, name, _metric(in_order, samples), in_order=in_order)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Both, with a barrier before and after the second, which worker 0 does.

        *Collective:* every rank of `comm_group`, a process group; by default that of a
        `DistributedDataAnalyzer`, or all.
        """
        group = self.comm_group if comm_group is None else comm_group
        self.run_map()
        comm.barrier(group)
        if self.worker_id == 0:
            self.run_reduce()
        comm.barrier(group)

    def _places(self, start: int, size: int) -> NDArray[np.int64]:
        places = range(start, start + size)
        return np.array(
            places
            if self.sample_indices is None
            else [self.sample_indices[place] for place in places]
        )

    def _part(self, name: str, worker: int) -> Path:
        return self.save_path / name / f"worker{worker}" / name

    def _shows(self) -> Callable[[int, int], None]:
        """A function that logs every twentieth part."""

        def shows(done: int, of: int) -> None:
            if done * 20 // of > max(0, done - self.batch_size) * 20 // of:
                logger.info("worker %d: %d of %d samples", self.worker_id, done, of)

        return shows


class DistributedDataAnalyzer(DataAnalyzer):
    """The analyzer as one job of all ranks: each measures its part, and rank 0 joins
    their files.

    Args:
        device: has no effect: metrics are computed where their functions do it.
        comm_group: a process group, whose ranks are the workers; in place of
            `num_workers` and `worker_id`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[MetricType] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = "cuda",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        given = passed_on(locals())
        del given["device"], given["comm_group"]
        if comm_group is not None:
            given |= {"num_workers": comm_group.size(), "worker_id": comm_group.rank()}
        super().__init__(**given)
        self.comm_group = comm_group


def _metric(values: NDArray[Any], samples: NDArray[Any]) -> Metric:
    """The metric of samples with these numbers; equal values in the order in which they
    were measured.
    """
    metric = Metric.of(values)
    return Metric(samples[metric.order], metric.values, metric.stops)


def _index_of(batch: Any) -> Any:
    """The numbers of the samples, where a batch has them."""
    return (
        batch["index"].reshape(len(batch["index"]), -1)[:, 0]
        if isinstance(batch, dict) and "index" in batch
        else None
    )
