"""What stands in a state for a tensor that lives in a file?

A `FileTensor` is a small frozen value, a leaf of the state: which file, of which shape and dtype, and of which *generation*. A
step updates files where they are. So it gives a state with handles of the next generation, and those of the state that it was
given are *stale*: whoever reads one is told so. Handles keep their files alive: when the last one goes, the files do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor

from fzero import claims
from fzero.file_store import FileSpec, FileStore, StoreError, folder_of
from fzero.movers import FileMover
from fzero.placements import Streaming
from sharding.dtypes import itemsize
from sharding.views import dtype_name, torch_dtype

FilePlan = Mapping[str, tuple[str, FileSpec]]
"""The files of one rank's state: the folder of each, and what it holds, by name."""


class Files:
    """The files of one rank's state, what moves them, and their generation.

    Args:
        files: what there is.
        streaming: how it moves.
        sub_group_numel: elements of a sub-group.
        most: most tensors in files of one sub-group.
        rank: of this process.

    Raises:
        StoreError, MemoryError: the files cannot be made, or there is no room for the buffers; nothing is left.
    """

    def __init__(self, files: FilePlan, streaming: Streaming, *, sub_group_numel: int, most: int, rank: int) -> None:
        self.plan, self.generation = files, 0
        self.cause: BaseException | None = None
        self._movers: dict[str, FileMover] = {}
        by_path: dict[str, dict[str, FileSpec]] = {}
        for name, (path, spec) in files.items():
            by_path.setdefault(path, {})[name] = spec
        stores: list[FileStore] = []
        try:
            for path, specs in by_path.items():
                stores.append(
                    FileStore(
                        _free(path, rank), specs, rank=rank, num_threads=streaming.num_threads,
                        block_nbytes=streaming.block_nbytes, checksums=streaming.checksums, leftover=streaming.leftover,
                    )
                )  # fmt: skip
                num_buffers = most * (1 + sum(streaming.ahead(most).values()))
                nbytes = sub_group_numel * max(itemsize(spec.dtype) for spec in specs.values())
                self._movers[path] = FileMover(stores[-1], num_buffers=num_buffers, buffer_nbytes=nbytes)
        except BaseException:
            for store in stores:
                store.close()
            raise

    def close(self) -> None:
        """Removes the files."""
        for mover in self._movers.values():
            mover.store.close()

    def mover(self, name: str) -> FileMover:
        """What moves the file of that name."""
        return self._movers[self.plan[name][0]]

    def handle(self, name: str) -> FileTensor:
        """The tensor in the file of that name, as it is now."""
        spec = self.plan[name][1]
        return FileTensor(self, name, (spec.numel,), torch_dtype(spec.dtype), self.generation)

    def check(self) -> None:
        """Raises a StoreError if what the files hold is no state to go on with."""
        for mover in self._movers.values():
            mover.store.check()

    def fail(self, cause: BaseException) -> None:
        """Nothing of this can be used any more. The first cause counts."""
        self.cause = self.cause or cause
        for mover in self._movers.values():
            mover.fail(cause)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a file, any of them, in new memory on the CPU."""
        mover, spec = self.mover(name), self.plan[name][1]
        unit = mover.store.grain // itemsize(spec.dtype)
        step = mover.pool.nbytes // mover.store.grain * unit
        out, done = torch.empty(max(stop - start, 0), dtype=torch_dtype(spec.dtype)), start
        buffer = mover.pool.take()
        try:
            while done < stop:
                begin = done // unit * unit
                end = min(-(-stop // unit) * unit, begin + step, spec.numel)
                found = mover.store.read(name, begin, end, buffer)()
                until = min(end, stop)
                out[done - start : until - start].copy_(found[done - begin : until - begin])
                done = until
        finally:
            mover.pool.give_back(buffer)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A flat tensor of one rank's state that lives in a file.

    `handle[start:stop]` and `handle[:]` read elements into a tensor on the CPU.

    Attributes:
        files: all files of this state.
        name: which of them.
        shape, dtype: of the tensor.
        generation: how often the files had been updated when this handle was made.
    """

    files: Files
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    generation: int

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def path(self) -> Path:
        """The folder of the file."""
        return self.files.mover(self.name).store.folder

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.dtype.itemsize

    def numel(self) -> int:
        return self.shape[0]

    def __getitem__(self, elements: slice) -> Tensor:
        self.check()
        start, stop, _ = elements.indices(self.shape[0])
        return self.files.read(self.name, start, stop)

    def check(self) -> None:
        """Raises a StoreError unless the file holds this tensor: nothing has updated it, and nothing failed."""
        self.files.check()
        if self.generation != self.files.generation:
            raise StoreError(
                f"{self.name}: this state is stale, for a step took it and updated the files of {self.path} (generation "
                f"{self.generation} of {self.files.generation}); go on with the state that the step gave"
            )

    def __repr__(self) -> str:
        return f"FileTensor({self.name!r}, {dtype_name(self.dtype)}, {self.shape[0]:,} elements in {self.path})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.name}: lives in a file of {self.path} and is neither copied nor pickled; bring the state into memory with "
            f"fzero.place(state, step) and a step without offload"
        )


@dataclass(frozen=True, slots=True, eq=False)
class FileTensors:
    """The handles of all ranks of a simulation, in rank order: where other tensors have a leading dimension of ranks."""

    of_ranks: tuple[FileTensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.of_ranks[0].dtype

    @property
    def ndim(self) -> int:
        return 2

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.of_ranks), *self.of_ranks[0].shape)

    def __getitem__(self, rank: int) -> FileTensor:
        return self.of_ranks[rank]


def in_memory(tree: Any) -> Any:
    """The tree with tensors on the CPU in place of handles: a copy of what the files hold now. Others stay as they are."""

    def one(x: Any) -> Any:
        if isinstance(x, FileTensors):
            return torch.stack([handle[:] for handle in x.of_ranks])
        return x[:] if isinstance(x, FileTensor) else x

    return optree.tree_map(one, tree)


def handles_of(tree: Any) -> list[FileTensor]:
    """The handles among the leaves."""
    return [x for x in optree.tree_leaves(tree) if isinstance(x, FileTensor)]


def renewed(tree: Any) -> Any:
    """The tree with handles of what the files hold now."""
    return optree.tree_map(
        lambda x: replace(x, generation=x.files.generation) if isinstance(x, FileTensor) else x, tree
    )


def _free(path: str, rank: int) -> Path:
    """The folder, or one in it for a further state, where this process has one in that already."""
    folders = (Path(path) / f"state{number}" if number else Path(path) for number in count())
    return next(folder for folder in folders if not claims.is_mine(folder_of(folder, rank)))
