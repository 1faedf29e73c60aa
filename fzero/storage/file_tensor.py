"""`FileTensor`: the leaf of a state for a tensor that lives in a file.

A step updates files in place. So it returns a state with handles of the next
*generation*, and the handles of the old state are *stale*: reading one raises. The
files are removed with the last handle (`fzero.storage.state_files`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import optree
import torch
from torch import Tensor

from sharding.dtypes import itemsize
from sharding.views import dtype_name

if TYPE_CHECKING:
    from fzero.storage.state_files import StateFiles

T = TypeVar("T")


class StoreError(RuntimeError):
    """A file cannot be made, read or written; the message has the file, the position,
    the rule and the fix.
    """


def bare(error: BaseException) -> StoreError:
    """The message of an error as a new error to store: the error's traceback would keep
    the tensors of a step alive.

    >>> bare(AssertionError())
    StoreError('AssertionError()')
    """
    return StoreError(str(error) or repr(error))


@dataclass(frozen=True, slots=True)
class FileSpec:
    """The number of elements in a file, and their dtype.

    >>> FileSpec(1000, "bfloat16").nbytes
    2000
    """

    numel: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A flat tensor of one rank's state in a file; `handle[start:stop]` and `handle[:]`
    read elements into a tensor on the CPU.

    Attributes:
        files: all files of this state.
        name: the name of this tensor's file.
        generation: the number of updates of the files when this handle was made.
    """

    files: StateFiles
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
        return self.part(elements)[:]

    def part(self, elements: slice) -> FilePart:
        """A handle to some of the elements; reads nothing."""
        return FilePart(self, 0, self.shape[0]).part(elements)

    def check(self) -> None:
        """Raises a StoreError unless the file holds this tensor: no step has updated
        it, and nothing failed.
        """
        self.files.check()
        self.check_age()

    def check_age(self) -> None:
        """Raises a StoreError, on every rank alike, if a step has updated the files
        since.
        """
        if self.generation != self.files.generation:
            raise StoreError(
                f"{self.name}: this state is stale, because a step took it and updated the files "
                f"of {self.path} (generation {self.generation} of {self.files.generation}); go on "
                f"with the state that the step returned"
            )

    def __repr__(self) -> str:
        return (
            f"FileTensor({self.name!r}, {dtype_name(self.dtype)}, {self.shape[0]:,} elements "
            f"in {self.path})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.name}: lives in a file of {self.path} and is neither copied nor pickled; move "
            f"the state into memory with fzero.place(state, step) and a step without offload"
        )


StoredTensor = Tensor | FileTensor
"""A flat tensor of a state, wherever it lives."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """Elements [start, stop) of a tensor in a file: `part[a:b]` reads some of them,
    `copy_` writes them all.
    """

    tensor: FileTensor
    start: int
    stop: int

    def numel(self) -> int:
        return self.stop - self.start

    @property
    def files(self) -> StateFiles:
        return self.tensor.files

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def part(self, elements: slice) -> FilePart:
        """Some of these elements."""
        start, stop, _ = elements.indices(self.numel())
        return FilePart(self.tensor, self.start + start, self.start + max(start, stop))

    def __getitem__(self, elements: slice) -> Tensor:
        self.tensor.check()
        part = self.part(elements)
        return self.files.read(self.tensor.name, part.start, part.stop)

    def copy_(self, values: Tensor) -> None:
        """Writes into the file; only allowed while a state is being made. Raises as
        `FileTensor.check` does.
        """
        self.tensor.check()
        self.tensor.files.write(self.tensor.name, self.start, values)


@dataclass(frozen=True, slots=True, eq=False)
class FileTensors:
    """The handles of all ranks of a simulation, in rank order; in-memory tensors have a
    leading dimension of ranks instead.
    """

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
    """The tree with handles replaced by tensors on the CPU, copies of the files'
    present contents. Other leaves are unchanged.
    """

    def one(x: Any) -> Any:
        if isinstance(x, FileTensors):
            return torch.stack([handle[:] for handle in x.of_ranks])
        return x[:] if isinstance(x, FileTensor | FilePart) else x

    return optree.tree_map(one, tree)


def kept(x: FileTensor | FilePart, work: Callable[[], T]) -> T | None:
    """The result of `work`; None where a file fails, which breaks the state of `x`: all
    ranks raise in `file_agreement.agree`.
    """
    try:
        return work()
    except StoreError as error:
        x.files.fail(error)
        return None


def handles_of(tree: Any) -> list[FileTensor]:
    """The handles among the leaves."""
    return [x for x in optree.tree_leaves(tree) if isinstance(x, FileTensor)]


def renewed(tree: Any) -> Any:
    """The tree with handles of the files' present generation."""
    return optree.tree_map(
        lambda x: replace(x, generation=x.files.generation) if isinstance(x, FileTensor) else x,
        tree,
    )
