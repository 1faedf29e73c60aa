"""`FileStore`: flat tensors in files, read and written at the speed of the disk, with
one rule for failures.

A store has one file per flat tensor, in a folder per rank. Files get their full length
when the store is made, so that a disk that is too small raises then. Elements [start,
stop) move in blocks between a file and a buffer of the caller's, on threads that
release the GIL (`fzero.storage.direct_io`). Transfers begin at multiples of `grain`
bytes, and files are padded to one.

**After a failure the store cannot be used.** An update of many blocks that fails midway
leaves new numbers beside old ones. The store keeps one generation of each file: a
second one would double the disk, and would not save a run whose parameters elsewhere
have been updated. So the first failure of a read or a write *breaks* the store: every
later read, write and `fence` raises with the first cause, and the way on is to load a
checkpoint into a new store. `fence` also reports a failed write that the caller did not
wait for; an update calls it before the state counts as updated.

The files are scratch, like memory: `close` and the end of the process remove them. A
killed process leaves them, and the next one refuses or removes them
(`fzero.storage.ownership`). A file that another process deletes still works, because it
is open; a truncated one raises at the next access.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

import torch
from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.storage import ownership
from fzero.storage.direct_io import CHECKED, SECTOR, DirectFile
from fzero.storage.file_tensor import FileSpec, StoreError, bare
from fzero.storage.ownership import folder_of
from fzero.storage.pages import PAGE
from sharding.dtypes import itemsize
from sharding.views import torch_dtype


@dataclass(slots=True)
class _Health:
    """Whether and why a store is broken. Threads refer to this and not to the store, so
    that the store can be collected.
    """

    folder: Path
    cause: StoreError | None = None
    """Never raised itself: see `bare`."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        if self.cause is not None:
            raise StoreError(
                f"{self.folder}: cannot be used any more since: {self.cause}"
            ) from self.cause

    def fail(self, cause: BaseException) -> None:
        with self._lock:
            self.cause = self.cause or bare(cause)

    def attempt(self, path: Path, at: int, nbytes: int, work: Callable[[], None]) -> None:
        """Runs `work`, or raises if something failed before; the first failure breaks
        the store.
        """
        self.check()
        try:
            work()
        except BaseException as error:
            failure = StoreError(
                f"{path}, bytes {at} to {at + nbytes}: must be read and written in full, got: "
                f"{error}. The state is part old and part new; repair the disk or the path and go "
                f"on from a checkpoint"
            )
            self.fail(failure)
            raise failure from error


class FileStore:
    """Files of flat tensors, made and filled with zeros.

    Args:
        path: a folder on the disk to use; the files are in a sub-folder of this rank.
        files: the contents of each file, by any name (`"blocks.0/float32/exp_avg"`).
        state: the index of the state, where this process has several at the path.
        num_threads: how many blocks move at once.
        block_nbytes: the most bytes that one system call moves.
        checksums: whether every `CHECKED` bytes read are compared with the bytes
            written (CRC-32).
        leftover: what to do with files under the path from processes that have ended.

    Raises:
        StoreError: the folder cannot be made or written to or is in use, files are left
            under the path and `leftover` is "refuse", or the disk is too small: then
            nothing of this store is left there.

    >>> import tempfile
    >>> from fzero.storage.host_memory import Pool
    >>> buffer = Pool(1, 1 << 16).take()
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     FileStore(folder, {"exp_avg": FileSpec(5000, "float32")}) as store,
    ... ):
    ...     _ = buffer.view(torch.float32).fill_(0.5)
    ...     wait_for_write = store.write("exp_avg", 1024, 5000, buffer)
    ...     store.fence()
    ...     store.read("exp_avg", 0, 3072, buffer)()[1022:1026]
    tensor([0.0000, 0.0000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        path: str | Path,
        files: Mapping[str, FileSpec],
        *,
        rank: int = 0,
        state: int = 0,
        num_threads: int = 8,
        block_nbytes: int = 1 << 22,
        checksums: bool = False,
        leftover: Literal["refuse", "clean"] = "refuse",
    ) -> None:
        if num_threads < 1 or block_nbytes < 1:
            raise ValueError(
                f"FileStore: num_threads and block_nbytes must be at least 1, got {num_threads} "
                f"and {block_nbytes}"
            )
        # the process may change its working directory before the files are removed
        path = Path(path).absolute()
        self.folder = folder_of(path, rank, state)
        self.grain = CHECKED if checksums else SECTOR
        self.block_nbytes = _up(block_nbytes, self.grain)
        self._health = _Health(self.folder)
        self._moving: set[Future[None]] = set()
        self._specs = dict(files)
        self._files: dict[str, DirectFile] = {}
        try:
            claim = ownership.claim(path, self.folder, leftover)
        except OSError as error:
            raise StoreError(_unusable(Path(error.filename or self.folder), error)) from error
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="fzero-files")
        # Also at the end of the interpreter, but not of a process that was forked from this one.
        release = partial(ownership.release, path, self.folder, claim)
        self._end = weakref.finalize(self, _end, os.getpid(), self._threads, self._files, release)
        try:
            for name, spec in files.items():
                file, nbytes = self.folder / _file_name(name), _up(spec.nbytes, self.grain)
                self._files[name] = DirectFile(file, nbytes, checksums=checksums)
        except OSError as error:
            self.close()
            needed = sum(_up(spec.nbytes, self.grain) for spec in files.values())
            raise StoreError(_unusable(self.folder, error, needed)) from error
        self.is_direct = all(file.is_direct or not file.nbytes for file in self._files.values())
        if not self.is_direct:
            warnings.warn(
                f"{self.folder}: its filesystem has no direct I/O, so bytes go through the page "
                f"cache and each fence waits for the disk; this is correct but slower. Put the "
                f"path on a local disk",
                stacklevel=2,
            )

    def read(self, name: str, start: int, stop: int, buffer: Tensor) -> Callable[[], Tensor]:
        """Starts to read elements [start, stop) into a buffer. Returns a function that
        waits, and returns them as a view of it.

        Args:
            start, stop: in bytes, multiples of `grain`; `stop` may also be the file's
                end.
            buffer: bytes (uint8), contiguous, page-aligned, at least as many as the
                elements have, rounded up to `grain`.

        Raises:
            StoreError: from the function that waits, or at once if the store is broken.
            ValueError: an argument breaks these rules.
        """
        return self._move("read", name, start, stop, buffer)

    def write(self, name: str, start: int, stop: int, buffer: Tensor) -> Callable[[], Tensor]:
        """Starts to write elements [start, stop) from the beginning of a buffer, which
        must not change until the wait is over.

        Arguments, result and errors are those of `read`.
        """
        return self._move("write", name, start, stop, buffer)

    def fence(self) -> None:
        """Waits for all reads and writes under way. Raises a StoreError if anything
        failed since the store was made.
        """
        self.rest()
        for file in self._files.values():
            if self._health.cause is None:
                self._health.attempt(file.path, 0, file.nbytes, file.settle)
        self.check()

    def fail(self, cause: BaseException) -> None:
        """Breaks the store, whose contents must not be used any more. Waits until no
        buffer is in use.
        """
        self._health.fail(cause)
        self.rest()

    @property
    def cause(self) -> StoreError | None:
        """The failure that broke the store, to be raised; None while it is good."""
        return None if self._health.cause is None else bare(self._health.cause)

    def rest(self) -> None:
        """Waits for all reads and writes under way. A failure breaks the store, and
        raises nothing here.
        """
        wait(list(self._moving))

    def close(self) -> None:
        """Removes the files. The store cannot be used any more."""
        self.fail(StoreError("it was closed"))
        self._end()
        self._threads.shutdown()  # so that no thread has a file open

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(
        self, verb: Literal["read", "write"], name: str, start: int, stop: int, buffer: Tensor
    ) -> Callable[[], Tensor]:
        self.check()
        nbytes = self.nbytes(name, start, stop)
        is_bytes = buffer.dtype == torch.uint8 and buffer.is_contiguous()
        if not is_bytes or buffer.data_ptr() % PAGE or len(buffer) < nbytes:
            raise ValueError(
                f"{name}: the buffer must be {nbytes} bytes or more, contiguous and from a memory "
                f"page on, got {tuple(buffer.shape)} of {buffer.dtype}; take it from a Pool"
            )
        file, begin = self._files[name], start * itemsize(self._specs[name].dtype)
        memory = buffer.numpy().data[:nbytes]
        futures = []
        for at in range(0, nbytes, self.block_nbytes):
            block = memory[at : at + self.block_nbytes]
            work = partial(_move_block, verb, name, file, begin + at, block)
            future = self._threads.submit(
                self._health.attempt, file.path, begin + at, len(block), work
            )
            self._moving.add(future)
            future.add_done_callback(self._moving.discard)
            futures.append(future)

        def finish() -> Tensor:
            # all of them, before one that has failed lets the caller have the buffer back
            wait(futures)
            for future in futures:
                if error := future.exception():
                    # Not the error itself: a thread may still refer to it, and its traceback keeps
                    # tensors alive.
                    raise bare(error) from error.__cause__
            return self.view(name, start, stop, buffer)

        return finish

    def view(self, name: str, start: int, stop: int, buffer: Tensor) -> Tensor:
        """The view of a buffer that elements [start, stop) of a file occupy in a read
        or write.
        """
        dtype = self._specs[name].dtype
        return buffer[: (stop - start) * itemsize(dtype)].view(torch_dtype(dtype))

    def nbytes(self, name: str, start: int, stop: int) -> int:
        """The bytes that elements [start, stop) occupy in a buffer, rounded up to
        `grain`.

        Raises:
            ValueError: `read` does not allow these elements, or there is no such file.
        """
        if name not in self._specs:
            raise ValueError(
                f"{name}: must be one of the {len(self._specs)} files of the store; make the store "
                f"with it"
            )
        size, numel = itemsize(self._specs[name].dtype), self._specs[name].numel
        unit = self.grain // size
        if not 0 <= start <= stop <= numel or start % unit or (stop % unit and stop != numel):
            raise ValueError(
                f"{name}: start and stop must be multiples of {unit} elements in order within 0 "
                f"and {numel}, the end of the file, got {start} and {stop}; choose sub-groups of a "
                f"multiple of {unit}"
            )
        return _up((stop - start) * size, self.grain)

    def check(self) -> None:
        """Raises a StoreError if the store is broken or closed."""
        self._health.check()


def _move_block(
    verb: Literal["read", "write"], name: str, file: DirectFile, at: int, block: memoryview
) -> None:
    with profiler_range(verb, name):
        (file.read if verb == "read" else file.write)(at, block)


def _up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain


def _file_name(name: str) -> str:
    """A file name from a tensor's name; a long one is truncated and gets a checksum, so
    that names stay distinct.

    >>> _file_name("h.0/float32")
    'h.0%2Ffloat32.flat'
    """
    quoted = quote(name, safe=" []'")
    return (
        f"{quoted if len(quoted) < 200 else f'{quoted[:180]}-{zlib.crc32(name.encode()):08x}'}.flat"
    )


def _unusable(folder: Path, error: OSError, needed: int | None = None) -> str:
    if error.strerror is None:
        return str(error)
    if needed is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = {errno.EMFILE: "raise the limit of open files (ulimit -n)"}.get(error.errno or 0)
        return (
            f"{folder}: {error.strerror}; "
            f"{fix or 'pass a folder that this process may make and write to'}"
        )
    disk = os.statvfs(next(parent for parent in folder.parents if parent.exists()))
    return (
        f"{folder}: the files need {needed:,} bytes and {disk.f_bavail * disk.f_frsize:,} are free "
        f"({error.strerror}); free some, or pass a folder on another disk"
    )


def _end(
    pid: int, threads: ThreadPoolExecutor, files: dict[str, DirectFile], release: Callable[[], None]
) -> None:
    """Removes the files without waiting for a thread, because the garbage collector may
    call this at any point.
    """
    if os.getpid() == pid:
        threads.shutdown(wait=False, cancel_futures=True)
        files.clear()  # a read or write under way keeps its file open
        release()
