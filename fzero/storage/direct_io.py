"""`DirectFile`: one file of fixed length, read and written in full or not at all,
bypassing the page cache.

Addresses, offsets and lengths of direct I/O must be multiples of the disk's block of
512 or 4096 bytes; here of `SECTOR`, which fits both. Filesystems without direct I/O are
used through the page cache; then only the system may know of a failed write, until
`settle` asks for it.

A file counts as damaged as soon as its length changes: bytes that were cut off would
read as zeros once something behind them is written. Checksums (CRC-32) also detect
other damage.
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
"""Direct I/O moves multiples of so many bytes."""

CHECKED = 1 << 16
"""Bytes that share a checksum."""

_OF_ZEROS = zlib.crc32(bytes(CHECKED))


class DirectFile:
    """A new file of `nbytes` zero bytes, preallocated on the disk.

    Args:
        nbytes: a multiple of `SECTOR`, or of `CHECKED` if `checksums`.
        checksums: whether bytes read are compared with the bytes written.

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
        """Reopens the file for direct I/O, if its filesystem supports that for
        multiples of `SECTOR`.
        """
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
        """Fills the memory with the bytes from `at` on. Raises OSError: also if another
        process has changed the file.
        """
        self._move(os.preadv, at, memory)
        for index, found in self._checksums_of(at, memory):
            if self._checksums[index] != found:
                raise OSError(
                    errno.EIO,
                    f"bytes {index * CHECKED} to {(index + 1) * CHECKED} are not those that were "
                    f"written (checksum {found:#x} in place of {self._checksums[index]:#x})",
                )

    def write(self, at: int, memory: memoryview) -> None:
        """Writes the memory to the bytes from `at` on. Raises as `read` does."""
        for index, found in self._checksums_of(at, memory):
            self._checksums[index] = found
        self._move(os.pwritev, at, memory)

    def settle(self) -> None:
        """Asks the system for failed writes that it has not reported yet. Raises as
        `read` does.
        """
        if not self.is_direct:
            os.fdatasync(self._fd)
        self._check_length()

    def close(self) -> None:
        """Closes the file, and leaves it on the disk; also runs when the object is
        collected.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], at: int, memory: memoryview
    ) -> None:
        """Calls the system until all bytes have moved; it may move fewer than it was
        asked for.
        """
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
                errno.EIO,
                f"the file is {found} bytes long and was made with {self.nbytes}; another process "
                f"changed it",
            )

    def _checksums_of(self, at: int, memory: memoryview) -> Iterator[tuple[int, int]]:
        """(Index in the file, checksum) of every `CHECKED` bytes; nothing for a file
        without checksums.
        """
        if self._checksums:
            for offset in range(0, len(memory), CHECKED):
                yield (at + offset) // CHECKED, zlib.crc32(memory[offset : offset + CHECKED])
