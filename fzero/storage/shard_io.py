"""`ShardTransfer`: loads shards of parameters for a forward-backward, and writes shards of gradients back to their homes.

A forward-backward names the next shard in advance, so that it is prefetched while the present one is used, and goes on while
shards of gradients are written. For shards on the device all of this does nothing.

A file error breaks the state but raises nothing here: the rank goes on with zeros, so that the others do not wait for it, and all
ranks raise at the end (`fzero.runtime.file_agreement.agree`). A gradient's contribution to the norm is measured when it is put,
while it is in the processor's caches.

Shape letters: S elements of a shard.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.plans.flat_params import FlatParamPlan
from fzero.storage.buffer_sizes import CHUNK, MOST_LEAVING, PAGE
from fzero.storage.file_tensor import FileTensor, kept, part_of

Leaf = Tensor | FileTensor
AnyLeaf = TypeVar("AnyLeaf", Tensor, Leaf)


class BufferPool:
    """Flat buffers for gathered parameters, unreduced gradients and shards in transfer, reused by size and dtype.

    Memory that is new to the process costs a page fault per 4 kB. CUDA's allocator caches memory by itself.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._paged: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised buffer."""
        free = self._free[numel, dtype]
        return free.pop() if free and device.type == "cpu" else torch.empty(numel, dtype=dtype, device=device)

    def take_paged(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer on the CPU for direct I/O."""
        if free := self._paged[numel, dtype]:
            return free.pop()
        from fzero.storage.host_memory import paged  # only a job with files needs it

        return paged(numel, dtype)

    def give(self, flat: Tensor) -> None:
        """Takes a buffer back for reuse, unless a view of it is still alive."""
        storage = flat.untyped_storage()
        if flat.device.type == "cpu" and torch._C._storage_Use_Count(storage._cdata) == 2:  # `flat` and `storage`
            is_paged = storage.data_ptr() % PAGE == 0 and storage.nbytes() > 0 and storage.nbytes() % CHUNK == 0
            (self._paged if is_paged else self._free)[flat.numel(), flat.dtype].append(flat)


class ShardTransfer:
    """Loads shards to the device of a forward-backward, and writes gradients from there.

    Args:
        scratch: the pool of its buffers.
        most: the most shards that are prefetched at once; None is any number.
        measure: the function of a put shard of gradients whose result `known` returns.
        in_memory: whether shards in memory are measured too; allowed only where PyTorch counts every change to them.
    """

    def __init__(
        self,
        device: torch.device,
        scratch: BufferPool,
        most: int | None = None,
        *,
        measure: Callable[[Tensor], Tensor] | None = None,
        in_memory: bool = False,
    ) -> None:
        self.device, self.scratch, self.most, self._measure, self._in_memory = device, scratch, most, measure, in_memory
        # By name: result, shard, version. The shard is kept alive, so that no other tensor gets its address.
        self._measured: dict[str, tuple[Tensor, Leaf, int]] = {}
        self._coming: dict[str, Callable[[], Tensor]] = {}
        self._leaving: deque[tuple[str, FileTensor, Tensor, Callable[[], object]]] = deque()
        self._copies_in: torch.cuda.Stream | None = None
        self._copies_out: torch.cuda.Stream | None = None  # while some may be under way

    # --- loading -------------------------------------------------------------------------------------------------

    def prefetch(self, name: str, x: Leaf) -> None:
        """Starts to load a shard, if there is room; `load` returns it."""
        if not self.is_here(x) and name not in self._coming and (self.most is None or len(self._coming) < self.most):
            self._coming[name] = self._start(name, x)

    def load(self, name: str, x: Leaf) -> Tensor:
        """The shard on the device: itself if it lives there, else a copy, to be returned with `scratch.give`."""
        if self.is_here(x):
            return x
        return (self._coming.pop(name, None) or self._start(name, x))()

    def is_here(self, x: Leaf) -> TypeGuard[Tensor]:
        """Whether the shard lives on the device."""
        return isinstance(x, Tensor) and x.device == self.device

    def fresh(self, x: Leaf) -> Tensor:
        """An uninitialised tensor like the result of `load`; the shard itself if it lives on the device."""
        if self.is_here(x):
            return x
        if self.device.type == "cpu":
            return self.scratch.take_paged(x.numel(), x.dtype)
        return torch.empty(x.numel(), dtype=x.dtype, device=self.device)

    def each(self, shards: Iterable[tuple[str, Leaf]]) -> Iterator[Tensor]:
        """Yields one shard after the other on the device, valid until the next is requested; the next is prefetched."""
        rest = deque(shards)
        while rest:
            name, x = rest.popleft()
            here = self.load(name, x)
            if rest:
                self.prefetch(*rest[0])
            yield here
            if here is not x:
                self.scratch.give(here)

    def _start(self, name: str, x: Leaf) -> Callable[[], Tensor]:
        with profiler_range("load", name):
            return self._start_file(name, x) if isinstance(x, FileTensor) else self._start_copy(x)

    def _start_copy(self, x: Tensor) -> Callable[[], Tensor]:
        if self._copies_in is None:
            self._copies_in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        if self._copies_out is not None:
            self._copies_in.wait_stream(self._copies_out)  # may still be writing `x`
        with torch.cuda.stream(self._copies_in):
            copy = x.to(self.device, non_blocking=True)
            is_here = self._copies_in.record_event()

        def finish() -> Tensor:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(is_here)
            copy.record_stream(computing)
            return copy

        return finish

    def _start_file(self, name: str, x: FileTensor) -> Callable[[], Tensor]:
        flat = self.scratch.take_paged(x.numel(), x.dtype)
        wait = kept(x, lambda: x.files.start_read(x.name, flat))

        def finish() -> Tensor:
            with profiler_range("wait load", name):
                is_read = wait is not None and kept(x, wait) is not None
            if not is_read:
                flat.zero_()
            if self.device.type == "cpu":
                return flat
            here = flat.to(self.device)
            self.scratch.give(flat)
            return here

        return finish

    # --- writing back --------------------------------------------------------------------------------------------

    def write_back(self, name: str, home: Leaf, values: Tensor, *, adds: bool, measures: bool = False) -> None:
        """Writes values to a shard's home, or adds them to it. The caller may free `values` when this returns, and change them
        unless they are the home's own memory.

        Args:
            values: on the device; to be added, also in the home's memory.
            measures: whether these are the final values, which are measured for `known`.
        """
        self._measured.pop(name, None)
        here = values
        if home is values and not adds:
            pass
        elif isinstance(home, FileTensor):
            with profiler_range("write_back", name):
                here = self._put_in_file(name, home, values, adds=adds)
        elif home.device != values.device:
            with profiler_range("write_back", name):
                here = self._put_in_memory(home, values, adds=adds)
        else:
            here = self._put_in_memory(home, values, adds=adds)
        measures = measures and (self._in_memory or isinstance(home, FileTensor))
        if measures and self._measure is not None and here.numel():
            number = self._measure(here if here.dtype == home.dtype else here.to(home.dtype))
            number = number if number.device == self.device else number.to(self.device)
            self._measured[name] = number, home, _version(home)

    def known(self, name: str, home: Leaf) -> Tensor | None:
        """The measurement of the shard, if it was measured and, as far as PyTorch counts, has not changed since."""
        if name not in self._measured:
            return None
        number, measured, version = self._measured[name]
        is_same = home is measured
        if not is_same and isinstance(home, Tensor) and isinstance(measured, Tensor):
            is_same = (home.data_ptr(), home.numel()) == (measured.data_ptr(), measured.numel())
        return number if is_same and _version(home) == version else None

    def _put_in_memory(self, home: Tensor, values: Tensor, *, adds: bool) -> Tensor:
        """Writes to a home in memory; returns the tensor that holds the final values."""
        if adds:
            self._end_copies_out()
            return home.add_(values.to(home.device))
        if home.device != values.device:
            self._copy_out(home, values)
        elif home.data_ptr() != values.data_ptr():
            home.copy_(values)
        return values

    def _copy_out(self, home: Tensor, values: Tensor) -> None:
        """Copies to host memory on a stream of its own, concurrently with compute."""
        if self._copies_out is None:
            self._copies_out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copies_out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies_out):
            home.copy_(values, non_blocking=True)
        values.record_stream(self._copies_out)

    def _end_copies_out(self) -> None:
        """Waits until the host may read the copies."""
        if self._copies_out is not None:
            with profiler_range("wait write_back", "to host memory"):
                self._copies_out.synchronize()
            self._copies_out = None

    def _put_in_file(self, name: str, home: FileTensor, values: Tensor, *, adds: bool) -> Tensor:
        """Writes to a home in a file; returns the tensor that holds the final values."""
        while len(self._leaving) >= MOST_LEAVING or (adds and self._leaving):
            self._end_leaving()
        flat = self._start_file(name, home)() if adds else self.scratch.take_paged(home.numel(), home.dtype)
        if adds and flat.device != torch.device("cpu"):
            flat = self.scratch.take_paged(home.numel(), home.dtype).copy_(flat)
        _ = flat.add_(values.to(flat.device)) if adds else flat.copy_(values)
        wait = kept(home, lambda: home.files.start_write(home.name, flat))
        if wait is not None:
            self._leaving.append((name, home, flat, wait))
        return flat if adds else values

    def _end_leaving(self) -> None:
        name, home, flat, wait = self._leaving.popleft()
        with profiler_range("wait write_back", name):
            kept(home, wait)
        del wait
        self.scratch.give(flat)

    def settle(self) -> None:
        """Waits until all put values are in their homes."""
        while self._leaving:
            self._end_leaving()
        self._end_copies_out()

    def abandon(self) -> None:
        """Waits for all transfers, and drops prefetched shards."""
        for wait in self._coming.values():
            self.scratch.give(wait())
        self._coming.clear()
        self.settle()


def _version(x: Leaf) -> int:
    """PyTorch's count of changes to a tensor in memory; 0 for a file, which only this transfer changes."""
    return x._version if isinstance(x, Tensor) else 0


def own_shard(flat: AnyLeaf, buffer: FlatParamPlan, shard: int) -> AnyLeaf:
    """The rank's shard (S) of the part of a flat buffer that it holds: all (P), that shard, or that shard and others."""
    numel = buffer.shard_numel
    if flat.numel() == numel:
        return flat
    start = shard % (flat.numel() // numel) * numel
    own: Any = part_of(flat, start, start + numel)
    return own  # type: ignore[no-any-return]


def updated_part(flat: AnyLeaf, buffer: FlatParamPlan, shard: int) -> AnyLeaf:
    """The part of a flat buffer's parameters or gradients that a rank updates: all of it, or its shard."""
    return own_shard(flat, buffer, shard) if buffer.flow.updates == "shard" else flat
