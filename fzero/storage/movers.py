"""The movers of sub-groups between files and the host, or between the host and a
device.

`FileMover`: the state lives in a `FileStore`, and the update runs on the CPU.
`DeviceMover`: it lives in host memory, and the update runs on a device, or the other
way round. `Resident`: it lives where the update runs. `ByName`: each tensor has a mover
of its own. `fzero.storage.stream.Mover` documents their methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.storage.file_store import FileStore
from fzero.storage.host_memory import Pool
from fzero.storage.stream import Mover, SubGroup


class TensorRange(NamedTuple):
    """Elements [start, stop) of the tensor of that name."""

    name: str
    start: int
    stop: int

    def __str__(self) -> str:
        """For traces."""
        return f"{self.name} {self.start}:{self.stop}"


class FileMover:
    """Moves sub-groups between files and the buffers of a pool.

    Args:
        num_buffers: tensors of a sub-group times sub-groups in memory at once. Adam
            moves 3 tensors, the parameter included; with one sub-group read ahead and
            one written behind, that is 3 · 3.
        buffer_nbytes: at least the bytes of one tensor of a sub-group.

    Raises:
        MemoryError: the buffers do not fit in host memory; the message has the bytes
            needed and available.
    """

    def __init__(self, store: FileStore, *, num_buffers: int, buffer_nbytes: int) -> None:
        self.store = store
        # Room for the padding behind the last elements.
        self.pool = Pool(num_buffers, -(-buffer_nbytes // store.grain) * store.grain)
        self._here: dict[SubGroup, list[Tensor]] = {}
        self._coming: dict[TensorRange, tuple[Tensor, Callable[[], Tensor]]] = {}

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        self.store.check()
        needed = num_alive * max((len(group.names) for group in sub_groups), default=0)
        num_free = self.pool.num_free + len(self._coming)
        if needed > num_free:
            raise ValueError(
                f"FileMover: {num_alive} sub-groups at once need {needed} buffers, and {num_free} "
                f"of {self.pool.num} are free; pass num_buffers={needed}, or less read_ahead and "
                f"write_behind"
            )
        for group in sub_groups:
            nbytes = max(
                (self.store.nbytes(name, group.start, group.stop) for name in group.names),
                default=0,
            )
            if nbytes > self.pool.nbytes:
                raise ValueError(
                    f"FileMover: {group.numel} elements of {group.names} need buffers of {nbytes} "
                    f"bytes, and they have {self.pool.nbytes}; pass buffer_nbytes={nbytes}, or a "
                    f"smaller sub_group_numel"
                )

    def prefetch(self, part: TensorRange) -> None:
        """Starts to read one tensor of a sub-group before it is fetched, if a buffer is
        free.
        """
        if part not in self._coming and self.pool.num_free:
            buffer = self.pool.take()
            try:
                with profiler_range("prefetch", part):
                    wait = self.store.read(part.name, part.start, part.stop, buffer)
            except BaseException:
                self.pool.give_back(buffer)
                raise
            self._coming[part] = buffer, wait

    def forget(self, part: TensorRange) -> None:
        """Drops prefetched elements that are being overwritten."""
        for read in [
            x
            for x in self._coming
            if x.name == part.name and x.start < part.stop and part.start < x.stop
        ]:
            self.pool.give_back(self._come(read))

    def take(self) -> Tensor:
        """A buffer: a free one, or that of the latest prefetch."""
        return (
            self.pool.take()
            if self.pool.num_free or not self._coming
            else self._come(next(reversed(self._coming)))
        )

    def _come(self, part: TensorRange) -> Tensor:
        """The buffer of a prefetch, once its read has ended."""
        buffer, wait = self._coming.pop(part)
        wait()
        return buffer

    def fetch(self, sub_group: SubGroup) -> Callable[[], list[Tensor]]:
        buffers, waits = [], []
        for name in sub_group.names:
            part = TensorRange(name, sub_group.start, sub_group.stop)
            if part in self._coming and name not in sub_group.made:
                buffer, wait = self._coming.pop(part)
            else:
                buffer = self.take()
                is_made = name in sub_group.made
                wait = (
                    partial(self.store.view, *part, buffer)
                    if is_made
                    else self.store.read(*part, buffer)
                )
            buffers.append(buffer)
            waits.append(wait)
        self._here[sub_group] = buffers
        return lambda: [wait() for wait in waits]

    def write_back(self, sub_group: SubGroup) -> Callable[[], object]:
        written = [
            TensorRange(n, sub_group.start, sub_group.stop)
            for n in sub_group.names
            if n not in sub_group.kept
        ]
        for part in written:
            self.forget(part)
        by_name = dict(zip(sub_group.names, self._here.pop(sub_group), strict=True))
        waits = {part.name: self.store.write(*part, by_name[part.name]) for part in written}

        def finish() -> None:
            for name, buffer in by_name.items():
                if name in waits:
                    waits[name]()
                self.pool.give_back(buffer)

        return finish

    def fence(self) -> None:
        self.store.fence()

    def fail(self, cause: BaseException) -> None:
        self.store.fail(cause)


class DeviceMover:
    """Moves sub-groups of flat tensors between host memory and a device.

    On CUDA, copies in and copies out each have a stream, so that they overlap each
    other and the update.

    Args:
        tensors: flat, by name; on the CPU (pinned, if copies are to overlap), or all of
            them on one device.
        device: where the update runs: the device, or the CPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
        self.tensors, self.device = tensors, torch.device(device)
        places = (self.device, *(x.device for x in tensors.values()))
        self._card = next((place for place in places if place.type == "cuda"), None)
        make: Callable[..., Any] = torch.cuda.Stream
        self._copies_in, self._copies_out = (
            make(self._card) if self._card else None for _ in range(2)
        )
        self._here: dict[SubGroup, list[Tensor]] = {}
        self._cause: BaseException | None = None

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        self._check()  # memory of the device is not a pool of fixed length

    def fetch(self, sub_group: SubGroup) -> Callable[[], list[Tensor]]:
        self._check()
        is_on_cpu = self.device.type == "cpu"
        if self._copies_in and is_on_cpu:
            # it computes the values to copy
            self._copies_in.wait_stream(torch.cuda.current_stream(self._card))
        copies = []
        with _on(self._copies_in):
            for name in sub_group.names:
                part = self._part(name, sub_group)
                # PyTorch reuses pinned memory for the next sub-group once the last copy from it has
                # ended.
                copy = torch.empty_like(
                    part, device=self.device, pin_memory=is_on_cpu and self._card is not None
                )
                copies.append(
                    copy if name in sub_group.made else copy.copy_(part, non_blocking=True)
                )
            is_here = self._copies_in.record_event() if self._copies_in else None
        self._here[sub_group] = copies

        def finish() -> list[Tensor]:
            if is_here is not None and is_on_cpu:
                is_here.synchronize()
            elif is_here is not None:
                computing = torch.cuda.current_stream(self._card)
                computing.wait_event(is_here)
                for x in copies:
                    x.record_stream(computing)
            return copies

        return finish

    def write_back(self, sub_group: SubGroup) -> Callable[[], object]:
        self._check()
        copies = self._here.pop(sub_group)
        if self._copies_out is not None:
            self._copies_out.wait_stream(torch.cuda.current_stream(self._card))
        with _on(self._copies_out):
            for name, x in zip(sub_group.names, copies, strict=True):
                if name not in sub_group.kept:
                    self._part(name, sub_group).copy_(x, non_blocking=True)
                if self._copies_out is not None and x.is_cuda:
                    x.record_stream(self._copies_out)
            is_out = self._copies_out.record_event() if self._copies_out else None
        return is_out.synchronize if is_out is not None else lambda: None

    def fence(self) -> None:
        if self._copies_out is not None:
            self._copies_out.synchronize()
        self._check()

    def fail(self, cause: BaseException) -> None:
        self._cause = self._cause or cause
        for stream in (self._copies_in, self._copies_out):
            if stream is not None:
                stream.synchronize()

    def _part(self, name: str, group: SubGroup) -> Tensor:
        return self.tensors[name][group.start : group.stop]

    def _check(self) -> None:
        if self._cause is not None:
            raise RuntimeError(
                f"DeviceMover: part of the state was updated and part was not, since: "
                f"{self._cause}; go on from a checkpoint"
            ) from self._cause


class Resident:
    """Gives sub-groups as views of flat tensors that are where the update runs."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        pass

    def fetch(self, sub_group: SubGroup) -> Callable[[], list[Tensor]]:
        return lambda: [
            self.tensors[name][sub_group.start : sub_group.stop] for name in sub_group.names
        ]

    def write_back(self, sub_group: SubGroup) -> Callable[[], object]:
        """See `Mover`: the views have changed the tensors already."""
        return lambda: None

    def fence(self) -> None:
        pass

    def fail(self, cause: BaseException) -> None:
        """See `Mover`: the tensors are left partly updated."""


class ByName:
    """Moves each tensor of a sub-group with its own mover."""

    def __init__(self, mover_of: Mapping[str, Mover]) -> None:
        self._mover_of = mover_of
        self._movers = list({id(mover): mover for mover in mover_of.values()}.values())

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        parts = [self._parts(group) for group in sub_groups]
        for mover in self._movers:
            mover.check(
                [part for of_group in parts for owner, part in of_group if owner is mover],
                num_alive,
            )

    def fetch(self, sub_group: SubGroup) -> Callable[[], list[Tensor]]:
        waits = [(part.names, mover.fetch(part)) for mover, part in self._parts(sub_group)]

        def finish() -> list[Tensor]:
            found = {
                name: x for names, wait in waits for name, x in zip(names, wait(), strict=True)
            }
            return [found[name] for name in sub_group.names]

        return finish

    def write_back(self, sub_group: SubGroup) -> Callable[[], object]:
        waits = [mover.write_back(part) for mover, part in self._parts(sub_group)]
        return lambda: [wait() for wait in waits]

    def fence(self) -> None:
        for mover in self._movers:
            mover.fence()

    def fail(self, cause: BaseException) -> None:
        for mover in self._movers:
            mover.fail(cause)

    def _parts(self, group: SubGroup) -> list[tuple[Mover, SubGroup]]:
        """Each mover's part of a sub-group."""
        parts = []
        for mover in self._movers:
            names = tuple(name for name in group.names if self._mover_of[name] is mover)
            if names:
                made, kept = (tuple(n for n in of if n in names) for of in (group.made, group.kept))
                parts.append((mover, SubGroup(names, group.start, group.stop, made, kept)))
        return parts


def _on(stream: Any) -> Any:
    """A context in which CUDA work runs on that stream, if there is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
