"""`ShardTransfer`: the shards that a forward-backward reads, and the homes of the gradients that it writes, all on its device.

Nothing moves. A gradient's contribution to the norm is measured when it is written, while it is in the processor's caches.
`fzero.storage.shard_io.MovingTransfer` is for shards in other memory; both take their buffers from a `BufferPool`.

Shape letters: S elements of a shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fzero.plans.flat_params import FlatParamPlan
from fzero.storage.pages import CHUNK, PAGE

if TYPE_CHECKING:
    from fzero.storage.file_tensor import FilePart, FileTensor, StoredTensor

AnyLeaf = TypeVar("AnyLeaf", Tensor, "StoredTensor")


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
    """The shards of a forward-backward, all of them on its device.

    Args:
        scratch: the pool of its buffers.
        measure: the function of a written shard of gradients whose result `known` returns.
        in_memory: whether shards in memory are measured too; allowed only where PyTorch counts every change to them.
    """

    def __init__(
        self,
        device: torch.device,
        scratch: BufferPool,
        *,
        measure: Callable[[Tensor], Tensor] | None = None,
        in_memory: bool = False,
    ) -> None:
        self.device, self.scratch, self._measure, self._in_memory = device, scratch, measure, in_memory
        # By name: result, shard, version. The shard is kept alive, so that no other tensor gets its address.
        self._measured: dict[str, tuple[Tensor, StoredTensor, int]] = {}

    def prefetch(self, name: str, x: StoredTensor) -> None:
        """Starts to load a shard, if there is room; `load` returns it."""

    def load(self, name: str, x: StoredTensor) -> Tensor:
        """The shard on the device: itself if it lives there, else a copy, to be returned with `scratch.give`."""
        assert isinstance(x, Tensor), name
        return x

    def each(self, shards: Iterable[tuple[str, StoredTensor]]) -> Iterator[Tensor]:
        """Yields one shard after the other on the device, valid until the next is requested; the next is prefetched."""
        return (self.load(name, x) for name, x in shards)

    def write_back(self, name: str, home: StoredTensor, values: Tensor, *, adds: bool, measures: bool = False) -> None:
        """Writes values to a shard's home, or adds them to it. The caller may free `values` when this returns, and change them
        unless they are the home's own memory.

        Args:
            values: on the device; to be added, also in the home's memory.
            measures: whether these are the final values, which are measured for `known`.
        """
        self._measured.pop(name, None)
        here = values if home is values and not adds else self._put(name, home, values, adds=adds)
        measures &= self._in_memory or not isinstance(home, Tensor)
        if measures and self._measure is not None and here.numel():
            number = self._measure(here if here.dtype == home.dtype else here.to(home.dtype))
            number = number if number.device == self.device else number.to(self.device)
            self._measured[name] = number, home, _version(home)

    def _put(self, name: str, home: StoredTensor, values: Tensor, *, adds: bool) -> Tensor:
        """Writes or adds to a home; returns the tensor that holds the final values."""
        assert isinstance(home, Tensor), name
        if adds:
            return home.add_(values)
        if home.data_ptr() != values.data_ptr():
            home.copy_(values)
        return values

    def known(self, name: str, home: StoredTensor) -> Tensor | None:
        """The measurement of the shard, if it was measured and, as far as PyTorch counts, has not changed since."""
        if name not in self._measured:
            return None
        number, measured, version = self._measured[name]
        is_same = home is measured
        if isinstance(home, Tensor) and isinstance(measured, Tensor):
            is_same = (home.data_ptr(), home.numel()) == (measured.data_ptr(), measured.numel())
        return number if is_same and _version(home) == version else None

    def settle(self) -> None:
        """Waits until all written values are in their homes."""

    def abandon(self) -> None:
        """Waits for all transfers, and drops prefetched shards."""


def _version(x: StoredTensor) -> int:
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


def to_device(x: Tensor | FileTensor | FilePart, device: torch.device) -> Tensor:
    """A flat tensor on a device; itself if it is there."""
    return (x if isinstance(x, Tensor) else x[:]).to(device)


def read_later(number: Tensor) -> Callable[[], int]:
    """Begins to copy a number to the host; the result returns it.

    `int(number)` would wait until a GPU has done all that it was given, and then it idles. This waits only for what it was given
    before the copy.
    """
    if number.device.type != "cuda":
        return lambda: int(number)
    copy, is_there = number.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_there.record(torch.cuda.current_stream(number.device))

    def read() -> int:
        is_there.synchronize()
        return int(copy)

    return read


def part_of(x: Tensor | FileTensor | FilePart, start: int, stop: int) -> Any:
    """Elements [start, stop) of a flat tensor: a view, or a `FilePart`. Both have `copy_` and `[:]`."""
    return x[start:stop] if isinstance(x, Tensor) else x.part(slice(start, stop))
