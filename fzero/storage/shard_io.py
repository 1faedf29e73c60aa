"""How do whole shards come from where they live to a pass that works on them, and its gradients to where they live?

A pass asks for the shard of a flat buffer of parameters when it gathers it, and says before what it will ask for next, so that
the next shard is on its way while the last one is worked on. It hands over the shards of gradients one by one, as the backward
makes them, and goes on while they are written. Where a shard is on the device anyway, none of this does anything.

What moves between files and a device stands in host memory that files are read into as it is
(`fzero.storage.host_memory.paged`), and is kept for the next shard of the same size. A file that fails breaks its state and
raises nothing here: the rank goes on with zeros, so that the others do not wait for it, and all of them are told when the
pass is over (`fzero.runtime.offload.agree`). What the norm has to know of a gradient is measured when it comes to where it
lives, while the processor's caches have it, so that nobody reads it, or brings it back, for that.

Shape letters: S elements of a shard.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.plans.flat_params import FlatParamPlan
from fzero.storage.file_tensor import FileTensor, kept, part_of
from fzero.storage.host_memory import CHUNK, PAGE, paged

Leaf = Tensor | FileTensor
AnyLeaf = TypeVar("AnyLeaf", Tensor, Leaf)

MOST_LEAVING = 2
"""Shards of gradients that are written to files while the backward goes on."""


class BufferPool:
    """Flat buffers for gathered parameters, unreduced gradients and shards on their way, kept for the next taker of that size.

    Memory that is new to the process costs a page fault for every 4 kB. CUDA's allocator keeps memory by itself.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._paged: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised buffer."""
        free = self._free[numel, dtype]
        return free.pop() if free and device.type == "cpu" else torch.empty(numel, dtype=dtype, device=device)

    def take_paged(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer on the CPU that files are read into."""
        free = self._paged[numel, dtype]
        return free.pop() if free else paged(numel, dtype)

    def give(self, flat: Tensor) -> None:
        """Takes a buffer back, unless somebody still holds a view of it."""
        storage = flat.untyped_storage()
        if flat.device.type == "cpu" and torch._C._storage_Use_Count(storage._cdata) == 2:  # `flat` and `storage`
            is_paged = storage.data_ptr() % PAGE == 0 and storage.nbytes() > 0 and storage.nbytes() % CHUNK == 0
            (self._paged if is_paged else self._free)[flat.numel(), flat.dtype].append(flat)


class ShardTransfer:
    """Brings shards to where a pass works, and takes gradients from there.

    Args:
        device: where the pass works.
        scratch: where its buffers come from.
        most: how many shards may be on their way from files at once, of those that are asked for before they are needed.
        measure: what is to be known of a shard of gradients that is put.
        in_memory: whether that holds for shards in memory, too: only where nobody changes them but in ways that PyTorch counts.
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
        # What is known, the shard it is known of, and as which version: kept, so that no other has its address.
        self._measured: dict[str, tuple[Tensor, Leaf, int]] = {}
        self._coming: dict[str, Callable[[], Tensor]] = {}
        self._leaving: deque[tuple[str, FileTensor, Tensor, Callable[[], object]]] = deque()
        self._copies_in: torch.cuda.Stream | None = None
        self._copies_out: torch.cuda.Stream | None = None  # while some may be under way

    # --- what comes ----------------------------------------------------------------------------------------------

    def prefetch(self, name: str, x: Leaf) -> None:
        """Starts to bring a shard, if there is room; `bring` gives it."""
        is_here = isinstance(x, Tensor) and x.device == self.device
        if not is_here and name not in self._coming and (self.most is None or len(self._coming) < self.most):
            self._coming[name] = self._start(name, x)

    def load(self, name: str, x: Leaf) -> Tensor:
        """The shard on the device: itself where it lives there, else a copy, to be given back with `scratch.give`."""
        wait = self._coming.pop(name, None) or self._start(name, x)
        return wait()

    def fresh(self, x: Leaf) -> Tensor:
        """A tensor like the shard that `bring` gives, for new numbers; itself where it lives on the device."""
        if isinstance(x, Tensor) and x.device == self.device:
            return x
        if self.device.type == "cpu":
            return self.scratch.take_paged(x.numel(), x.dtype)
        return torch.empty(x.numel(), dtype=x.dtype, device=self.device)

    def each(self, shards: Iterable[tuple[str, Leaf]]) -> Iterator[Tensor]:
        """One shard after the other, on the device, good until the next is asked for; the next is on its way meanwhile."""
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
        if isinstance(x, Tensor) and x.device == self.device:
            return lambda: x
        with profiler_range("bring", name):
            return self._start_file(name, x) if isinstance(x, FileTensor) else self._start_copy(x)

    def _start_copy(self, x: Tensor) -> Callable[[], Tensor]:
        if self._copies_in is None:
            self._copies_in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        if self._copies_out is not None:
            self._copies_in.wait_stream(self._copies_out)  # which may write it
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
            with profiler_range("wait bring", name):
                is_read = wait is not None and kept(x, wait) is not None
            if not is_read:
                flat.zero_()
            if self.device.type == "cpu":
                return flat
            here = flat.to(self.device)
            self.scratch.give(flat)
            return here

        return finish

    # --- what leaves ---------------------------------------------------------------------------------------------

    def put(self, name: str, home: Leaf, values: Tensor, *, adds: bool, measures: bool = False) -> None:
        """Takes values to a shard: in its place, or added to it. They may be freed when this returns, and changed where they live
        with the shard.

        Args:
            name: of the shard, as for `bring`.
            home: where it lives.
            values: on the device; or, added, also where it lives.
            adds: whether it keeps what it holds.
            measures: whether no more comes before somebody asks for what is `known` of it.
        """
        self._measured.pop(name, None)
        if isinstance(home, FileTensor):
            with profiler_range("put", name):
                here = self._put_in_file(name, home, values, adds=adds)
        elif home.device != values.device:
            with profiler_range("put", name):
                here = self._put_in_memory(home, values, adds=adds)
        else:
            here = self._put_in_memory(home, values, adds=adds)
        measures &= isinstance(home, FileTensor) or self._in_memory
        if measures and self._measure is not None and here.numel():
            self._measured[name] = self._measure(here.to(home.dtype)).to(self.device), home, _version(home)

    def known(self, name: str, home: Leaf) -> Tensor | None:
        """What was measured of the shard that lives there, if it was, and nobody has changed it since that PyTorch knows of."""
        if name not in self._measured:
            return None
        number, measured, version = self._measured[name]
        is_same = home is measured or (
            isinstance(home, Tensor)
            and isinstance(measured, Tensor)
            and (home.data_ptr(), home.numel()) == (measured.data_ptr(), measured.numel())
        )
        return number if is_same and _version(home) == version else None

    def _put_in_memory(self, home: Tensor, values: Tensor, *, adds: bool) -> Tensor:
        """The new values, or where they were added."""
        if adds:
            self._end_copies_out()
            return home.add_(values.to(home.device))
        if home.device != values.device:
            self._copy_out(home, values)
        elif home.data_ptr() != values.data_ptr():
            home.copy_(values)
        return values

    def _copy_out(self, home: Tensor, values: Tensor) -> None:
        """Copies to host memory beside what is computed next."""
        if self._copies_out is None:
            self._copies_out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copies_out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies_out):
            home.copy_(values, non_blocking=True)
        values.record_stream(self._copies_out)

    def _end_copies_out(self) -> None:
        """Waits until the host may read what was copied there."""
        if self._copies_out is not None:
            with profiler_range("wait put", "to host memory"):
                self._copies_out.synchronize()
            self._copies_out = None

    def _put_in_file(self, name: str, home: FileTensor, values: Tensor, *, adds: bool) -> Tensor:
        """The same."""
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
        with profiler_range("wait put", name):
            kept(home, wait)
        del wait
        self.scratch.give(flat)

    def settle(self) -> None:
        """Waits until all that was put is where it lives."""
        while self._leaving:
            self._end_leaving()
        self._end_copies_out()

    def abandon(self) -> None:
        """Waits until nothing moves, and forgets what came."""
        for wait in self._coming.values():
            self.scratch.give(wait())
        self._coming.clear()
        self.settle()


def _version(x: Leaf) -> int:
    """Counts the changes of a tensor in memory; a file is changed by nobody else."""
    return x._version if isinstance(x, Tensor) else 0


def own_shard(flat: AnyLeaf, buffer: FlatParamPlan, shard: int) -> AnyLeaf:
    """The rank's shard (S) of a flat buffer, of which it holds all (P), that shard, or that shard and its neighbours."""
    numel = buffer.shard_numel
    if flat.numel() == numel:
        return flat
    start = shard % (flat.numel() // numel) * numel
    own: Any = part_of(flat, start, start + numel)
    return own  # type: ignore[no-any-return]
