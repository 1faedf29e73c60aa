"""One file of fixed length, read and written in full or not at all, around the page cache.

Direct I/O moves bytes between the disk and the process's memory. It takes addresses, offsets and lengths that are multiples of
the disk's block, of 512 or 4096 bytes; everything here is a multiple of `SECTOR`, which serves both. Filesystems without it
are used through the page cache; a failed write may be known to the system alone then, until `settle` asks.

A file is told as damaged as soon as its length is not the one it was made with: bytes that were cut off, and come back when
something behind them is written, would read as zeros. Checksums (CRC-32) tell also what is damaged otherwise.
"""

from __future__ import annotations

import errno
import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from fzero.storage.host_memory import Pool

SECTOR = 4096
"""Bytes of which direct I/O takes multiples."""

CHECKED = 1 << 16
"""Bytes that share a checksum."""

_OF_ZEROS = zlib.crc32(bytes(CHECKED))


class DirectFile:
    """A new file of `nbytes` zero bytes, which the disk has set aside.

    Args:
        nbytes: a multiple of `SECTOR`, or of `CHECKED` if `checksums`.
        checksums: whether what is read is compared with what was written.

    Raises:
        OSError: the file exists or cannot be made, or the disk is full.
    """

    def __init__(self, path: Path, nbytes: int, *, checksums: bool) -> None:
        self.path, self.nbytes, self.is_direct = path, nbytes, False
        self._fd = -1
        self._checksums = array("L", [_OF_ZEROS] * (nbytes // CHECKED if checksums else 0))
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if not nbytes:
            return
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
            self._use_direct()
        except BaseException:
            self.close()
            raise

    def _use_direct(self) -> None:
        """Opens the file anew for direct I/O, if its filesystem has that for multiples of `SECTOR`."""
        fd = None
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW)
            os.preadv(fd, [Pool(1, SECTOR).take().numpy().data], 0)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if error.errno != errno.EINVAL:
                raise
        else:
            os.close(self._fd)
            self._fd, self.is_direct = fd, True

    def read(self, at: int, memory: memoryview) -> None:
        """Fills the memory with the bytes from `at` on.

        Raises:
            OSError: of the system; or the file is not as it was left.
        """
        self._move(os.preadv, at, memory)
        for index, found in self._checksums_of(at, memory):
            if self._checksums[index] != found:
                raise OSError(
                    errno.EIO,
                    f"bytes {index * CHECKED} to {(index + 1) * CHECKED} are not those that were written (checksum "
                    f"{found:#x} in place of {self._checksums[index]:#x})",
                )

    def write(self, at: int, memory: memoryview) -> None:
        """Writes the memory to the bytes from `at` on. Raises as `read` does."""
        for index, found in self._checksums_of(at, memory):
            self._checksums[index] = found
        self._move(os.pwritev, at, memory)

    def settle(self) -> None:
        """Has the system tell of failed writes that it kept for later, where it does that. Raises as `read` does."""
        if not self.is_direct:
            os.fdatasync(self._fd)
        self._check_length()

    def close(self) -> None:
        """Closes it, and leaves it on the disk; as it happens to a file that nobody has any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close

    def _move(self, call: Callable[[int, list[memoryview], int], int], at: int, memory: memoryview) -> None:
        """Calls the system until all bytes have moved; it may move fewer than it was asked for."""
        self._check_length()
        done = 0
        while done < len(memory):
            moved = call(self._fd, [memory[done:]], at + done)
            if moved < len(memory) - done:
                moved -= moved % SECTOR  # direct I/O goes on from whole sectors only
                if not moved:
                    raise OSError(errno.EIO, f"the system stopped at byte {at + done}")
            done += moved

    def _check_length(self) -> None:
        found = os.fstat(self._fd).st_size
        if found != self.nbytes:
            raise OSError(
                errno.EIO, f"the file is {found} bytes long and was made with {self.nbytes}; somebody changed it"
            )

    def _checksums_of(self, at: int, memory: memoryview) -> Iterator[tuple[int, int]]:
        """Of every `CHECKED` bytes, with its index in the file; none if there are none."""
        if self._checksums:
            for offset in range(0, len(memory), CHECKED):
                yield (at + offset) // CHECKED, zlib.crc32(memory[offset : offset + CHECKED])
