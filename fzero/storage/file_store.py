"""Flat tensors that live in files: how are they read and written at the speed of the disk, and what if that fails?

A `FileStore` has one file for each flat tensor, in a folder for each rank. Files get their whole length when the store is made,
so that a disk that is too small is told then. Elements [start, stop) move between a file and a buffer of the caller's in blocks,
by threads that call `preadv` and `pwritev` (these let other Python threads run); nothing is allocated for them, and the page
cache is left alone (`fzero.storage.direct_io`). What moves begins at a multiple of `grain` bytes, and files are padded to one.

**After a failure nothing goes on.** An update of many blocks that fails midway leaves new numbers beside old ones. The store
keeps one generation of each file: a second one would double the disk, and would not save a run whose parameters elsewhere
have been updated. So the first failure, of a read or a write, *breaks* the store: every later read, write and `fence` raises
and tells the first cause, and what is left to do is to load a checkpoint into a new store. A write that was not waited for is
found by `fence`, which whoever updates calls before the state counts as updated.

The files are scratch, like memory: `close`, and the end of the process, removes them. A process that is killed leaves them, and
the next one refuses or removes them (`fzero.storage.ownership`). A file that somebody removes goes on working, for it is
open; one that is cut is told at the next access.
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
from fzero.storage import ownership as claims
from fzero.storage.direct_io import CHECKED, SECTOR, DirectFile
from fzero.storage.host_memory import PAGE
from fzero.storage.ownership import folder_of
from sharding.dtypes import itemsize
from sharding.views import torch_dtype


class StoreError(RuntimeError):
    """A file cannot be made, read or written; says which, where, what must hold, and what to do."""


def bare(error: BaseException) -> StoreError:
    """What an error says, to be kept: without the frames that it passed, which hold whatever a step worked on.

    >>> bare(AssertionError())
    StoreError('AssertionError()')
    """
    return StoreError(str(error) or repr(error))


@dataclass(frozen=True, slots=True)
class FileSpec:
    """How many elements a file holds, and of which dtype.

    >>> FileSpec(1000, "bfloat16").nbytes
    2000
    """

    numel: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.numel * itemsize(self.dtype)


@dataclass(slots=True)
class _Health:
    """What broke a store, if anything did. Threads hold this and not the store, which goes when its caller lets it go."""

    folder: Path
    cause: StoreError | None = None
    """Raised by nobody: see `bare`."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        if self.cause is not None:
            raise StoreError(f"{self.folder}: cannot be used any more since: {self.cause}") from self.cause

    def fail(self, cause: BaseException) -> None:
        with self._lock:
            self.cause = self.cause or bare(cause)

    def attempt(self, path: Path, at: int, nbytes: int, work: Callable[[], None]) -> None:
        """Does it, unless something failed before; the first failure breaks the store."""
        self.check()
        try:
            work()
        except BaseException as error:
            told = StoreError(
                f"{path}, bytes {at} to {at + nbytes}: must be read and written in full, got: {error}. The state is "
                f"part old and part new; mend the disk or the path and go on from a checkpoint"
            )
            self.fail(told)
            raise told from error


class FileStore:
    """Files of flat tensors, made and filled with zeros.

    Args:
        path: a folder, on the disk to use; the files are in a folder of this rank in it.
        files: what each one holds, by name; any name that fits (`"blocks.0/float32/exp_avg"`).
        rank: of this process.
        state: which of this process's, where it has several at the path.
        num_threads: how many blocks move at once.
        block_nbytes: the most bytes that one call to the system moves.
        checksums: whether every `CHECKED` bytes read are compared with what was written (CRC-32).
        leftover: what to do with files that processes which have ended left anywhere under the path.

    Raises:
        StoreError: the folder cannot be made or written to or is in use, something is left under the path and `leftover` is
            "refuse", or the disk is too small: then nothing of this store is left there.

    >>> import tempfile
    >>> from fzero.storage.host_memory import Pool
    >>> buffer = Pool(1, 1 << 16).take()
    >>> with tempfile.TemporaryDirectory() as folder, FileStore(folder, {"exp_avg": FileSpec(5000, "float32")}) as store:
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
                f"FileStore: num_threads and block_nbytes must be at least 1, got {num_threads} and {block_nbytes}"
            )
        path = Path(path).absolute()  # where the process is when the files go is its own affair
        self.folder = folder_of(path, rank, state)
        self.grain = CHECKED if checksums else SECTOR
        self.block_nbytes = _up(block_nbytes, self.grain)
        self._health = _Health(self.folder)
        self._moving: set[Future[None]] = set()
        self._specs = dict(files)
        self._files: dict[str, DirectFile] = {}
        try:
            claim = claims.claim(path, self.folder, leftover)
        except OSError as error:
            raise StoreError(_unusable(Path(error.filename or self.folder), error)) from error
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="fzero-files")
        # Also at the end of the interpreter, but not of a process that was forked from this one.
        release = partial(claims.release, path, self.folder, claim)
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
                f"{self.folder}: its filesystem has no direct I/O, so that bytes go through the page cache and each fence "
                f"waits for the disk; this is right, and slower. Put the path on a local disk",
                stacklevel=2,
            )

    def read(self, name: str, start: int, stop: int, buffer: Tensor) -> Callable[[], Tensor]:
        """Starts to read elements [start, stop) into a buffer. Returns a function that waits, and gives them as a view of it.

        Args:
            start, stop: in bytes of the file multiples of `grain`; `stop` may be the file's end.
            buffer: bytes (uint8), contiguous, from a memory page on, at least as many, rounded up to `grain`.

        Raises:
            StoreError: from the function that waits, or at once if the store is broken.
            ValueError: an argument breaks these rules.
        """
        return self._move("read", name, start, stop, buffer)

    def write(self, name: str, start: int, stop: int, buffer: Tensor) -> Callable[[], Tensor]:
        """Starts to write elements [start, stop) from the beginning of a buffer, which may not change until the wait is over.

        Arguments, result and errors are those of `read`.
        """
        return self._move("write", name, start, stop, buffer)

    def fence(self) -> None:
        """Waits for all that was started. Raises if anything failed since the store was made.

        Raises:
            StoreError: the store is broken.
        """
        wait(list(self._moving))
        for file in self._files.values():
            if self._health.cause is None:
                self._health.attempt(file.path, 0, file.nbytes, file.settle)
        self.check()

    def fail(self, cause: BaseException) -> None:
        """Breaks the store: what it holds is no state to go on with. Waits until no buffer is in use."""
        self._health.fail(cause)
        wait(list(self._moving))

    @property
    def cause(self) -> StoreError | None:
        """What broke the store, to be raised; None while it is whole."""
        return None if self._health.cause is None else bare(self._health.cause)

    def rest(self) -> None:
        """Waits until nothing moves. What fails breaks the store, and raises nothing here."""
        wait(list(self._moving))

    def close(self) -> None:
        """Removes the files. The store cannot be used any more."""
        self.fail(StoreError("it was closed"))
        self._end()
        self._threads.shutdown()  # so that nobody has a file any more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(
        self, verb: Literal["read", "write"], name: str, start: int, stop: int, buffer: Tensor
    ) -> Callable[[], Tensor]:
        self.check()
        nbytes = self.nbytes(name, start, stop)
        file, dtype = self._files[name], self._specs[name].dtype
        is_bytes = buffer.dtype == torch.uint8 and buffer.is_contiguous()
        if not is_bytes or buffer.data_ptr() % PAGE or len(buffer) < nbytes:
            raise ValueError(
                f"{name}: the buffer must be {nbytes} bytes or more, contiguous and from a memory page on, got "
                f"{tuple(buffer.shape)} of {buffer.dtype}; take it from a Pool"
            )
        begin = start * itemsize(dtype)
        memory = buffer.numpy().data[:nbytes]
        futures = []
        for at in range(0, nbytes, self.block_nbytes):
            block = memory[at : at + self.block_nbytes]
            work = partial(_move_block, verb, name, file, begin + at, block)
            future = self._threads.submit(self._health.attempt, file.path, begin + at, len(block), work)
            self._moving.add(future)
            future.add_done_callback(self._moving.discard)
            futures.append(future)

        def finish() -> Tensor:
            wait(futures)  # all of them, before one that has failed lets the caller have the buffer back
            for future in futures:
                if error := future.exception():
                    # Not itself: a thread that still holds it would hold the frames that it passes, and all that they hold.
                    raise bare(error) from error.__cause__
            return self.view(name, start, stop, buffer)

        return finish

    def view(self, name: str, start: int, stop: int, buffer: Tensor) -> Tensor:
        """The elements [start, stop) of a file, as they stand in a buffer, or shall stand there."""
        dtype = self._specs[name].dtype
        return buffer[: (stop - start) * itemsize(dtype)].view(torch_dtype(dtype))

    def nbytes(self, name: str, start: int, stop: int) -> int:
        """The bytes that elements [start, stop) move, and so need of a buffer: rounded up to `grain`.

        Raises:
            ValueError: they are not such elements as `read` takes, or there is no such file.
        """
        if name not in self._specs:
            raise ValueError(
                f"{name}: must be one of the {len(self._specs)} files of the store; make the store with it"
            )
        size, numel = itemsize(self._specs[name].dtype), self._specs[name].numel
        unit = self.grain // size
        if not 0 <= start <= stop <= numel or start % unit or (stop % unit and stop != numel):
            raise ValueError(
                f"{name}: start and stop must be multiples of {unit} elements in order within 0 and {numel}, the end of "
                f"the file, got {start} and {stop}; choose sub-groups of a multiple of {unit}"
            )
        return _up((stop - start) * size, self.grain)

    def check(self) -> None:
        """Raises a StoreError if the store is broken or closed."""
        self._health.check()


def _move_block(verb: Literal["read", "write"], name: str, file: DirectFile, at: int, block: memoryview) -> None:
    with profiler_range(verb, name):
        (file.read if verb == "read" else file.write)(at, block)


def _up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain


def _file_name(name: str) -> str:
    """A file's name that tells the tensor's; long ones are cut, and told apart by a number.

    >>> _file_name("h.0/float32")
    'h.0%2Ffloat32.flat'
    """
    quoted = quote(name, safe=" []'")
    return f"{quoted if len(quoted) < 200 else f'{quoted[:180]}-{zlib.crc32(name.encode()):08x}'}.flat"


def _unusable(folder: Path, error: OSError, needed: int | None = None) -> str:
    if error.strerror is None:
        return str(error)
    if needed is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = {errno.EMFILE: "raise the limit of open files (ulimit -n)"}.get(error.errno or 0)
        return f"{folder}: {error.strerror}; {fix or 'pass a folder that this process may make and write to'}"
    told = os.statvfs(next(parent for parent in folder.parents if parent.exists()))
    return (
        f"{folder}: the files need {needed:,} bytes and {told.f_bavail * told.f_frsize:,} are free ({error.strerror}); free "
        f"some, or pass a folder on another disk"
    )


def _end(pid: int, threads: ThreadPoolExecutor, files: dict[str, DirectFile], release: Callable[[], None]) -> None:
    """Waits for no thread: the collector may free a store in the midst of anything, such as the start of a thread.

    What moves still has its file, which is closed when that has ended.
    """
    if os.getpid() != pid:
        return
    threads.shutdown(wait=False, cancel_futures=True)
    files.clear()
    release()
