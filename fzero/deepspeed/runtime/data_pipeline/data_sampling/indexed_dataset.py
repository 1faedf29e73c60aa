"""`deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset`: the analyzer's
files, as datasets of rows.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fzero.data.index_files import read_rows, write_rows

__all__ = ["MMapIndexedDataset", "MMapIndexedDatasetBuilder", "data_file_path", "index_file_path"]


def index_file_path(prefix_path: str) -> str:
    return f"{prefix_path}.idx"


def data_file_path(prefix_path: str) -> str:
    return f"{prefix_path}.bin"


class MMapIndexedDataset(Dataset[Any]):
    """The rows of a pair of files; the values are a memory map.

    Args:
        path: without suffix.
        skip_warmup: has no effect: nothing is read before its use.
    """

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        self.path, self.rows = path, read_rows(path)
        self._stops = np.cumsum(self.rows.sizes, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, idx: int | slice) -> Any:
        if isinstance(idx, slice):
            return [self[i] for i in range(*idx.indices(len(self)))]
        index = range(len(self))[idx]
        stop = int(self._stops[index])
        return self.rows.values[stop - int(self.rows.sizes[index]) : stop]

    @property
    def sizes(self) -> NDArray[np.int32]:
        return self.rows.sizes

    @property
    def dtype(self) -> Any:
        return self.rows.values.dtype.type

    @staticmethod
    def exists(path: str) -> bool:
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))


class MMapIndexedDatasetBuilder:
    """Collects rows, and writes them at the end.

    Args:
        out_file: the path of the file with the suffix `.bin`.
        dtype: of the values, of NumPy or torch.
    """

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        self._path = out_file.removesuffix(".bin")
        self._dtype = (
            torch.empty(0, dtype=dtype).numpy().dtype
            if isinstance(dtype, torch.dtype)
            else np.dtype(dtype)
        )
        self._rows: list[NDArray[Any]] = []

    def add_item(self, tensor: torch.Tensor) -> None:
        self.add_item_numpy(tensor.numpy())

    def add_item_numpy(self, np_array: NDArray[Any]) -> None:
        self._rows.append(np.asarray(np_array, self._dtype).reshape(-1))

    def add_items(self, arr_list: list[NDArray[Any]]) -> None:
        for row in arr_list:
            self.add_item_numpy(row)

    def end_document(self) -> None:
        """Has no effect: the rows are one document."""

    def finalize(self, index_file: str) -> None:
        """Writes both files.

        Args:
            index_file: must be the path of the `.bin` file with the suffix `.idx`.
        """
        if index_file.removesuffix(".idx") != self._path:
            raise ValueError(
                f"finalize: index_file must be {self._path}.idx, beside its .bin, got "
                f"{index_file!r}; pass that"
            )
        values = np.concatenate(self._rows) if self._rows else np.empty(0, self._dtype)
        write_rows(self._path, values, [len(row) for row in self._rows], self._dtype)
