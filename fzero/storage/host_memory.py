"""`Pool`: host memory for transfers to and from files and devices, and checks that it
is available.

Available memory is checked before it is allocated: the OOM killer leaves no message.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fzero.storage.pages import CHUNK, PAGE

LARGE_PAGE = 1 << 21


class Pool:
    """`num` page-aligned buffers of at least `nbytes` bytes each, for direct I/O and
    copies to a device; allocated once.

    Raises:
        MemoryError: they do not fit (see `check_host_memory`); nothing was allocated.

    >>> pool = Pool(2, 5000)
    >>> pool.nbytes, pool.num_free
    (8192, 2)
    >>> buffer = pool.take()
    >>> buffer.dtype, buffer.numel(), buffer.data_ptr() % 4096, pool.num_free
    (torch.uint8, 8192, 0, 1)
    >>> pool.give_back(buffer)
    >>> pool.num_free
    2
    """

    def __init__(self, num: int, nbytes: int) -> None:
        self.num, self.nbytes = num, -(-max(nbytes, 1) // PAGE) * PAGE
        check_host_memory(num * self.nbytes, f"a pool of {num} buffers of {self.nbytes:,} bytes")
        self._free: list[Tensor] = []
        if num:
            self._free = list(
                torch.split(_mapped(num * self.nbytes)[: num * self.nbytes], self.nbytes)
            )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Tensor:
        """A buffer, as uninitialised bytes."""
        assert self._free, "the callers need more buffers at once than the pool has"
        return self._free.pop()

    def give_back(self, buffer: Tensor) -> None:
        """Returns a buffer that was taken; the caller must not use it any more."""
        self._free.append(buffer)


def paged(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros in page-aligned memory of its own, which direct I/O may
    fill (see `bytes_of`).

    Raises:
        MemoryError: it does not fit (see `check_host_memory`).

    >>> x = paged(5, torch.bfloat16)
    >>> x.numel(), x.data_ptr() % 4096, bytes_of(x).numel()
    (5, 0, 65536)
    """
    nbytes = -(-max(numel * dtype.itemsize, 1) // CHUNK) * CHUNK
    check_host_memory(nbytes, f"{numel:,} elements of {dtype} on their way from files")
    memory = _mapped(nbytes)
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, (numel,))  # type: ignore[call-overload,no-any-return]


def _mapped(nbytes: int) -> Tensor:
    """At least `nbytes` bytes of page-aligned memory, in large pages where the system
    has them (faster: docs/performance.md).
    """
    if nbytes >= LARGE_PAGE:
        # so that the system aligns it to a large page
        nbytes = -(-nbytes // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # a system that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def bytes_of(x: Tensor) -> Tensor:
    """All memory of a tensor of `paged`, including its padding, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())  # type: ignore[call-overload,no-any-return]


def check_host_memory(nbytes: int, what: str) -> None:
    """Raises unless `nbytes` can be allocated now, by every limit that the system
    reports.

    Raises:
        MemoryError: the message has the limit, the bytes needed, and the bytes
            available.

    >>> check_host_memory(1 << 60, "a pool")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    MemoryError: a pool: needs 1,152,921,504,606,846,976 bytes of host memory, and ... ...
    """
    for limit, available in _available():
        if nbytes > available:
            raise MemoryError(
                f"{what}: needs {nbytes:,} bytes of host memory, and {limit} leaves "
                f"{max(available, 0):,}; make sub-groups or the number of buffers smaller, or "
                f"raise the limit"
            )


def host_memory() -> int:
    """Bytes that this process can allocate now, by every limit that the system reports."""
    return max(0, min((available for _, available in _available()), default=sys.maxsize))


def process_memory(field: str) -> int:
    """Bytes of this process: `VmRSS` resident, `VmHWM` its peak, `VmData` private; 0
    where the system does not report it.
    """
    return _numbers(Path("/proc/self/status")).get(field, 0)


def machine_memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int:
    """Bytes that are free on the machine, or can be freed."""
    return _numbers(Path("/proc/meminfo")).get(
        "MemAvailable", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


def _available() -> Iterator[tuple[str, int]]:
    """Every limit on this process's memory, and the bytes that are still available
    under it.
    """
    used = _numbers(Path("/proc/self/status"))
    for name, kind, field in (
        ("AS", resource.RLIMIT_AS, "VmSize"),
        ("DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and field in used:
            yield f"the process's RLIMIT_{name} of {soft:,}", soft - used[field]
    memory = _numbers(Path("/proc/meminfo"))
    if "MemAvailable" in memory:
        yield "the machine (MemAvailable)", memory["MemAvailable"]
    yield from _left_by_cgroups()


_CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""The limit, the use and the cache of control groups, by the controllers that /proc
names: version 2, version 1.
"""


def _left_by_cgroups(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[str, int]]:
    """(Limit, available bytes) of every control group of this process, from its own up
    to the root's.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in _CGROUP_FILES:
            continue
        top = root / controllers
        limit, usage, cache = _CGROUP_FILES[controllers]
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
            except (OSError, ValueError):
                continue  # not there: the root of a tree has no limit
            if most != "max":
                # The system drops its file cache when a process needs the memory.
                yield f"the control group {folder}", int(most) - used + int(stat.get(cache, 0))


def _numbers(path: Path) -> dict[str, int]:
    """The fields in kB of a file of /proc, in bytes; none where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in fields}
