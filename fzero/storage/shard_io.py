"""`MovingTransfer`: loads shards of parameters for a forward-backward, and writes
shards of gradients back to their targets.

A forward-backward names the next shard in advance, so that it is prefetched while the
present one is used, and goes on while shards of gradients are written. For shards on
the device all of this does nothing.

A file error breaks the state but raises nothing here: the rank goes on with zeros, so
that the others do not wait for it, and all ranks raise at the end
(`fzero.storage.file_agreement.agree`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import final

import torch
from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.storage.buffer_sizes import MOST_LEAVING
from fzero.storage.file_tensor import FileTensor, StoredTensor, kept
from fzero.storage.promised import PromisedTensor, or_zeros
from fzero.storage.shard_transfer import BufferPool, write_here


@final
class MovingTransfer:
    """Loads shards to the device of a forward-backward, and writes gradients from
    there.

    Args:
        scratch: the pool of its buffers.
        most: the most shards that are prefetched at once; None is any number.
    """

    def __init__(self, device: torch.device, scratch: BufferPool, most: int | None = None) -> None:
        self.device, self.scratch, self.most = device, scratch, most
        self._coming: dict[str, Callable[[], Tensor]] = {}
        self._leaving: deque[tuple[str, FileTensor, Tensor, Callable[[], object]]] = deque()
        self._copies_in: torch.cuda.Stream | None = None
        self._copies_out: torch.cuda.Stream | None = None  # while some may be under way

    # --- loading ----------------------------------------------------------------------------------

    def prefetch(self, name: str, x: StoredTensor) -> None:
        """Starts to load a shard, if there is room; `load` returns it."""
        is_here = isinstance(x, Tensor) and x.device == self.device
        if (
            not is_here
            and not _is_written(x)
            and name not in self._coming
            and (self.most is None or len(self._coming) < self.most)
        ):
            self._coming[name] = self._start(name, x)

    def load(self, name: str, x: StoredTensor) -> Tensor:
        """The shard on the device: itself if it lives there, else a copy, to be
        returned with `scratch.give`.
        """
        return (self._coming.pop(name, None) or self._start(name, x))()

    def fresh(self, x: StoredTensor) -> Tensor:
        """An uninitialised tensor like the result of `load`; the shard itself if it
        lives on the device.
        """
        if isinstance(x, Tensor) and x.device == self.device:
            return x
        if self.device.type == "cpu":
            return self.scratch.take_paged(x.numel(), x.dtype)
        return torch.empty(x.numel(), dtype=x.dtype, device=self.device)

    def each(self, shards: Iterable[tuple[str, StoredTensor]]) -> Iterator[Tensor]:
        """Yields one shard after the other on the device, valid until the next is
        requested; the next is prefetched.
        """
        rest = deque(shards)
        while rest:
            name, x = rest.popleft()
            here = self.load(name, x)
            if rest:
                self.prefetch(*rest[0])
            yield here
            if here is not x:
                self.scratch.give(here)

    def _start(self, name: str, x: StoredTensor) -> Callable[[], Tensor]:
        if isinstance(x, Tensor) and x.device == self.device:
            return partial(or_zeros, x)
        with profiler_range("load", name):
            return self._start_file(name, x) if isinstance(x, FileTensor) else self._start_copy(x)

    def _start_copy(self, x: Tensor) -> Callable[[], Tensor]:
        if self._copies_in is None:
            self._copies_in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        if self._copies_out is not None:
            self._copies_in.wait_stream(self._copies_out)  # may still be writing `x`
        with torch.cuda.stream(self._copies_in):
            copy = or_zeros(x).to(self.device, non_blocking=True)
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

    # --- writing back -----------------------------------------------------------------------------

    def write_back(self, name: str, target: StoredTensor, values: Tensor, *, adds: bool) -> Tensor:
        """See `ShardTransfer`."""
        if target is values and not adds:
            return values
        if isinstance(target, FileTensor):
            with profiler_range("write_back", name):
                return self._put_in_file(name, target, values, adds=adds)
        if target.device == values.device:
            if adds:
                self._end_copies_out()
            return write_here(target, values, adds=adds)
        with profiler_range("write_back", name):
            # The sum is made on the device; on the host each would wait for the other.
            total = self.load(name, target).add_(values) if adds else values
            self._copy_out(target, total)
            return total

    def _copy_out(self, target: Tensor, values: Tensor) -> None:
        """Copies to host memory on a stream of its own, concurrently with compute."""
        if self._copies_out is None:
            self._copies_out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copies_out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies_out):
            target.copy_(values, non_blocking=True)
        values.record_stream(self._copies_out)

    def _end_copies_out(self) -> None:
        """Waits until the host may read the copies."""
        if self._copies_out is not None:
            with profiler_range("wait write_back", "to host memory"):
                self._copies_out.synchronize()
            self._copies_out = None

    def _put_in_file(self, name: str, target: FileTensor, values: Tensor, *, adds: bool) -> Tensor:
        """Writes to a target in a file; returns the tensor that holds the final values."""
        while len(self._leaving) >= MOST_LEAVING or (adds and self._leaving):
            self._end_leaving()
        flat = (
            self._start_file(name, target)()
            if adds
            else self.scratch.take_paged(target.numel(), target.dtype)
        )
        if adds and flat.device != torch.device("cpu"):
            flat = self.scratch.take_paged(target.numel(), target.dtype).copy_(flat)
        _ = flat.add_(values.to(flat.device)) if adds else flat.copy_(values)
        wait = kept(target, lambda: target.files.start_write(target.name, flat))
        if wait is not None:
            self._leaving.append((name, target, flat, wait))
        return flat if adds else values

    def _end_leaving(self) -> None:
        name, target, flat, wait = self._leaving.popleft()
        with profiler_range("wait write_back", name):
            kept(target, wait)
        del wait
        self.scratch.give(flat)

    def settle(self) -> None:
        """Waits until all values that were put are in their memory or files."""
        while self._leaving:
            self._end_leaving()
        self._end_copies_out()

    def abandon(self) -> None:
        """Waits for all transfers, and drops prefetched shards."""
        for wait in self._coming.values():
            self.scratch.give(wait())
        self._coming.clear()
        self.settle()


def _is_written(x: StoredTensor) -> bool:
    """Whether a running update may still write a shard, so that to load it would wait."""
    if isinstance(x, FileTensor):
        return x.files.is_written(x.name)
    return isinstance(x, PromisedTensor) and x.is_running
