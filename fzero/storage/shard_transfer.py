"""`ShardTransfer`: loads the shards that a forward-backward reads, and writes its
gradients to their targets.

Where all of them are on its device, nothing moves (`Resident`).
`fzero.storage.shard_io.MovingTransfer` is for shards in other memory. Both take their
buffers from a `BufferPool`.

Shape letters: S elements of a shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import torch
from torch import Tensor

from fzero.plans.flat_params import FlatParamPlan
from fzero.storage.host_memory import paged
from fzero.storage.pages import CHUNK, PAGE

if TYPE_CHECKING:
    from fzero.storage.file_tensor import FilePart, FileTensor, StoredTensor

AnyLeaf = TypeVar("AnyLeaf", Tensor, "StoredTensor")


class BufferPool:
    """Flat buffers for gathered parameters, unreduced gradients and shards in transfer,
    reused by size and dtype.

    Memory that is new to the process costs a page fault per 4 kB. CUDA's allocator
    caches memory anyway.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._paged: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised buffer."""
        free = self._free[numel, dtype]
        return (
            free.pop()
            if free and device.type == "cpu"
            else torch.empty(numel, dtype=dtype, device=device)
        )

    def take_paged(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer on the CPU for direct I/O."""
        if free := self._paged[numel, dtype]:
            return free.pop()
        return paged(numel, dtype)

    def give(self, flat: Tensor) -> None:
        """Takes a buffer back for reuse, unless a view of it is still alive."""
        storage = flat.untyped_storage()
        # `flat` and `storage`
        if flat.device.type == "cpu" and torch._C._storage_Use_Count(storage._cdata) == 2:
            is_paged = (
                storage.data_ptr() % PAGE == 0
                and storage.nbytes() > 0
                and storage.nbytes() % CHUNK == 0
            )
            (self._paged if is_paged else self._free)[flat.numel(), flat.dtype].append(flat)


class ShardTransfer(Protocol):
    """The shards of a forward-backward.

    Attributes:
        device: the device of the forward-backward.
        scratch: the pool of its buffers.
    """

    device: torch.device
    scratch: BufferPool

    def prefetch(self, name: str, x: StoredTensor) -> None:
        """Starts to load a shard, if there is room; `load` returns it."""
        ...

    def load(self, name: str, x: StoredTensor) -> Tensor:
        """The shard on the device: itself if it lives there, else a copy, to be
        returned with `scratch.give`.
        """
        ...

    def each(self, shards: Iterable[tuple[str, StoredTensor]]) -> Iterator[Tensor]:
        """Yields one shard after the other on the device, valid until the next is
        requested; the next is prefetched.
        """
        ...

    def write_back(self, name: str, target: StoredTensor, values: Tensor, *, adds: bool) -> Tensor:
        """Writes values to a shard's target, or adds them to it. The caller may free
        `values` when this returns, and change them unless they are the target's own
        memory.

        Args:
            values: on the device; to be added, also in the target's memory.

        Returns:
            A tensor in memory that holds what is now in the target, perhaps in another
            dtype.
        """
        ...

    def settle(self) -> None:
        """Waits until all written values are in their targets."""
        ...

    def abandon(self) -> None:
        """Waits for all transfers, and drops prefetched shards."""
        ...


@final
@dataclass(slots=True)
class Resident:
    """The `ShardTransfer` of shards that are all on the device."""

    device: torch.device
    scratch: BufferPool

    def prefetch(self, name: str, x: StoredTensor) -> None:
        pass

    def load(self, name: str, x: StoredTensor) -> Tensor:
        assert isinstance(x, Tensor), name
        return x

    def each(self, shards: Iterable[tuple[str, StoredTensor]]) -> Iterator[Tensor]:
        return (self.load(name, x) for name, x in shards)

    def write_back(self, name: str, target: StoredTensor, values: Tensor, *, adds: bool) -> Tensor:
        assert isinstance(target, Tensor), name
        return write_here(target, values, adds=adds)

    def settle(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def write_here(target: Tensor, values: Tensor, *, adds: bool) -> Tensor:
    """Writes or adds to a target on the same device; returns the tensor that holds the
    final values.
    """
    if adds:
        return target.add_(values)
    if target is not values and target.data_ptr() != values.data_ptr():
        target.copy_(values)
    return values


def own_shard(flat: AnyLeaf, buffer: FlatParamPlan, shard: int) -> AnyLeaf:
    """The rank's shard (S) of the part of a flat buffer that it holds: all (P), that
    shard, or that shard and others.
    """
    numel = buffer.shard_numel
    if flat.numel() == numel:
        return flat
    start = shard % (flat.numel() // numel) * numel
    own: Any = part_of(flat, start, start + numel)
    return own  # type: ignore[no-any-return]


def updated_part(flat: AnyLeaf, buffer: FlatParamPlan, shard: int) -> AnyLeaf:
    """The part of a flat buffer's parameters or gradients that a rank updates: all of
    it, or its shard.
    """
    return own_shard(flat, buffer, shard) if buffer.flow.updates == "shard" else flat


def to_device(x: Tensor | FileTensor | FilePart, device: torch.device) -> Tensor:
    """A flat tensor on a device; itself if it is there."""
    return (x if isinstance(x, Tensor) else x[:]).to(device)


def read_later(number: Tensor) -> Callable[[], int]:
    """Begins to copy a number to the host; the result returns it.

    `int(number)` would wait until a GPU has done all that it was given, and then it
    idles. This waits only for what it was given before the copy.
    """
    if number.device.type != "cuda":
        return partial(int, number)
    copy, is_there = number.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_there.record(torch.cuda.current_stream(number.device))

    def read() -> int:
        is_there.synchronize()
        return int(copy)

    return read


def part_of(x: Tensor | FileTensor | FilePart, start: int, stop: int) -> Any:
    """Elements [start, stop) of a flat tensor: a view, or a `FilePart`. Both have
    `copy_` and `[:]`.
    """
    return x[start:stop] if isinstance(x, Tensor) else x.part(slice(start, stop))
