"""The analyzer's files of DeepSpeed, read and written: rows of integers in a pair
`PATH.idx` and `PATH.bin`.

`.bin` holds all rows one after the other. `.idx` holds: 9 bytes of a mark, the version
1 (u64), the code of the dtype (u8), the number of rows R and of document borders D (u64
each), the rows' lengths (int32, R), their byte offsets (int64, R), and the borders
(int64, D). It is Megatron's format of indexed datasets; the bytes are little-endian.

Of one metric there are `NAME_sample_to_metric` (a row for each sample),
`NAME_index_to_metric` (a row for each distinct value), `NAME_index_to_sample` (its
samples), and `NAME_index_to_sample_percentile_merged` (the same samples in about 100
rows).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fzero.common.safe_files import create
from fzero.data.metrics import Integers, Metric

__all__ = ["Rows", "fitting_dtype", "read_metric", "read_rows", "write_metric", "write_rows"]

_MARK = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint16,
    7: np.uint32,
    8: np.uint64,
}


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of integers: all values one after the other (a memory map), and each row's
    length.

    Attributes:
        values: the values of all rows.
        sizes: the sizes of each row.
    """

    values: Integers
    sizes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.sizes)

    def row(self, index: int) -> Integers:
        """One row; reads the lengths of those before it."""
        start = int(self.sizes[:index].sum(dtype=np.int64))
        return self.values[start : start + int(self.sizes[index])]


def fitting_dtype(smallest: int, largest: int) -> type[np.integer]:
    """The smallest dtype that holds both numbers, as DeepSpeed chooses it.

    >>> fitting_dtype(0, 300).__name__, fitting_dtype(-1, 300).__name__
    ('uint16', 'int16')
    """
    unsigned: list[type[np.integer]] = [np.uint8, np.uint16, np.uint32, np.uint64]
    signed: list[type[np.integer]] = [np.int8, np.int16, np.int32, np.int64]
    kinds = unsigned if smallest >= 0 else signed
    return next(
        kind for kind in kinds if np.iinfo(kind).min <= smallest and largest <= np.iinfo(kind).max
    )


def read_rows(path: str | Path) -> Rows:
    """The rows of a pair of files.

    Args:
        path: without suffix.

    Raises:
        ValueError: the files are missing, or are no such pair.
    """
    index, data = Path(f"{path}.idx"), Path(f"{path}.bin")
    if not (index.is_file() and data.is_file()):
        raise ValueError(
            f"index files: {index} and {data} must exist, and one does not; run the analyzer, or "
            f"give its path"
        )
    raw = index.read_bytes()
    start = len(_MARK) + _HEAD.size
    if not raw.startswith(_MARK) or len(raw) < start:
        raise ValueError(
            f"index files: {index} must begin with the mark of an indexed dataset, and does not; "
            f"give another path"
        )
    version, code, num_rows, num_borders = _HEAD.unpack(raw[len(_MARK) : start])
    if version != 1 or code not in _DTYPES or len(raw) != start + 12 * num_rows + 8 * num_borders:
        raise ValueError(
            f"index files: {index} must be whole and of version 1, and is not; run the analyzer "
            f"again"
        )
    sizes = np.frombuffer(raw, "<i4", num_rows, start)
    dtype, num = np.dtype(_DTYPES[code]), int(sizes.sum(dtype=np.int64))
    if data.stat().st_size < num * dtype.itemsize:
        raise ValueError(
            f"index files: {data} must hold {num} numbers of {dtype}, and is shorter; run the "
            f"analyzer again"
        )
    values = np.memmap(data, dtype, "r", shape=(num,)) if num else np.empty(0, dtype)
    return Rows(values, sizes)


def write_rows(
    path: str | Path, values: Integers, sizes: Sequence[int] | Integers, dtype: DTypeLike
) -> None:
    """Writes rows to `PATH.bin` and `PATH.idx`; files that are there are replaced.

    Args:
        values: the values of all rows, one after the other.
        sizes: the sizes of each row.
    """
    kind = np.dtype(dtype)
    code = next(code for code, known in _DTYPES.items() if np.dtype(known) == kind)
    lengths = np.asarray(sizes, np.int64)
    offsets = (np.cumsum(lengths) - lengths) * kind.itemsize
    head = _MARK + _HEAD.pack(1, code, len(lengths), 2)
    borders = np.array([0, len(lengths)], np.int64)
    index = (
        head
        + lengths.astype("<i4").tobytes()
        + offsets.astype("<i8").tobytes()
        + borders.astype("<i8").tobytes()
    )
    for suffix, content in (("bin", np.ascontiguousarray(values, kind).tobytes()), ("idx", index)):
        final = Path(f"{path}.{suffix}")
        final.parent.mkdir(parents=True, exist_ok=True)
        beside = final.with_name(f".{final.name}.new")
        with create(beside) as file:
            file.write(content)
        beside.replace(final)


def read_metric(index_to_sample: str | Path, index_to_metric: str | Path | None = None) -> Metric:
    """The metric of two pairs of files, as memory maps; without the second it knows
    percentiles only.
    """
    samples = read_rows(index_to_sample)
    if index_to_metric is None:
        return Metric(samples.values, np.empty(0, np.int64), np.empty(0, np.int64))
    values = read_rows(index_to_metric)
    if len(values) != len(samples):
        raise ValueError(
            f"index files: {index_to_metric} must have a value for each of the {len(samples)} rows "
            f"of {index_to_sample}, and has {len(values)}; give the files of one metric"
        )
    return Metric(
        samples.values, np.asarray(values.values), np.cumsum(samples.sizes, dtype=np.int64)
    )


def write_metric(
    folder: str | Path, name: str, metric: Metric, *, in_order: Integers | None = None
) -> Path:
    """Writes the four pairs of files of a metric into `FOLDER/NAME`, and returns the
    path of its files without their endings.

    Args:
        in_order: the values for `NAME_sample_to_metric`; None is the order of samples.
    """
    base = Path(folder) / name / name
    counts = np.diff(metric.stops, prepend=0)
    of_values = fitting_dtype(int(metric.values[0]), int(metric.values[-1]))
    of_samples = fitting_dtype(0, metric.num_samples - 1)
    values = metric.of_each_sample() if in_order is None else in_order
    write_rows(f"{base}_sample_to_metric", values, np.ones(len(values), np.int64), of_values)
    write_rows(f"{base}_index_to_metric", metric.values, np.ones(len(counts), np.int64), of_values)
    write_rows(f"{base}_index_to_sample", metric.order, counts, of_samples)
    together = max(1, len(counts) // 100)
    merged = np.add.reduceat(counts, np.arange(0, len(counts), together))
    write_rows(f"{base}_index_to_sample_percentile_merged", metric.order, merged, of_samples)
    return base
