"""`StateFiles`: the files of one rank's state, which its handles
(`fzero.storage.file_tensor`) keep alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.plans.streaming import Streaming
from fzero.storage import ownership
from fzero.storage.file_store import FileStore
from fzero.storage.file_tensor import FileSpec, FileTensor, StoreError, bare
from fzero.storage.host_memory import bytes_of, check_host_memory
from fzero.storage.movers import FileMover, TensorRange
from fzero.storage.promised import RunningUpdate
from sharding.dtypes import itemsize
from sharding.views import torch_dtype

FilePlan = Mapping[str, tuple[str, FileSpec]]
"""The files of one rank's state, by name: the folder and the contents of each."""


class StateFiles:
    """The files of one rank's state, their movers, and their generation.

    Args:
        files: folder and contents of each file.
        sub_group_numel: elements of a sub-group.
        most: the most tensors in files of one sub-group, as `Streaming.num_buffers`
            counts them.
        extra: the most tensors in files of one sub-group that it does not count (new
            parameters beside their master).
        staged_nbytes: bytes of full shards in memory at once, in transfer.

    Raises:
        StoreError, MemoryError: the files cannot be made, or there is no room for the
            buffers; nothing is left.
    """

    def __init__(
        self,
        files: FilePlan,
        streaming: Streaming,
        *,
        sub_group_numel: int,
        most: int,
        extra: int = 0,
        staged_nbytes: int = 0,
        rank: int,
    ) -> None:
        self.plan, self.generation = files, 0
        self.update: RunningUpdate | None = None
        self._cause: BaseException | None = None
        self._movers: dict[str, FileMover] = {}
        self._room = _room(streaming, sub_group_numel, most, extra)
        by_path: dict[str, dict[str, FileSpec]] = {}
        for name, (path, spec) in files.items():
            by_path.setdefault(path, {})[name] = spec
        stores: list[FileStore] = []
        try:
            for path, specs in by_path.items():
                stores.append(
                    FileStore(
                        path,
                        specs,
                        rank=rank,
                        state=_free(path, rank),
                        num_threads=streaming.num_threads,
                        block_nbytes=streaming.block_nbytes,
                        checksums=streaming.checksums,
                        leftover=streaming.leftover,
                    )
                )
                nbytes = sub_group_numel * max(itemsize(spec.dtype) for spec in specs.values())
                self._movers[path] = FileMover(
                    stores[-1], num_buffers=self._room.num_buffers, buffer_nbytes=nbytes
                )
            check_host_memory(
                staged_nbytes,
                f"shards of {staged_nbytes:,} bytes on their way between files and a step",
            )
        except BaseException:
            for store in stores:
                store.close()
            raise

    def has_room(
        self, streaming: Streaming, *, sub_group_numel: int, most: int, extra: int
    ) -> bool:
        """Whether another step, with these arguments of the constructor, may stream
        through the buffers of these files.
        """
        asked = _room(streaming, sub_group_numel, most, extra)
        is_large = all(have >= need for have, need in zip(self._room, asked, strict=True))
        return is_large and self._room.checksums == asked.checksums

    def close(self) -> None:
        """Removes the files."""
        for mover in self._movers.values():
            mover.store.close()

    def mover(self, name: str) -> FileMover:
        """The mover of the file of that name."""
        return self._movers[self.plan[name][0]]

    def handle(self, name: str) -> FileTensor:
        """A handle to the file of that name, of the present generation."""
        spec = self.plan[name][1]
        return FileTensor(self, name, (spec.numel,), torch_dtype(spec.dtype), self.generation)

    def check(self) -> None:
        """Raises a StoreError if the contents of the files must not be used any more.

        The failure of an update that runs is not known to all ranks until they agree.
        """
        if self.update is None:
            for mover in self._movers.values():
                mover.store.check()

    def wait(self, name: str | None = None) -> None:
        """Waits until the running update has written a file, or has ended."""
        if self.update is not None and name is not None:
            self.update.wait(name)
        elif self.update is not None:
            self.update.rest()

    def is_written(self, name: str) -> bool:
        """Whether the running update may still write a file."""
        return self.update is not None and self.update.is_running(name)

    @property
    def cause(self) -> BaseException | None:
        """Why these files cannot be used any more, to be raised; None while they are
        good. Includes failures not yet awaited; waits for a running update.
        """
        self.wait()
        if self._cause is not None:
            return bare(self._cause) if isinstance(self._cause, StoreError) else self._cause
        return next(
            (x.store.cause for x in self._movers.values() if x.store.cause is not None), None
        )

    def rest(self) -> None:
        """Waits for all reads and writes under way. A failure becomes the `cause`, and
        raises nothing here.
        """
        self.wait()
        for mover in self._movers.values():
            mover.store.rest()

    def fail(self, cause: BaseException) -> None:
        """Marks the files as failed. The first cause counts; one that is no StoreError
        is kept itself until `fail_by_message`.
        """
        self._cause = self._cause or (bare(cause) if isinstance(cause, StoreError) else cause)
        for mover in self._movers.values():
            mover.fail(cause)

    def fail_by_message(self, cause: BaseException) -> None:
        """As `fail`, for a cause that is being raised: keeps only its message, so that
        its traceback can be freed.
        """
        self._cause = bare(self._cause or cause)
        self.fail(cause)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        """Starts to read one tensor of a sub-group, if there is room for it; an error
        breaks the files.
        """
        self.wait()
        try:
            self.mover(name).prefetch(TensorRange(name, start, stop))
        except StoreError as error:
            self.fail(error)

    def start_read(self, name: str, flat: Tensor) -> Callable[[], object]:
        """Starts to fill a tensor of `host_memory.paged` with a full file; the returned
        function waits, and raises errors.
        """
        self.wait(name)
        return self.mover(name).store.read(name, 0, flat.numel(), bytes_of(flat))

    def start_write(self, name: str, flat: Tensor) -> Callable[[], object]:
        """Starts to write such a tensor, which must not change until the end. Returns
        and raises as `start_read`.
        """
        self.wait()
        mover = self.mover(name)
        mover.forget(TensorRange(name, 0, flat.numel()))
        return mover.store.write(name, 0, flat.numel(), bytes_of(flat))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a file, at any positions, in new memory on the CPU."""
        self.wait()
        out = torch.empty(max(stop - start, 0), dtype=torch_dtype(self.plan[name][1].dtype))
        with self._aligned(name, start, stop) as ranges:
            for begin, end, buffer in ranges:
                found = self.mover(name).store.read(name, begin, end, buffer)()
                first, last = max(begin, start), min(end, stop)
                out[first - start : last - start].copy_(found[first - begin : last - begin])
        return out

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Writes elements from `start` on, at any position, and returns when they are
        in the file; others are unchanged.
        """
        self.wait()
        store, stop = self.mover(name).store, start + values.numel()
        self.mover(name).forget(TensorRange(name, start, stop))
        with self._aligned(name, start, stop) as ranges:
            for begin, end, buffer in ranges:
                first, last = max(begin, start), min(end, stop)
                is_whole = (first, last) == (begin, end)
                found = (
                    store.view(name, begin, end, buffer)
                    if is_whole
                    else store.read(name, begin, end, buffer)()
                )
                found[first - begin : last - begin].copy_(values[first - start : last - start])
                store.write(name, begin, end, buffer)()

    @contextmanager
    def _aligned(
        self, name: str, start: int, stop: int
    ) -> Iterator[Iterator[tuple[int, int, Tensor]]]:
        """The aligned ranges (start, stop) that cover elements [start, stop), each with
        the buffer that all of them share.
        """
        mover, spec = self.mover(name), self.plan[name][1]
        unit = mover.store.grain // itemsize(spec.dtype)
        step = mover.pool.nbytes // mover.store.grain * unit
        begin, end = start // unit * unit, min(-(-stop // unit) * unit, spec.numel)
        buffer = mover.take()
        try:
            yield (
                (at, min(at + step, end), buffer)
                for at in range(begin, end if stop > start else begin, step)
            )
        finally:
            mover.pool.give_back(buffer)


class _Room(NamedTuple):
    """The buffers of files, and whether their blocks have checksums, which restrict
    where sub-groups may begin.
    """

    num_buffers: int
    sub_group_numel: int
    checksums: bool


def _room(streaming: Streaming, sub_group_numel: int, most: int, extra: int) -> _Room:
    alone = 1 + sum(streaming.ahead(most).values())  # buffers for one tensor that moves alone
    return _Room(
        max(streaming.num_pooled(most, extra), alone), sub_group_numel, streaming.checksums
    )


def _free(path: str, rank: int) -> int:
    """The index of a new state at the path: the first without a folder of this process."""
    return next(
        number
        for number in count()
        if not ownership.is_mine(ownership.folder_of(path, rank, number))
    )
