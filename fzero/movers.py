"""Between which memories does a stream of sub-groups move: files and the host, or the host and a device?

`FileMover`: the state lives in a `FileStore`, and the update runs on the CPU, in buffers of a pool that is made once.
`DeviceMover`: it lives in host memory, and the update runs on a device. On CUDA copies in and copies out have streams of their
own, so that they run beside each other and beside the update; pin the host tensors, for others are copied while the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fzero.file_store import FileStore
from fzero.host_buffers import Pool
from fzero.stream import SubGroup


class FileMover:
    """Moves sub-groups between files and the buffers of a pool.

    Args:
        store: where the tensors live.
        num_buffers: one for each tensor of each sub-group that is here at once: for Adam beside its parameter, with one sub-group
            read ahead and one written behind, 3 · 3.
        buffer_nbytes: at least those of one tensor of a sub-group.

    Raises:
        MemoryError: the buffers do not fit in the host's memory; tells what is needed and what is there.
    """

    def __init__(self, store: FileStore, *, num_buffers: int, buffer_nbytes: int) -> None:
        self.store = store
        # Room for the padding behind the last elements.
        self.pool = Pool(num_buffers, -(-buffer_nbytes // store.grain) * store.grain)
        self._here: dict[SubGroup, list[Tensor]] = {}

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        """See `Mover`."""
        self.store.check()
        needed = num_alive * max((len(group.names) for group in sub_groups), default=0)
        if needed > self.pool.num_free:
            raise ValueError(
                f"FileMover: {num_alive} sub-groups at once need {needed} buffers, and {self.pool.num_free} of "
                f"{self.pool.num} are free; pass num_buffers={needed}, or less read_ahead and write_behind"
            )
        for group in sub_groups:
            nbytes = max((self.store.nbytes(name, group.start, group.stop) for name in group.names), default=0)
            if nbytes > self.pool.nbytes:
                raise ValueError(
                    f"FileMover: {group.numel} elements of {group.names} need buffers of {nbytes} bytes, and they have "
                    f"{self.pool.nbytes}; pass buffer_nbytes={nbytes}, or a smaller sub_group_numel"
                )

    def fetch(self, sub_group: SubGroup) -> Callable[[], list[Tensor]]:
        """See `Mover`."""
        buffers = self._here[sub_group] = [self.pool.take() for _ in sub_group.names]
        waits = self._start(self.store.read, sub_group, buffers)
        return lambda: [wait() for wait in waits]

    def put(self, sub_group: SubGroup) -> Callable[[], object]:
        """See `Mover`."""
        buffers = self._here.pop(sub_group)
        waits = self._start(self.store.write, sub_group, buffers)

        def finish() -> None:
            for wait, buffer in zip(waits, buffers, strict=True):
                wait()
                self.pool.give_back(buffer)

        return finish

    def _start(
        self, move: Callable[[str, int, int, Tensor], Callable[[], Tensor]], group: SubGroup, buffers: list[Tensor]
    ) -> list[Callable[[], Tensor]]:
        return [move(name, group.start, group.stop, buffer) for name, buffer in zip(group.names, buffers, strict=True)]

    def fence(self) -> None:
        """See `Mover`."""
        self.store.fence()

    def fail(self, cause: BaseException) -> None:
        """See `Mover`."""
        self.store.fail(cause)


class DeviceMover:
    """Moves sub-groups between flat tensors in host memory and a device.

    Args:
        tensors: flat, by name, on the CPU; pinned if copies are to overlap.
        device: where the update runs.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
        self.tensors, self.device = tensors, torch.device(device)
        is_cuda = self.device.type == "cuda"
        make: Callable[..., Any] = torch.cuda.Stream
        self._copies_in, self._copies_out = (make(self.device) if is_cuda else None for _ in range(2))
        self._here: dict[SubGroup, list[Tensor]] = {}
        self._cause: BaseException | None = None

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        """See `Mover`: memory of the device is not a pool of fixed length."""
        self._check()

    def fetch(self, sub_group: SubGroup) -> Callable[[], list[Tensor]]:
        """See `Mover`."""
        self._check()
        with _on(self._copies_in):
            copies = [
                self._part(name, sub_group).to(self.device, non_blocking=True, copy=True) for name in sub_group.names
            ]
            is_here = self._copies_in.record_event() if self._copies_in else None
        self._here[sub_group] = copies

        def finish() -> list[Tensor]:
            if is_here is not None:
                computing = torch.cuda.current_stream(self.device)
                computing.wait_event(is_here)
                for x in copies:
                    x.record_stream(computing)
            return copies

        return finish

    def put(self, sub_group: SubGroup) -> Callable[[], object]:
        """See `Mover`."""
        self._check()
        copies = self._here.pop(sub_group)
        if self._copies_out is not None:
            self._copies_out.wait_stream(torch.cuda.current_stream(self.device))
        with _on(self._copies_out):
            for name, x in zip(sub_group.names, copies, strict=True):
                self._part(name, sub_group).copy_(x, non_blocking=True)
                if self._copies_out is not None:
                    x.record_stream(self._copies_out)
            is_out = self._copies_out.record_event() if self._copies_out else None
        return is_out.synchronize if is_out is not None else lambda: None

    def fence(self) -> None:
        """See `Mover`."""
        if self._copies_out is not None:
            self._copies_out.synchronize()
        self._check()

    def fail(self, cause: BaseException) -> None:
        """See `Mover`."""
        self._cause = self._cause or cause
        for stream in (self._copies_in, self._copies_out):
            if stream is not None:
                stream.synchronize()

    def _part(self, name: str, group: SubGroup) -> Tensor:
        return self.tensors[name][group.start : group.stop]

    def _check(self) -> None:
        if self._cause is not None:
            raise RuntimeError(
                f"DeviceMover: part of the state was updated and part was not, since: {self._cause}; go on from a checkpoint"
            ) from self._cause


def _on(stream: Any) -> Any:
    """The block runs on that stream, if there is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
