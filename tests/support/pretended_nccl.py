"""Are collectives in order with the streams around them, where there is no NCCL?

    with PretendedCuda() as card, pretended_nccl(card):
        ...collectives of tensors on the device, among ranks that gloo has joined...

Each process group has a stream, as in NCCL. A collective runs there, after the work
that is on the current stream at its start, and the host goes on. `Work.wait` lets the
current stream wait for it, not the host. Until then the work keeps its tensors; a work
that nobody waits for keeps them for ever. So a tensor that is read or written too early
is a race, and memory that is given back too early is found (`pretended_cuda`). Sums are
in rank order.

The numbers go through gloo at once, which waits for the other ranks: ranks that start
collectives in different orders hang here, as they may in NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from pretended_cuda import Event, PretendedCuda, Stream
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fzero.comms import collectives

_REAL = {
    name: getattr(dist, name)
    for name in ("all_gather", "all_reduce", "all_to_all_single", "broadcast")
}


class Work:
    """`ProcessGroupNCCL`'s `Work`."""

    def __init__(self, ended: Event, tensors: Sequence[Tensor]) -> None:
        self._ended, self._tensors = ended, list(tensors)

    def wait(self) -> bool:
        self._ended.wait()
        self._tensors.clear()
        return True


def summed(out: Tensor, rows: Sequence[Tensor]) -> None:
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    out.copy_(total)


class Nccl:
    """The collectives that fzero calls, of tensors on the device; those of the host go
    to gloo.
    """

    def __init__(self, card: PretendedCuda) -> None:
        self._card, self._streams = card, dict[Any, Stream]()
        self.started: list[str] = []
        """The names of the collectives so far."""

    def _launch(
        self,
        name: str,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        group: Any,
        run: Callable[[], object],
    ) -> Work:
        """Runs a collective on its group's stream; both sides must be on the device."""
        card = self._card
        assert {card.kind(x) for x in (*read, *written)} == {"device"}, name
        assert all(x.is_contiguous() for x in (*read, *written)), f"{name}: must be contiguous"
        card.sweep()
        stream = self._streams.setdefault(group or dist.group.WORLD, Stream(card))
        stream.wait_stream(card.current)
        count = card.launch(stream)
        for x in read:
            card._use(x, stream, count, name, writes=False)
        for x in written:
            card._use(x, stream, count, name, writes=True)
        with _disable_current_modes():
            run()
        self.started.append(name)
        return Work(stream.record_event(), [*read, *written])

    def _ends(self, work: Work, is_async: bool) -> Work | None:
        if is_async:
            return work
        work.wait()
        return None

    def _rows(self, x: Tensor, group: Any) -> list[Tensor]:
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        _REAL["all_gather"](rows, x, group=group)
        return rows

    def all_gather_into_tensor(
        self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        def run() -> None:
            parts = torch.split(out.view(-1), x.numel())
            for part, row in zip(parts, self._rows(x.reshape(-1), group), strict=True):
                part.copy_(row)

        return self._ends(self._launch("all_gather_into_tensor", [x], [out], group, run), async_op)

    def reduce_scatter_tensor(
        self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        def run() -> None:
            rank, numel = dist.get_rank(group), out.numel()
            summed(
                out,
                [row[rank * numel : (rank + 1) * numel] for row in self._rows(x.view(-1), group)],
            )

        return self._ends(self._launch("reduce_scatter_tensor", [x], [out], group, run), async_op)

    def all_reduce(self, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not x.is_cuda:
            return _REAL["all_reduce"](x, group=group, async_op=async_op)
        run = lambda: summed(x, self._rows(x, group))  # noqa: E731
        return self._ends(self._launch("all_reduce", [], [x], group, run), async_op)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        def run() -> None:
            rank, rows = dist.get_rank(group), self._rows(x, group)
            for part, row in zip(out.unbind(), rows, strict=True):
                part.copy_(row[rank])

        return self._ends(self._launch("all_to_all_single", [x], [out], group, run), async_op)

    def all_gather(
        self, rows: list[Tensor], x: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if not x.is_cuda:
            return _REAL["all_gather"](rows, x, group=group, async_op=async_op)
        run = lambda: _REAL["all_gather"](rows, x, group=group)  # noqa: E731
        return self._ends(self._launch("all_gather", [x], rows, group, run), async_op)

    def broadcast(self, x: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        if not x.is_cuda:
            return _REAL["broadcast"](x, src, group=group, async_op=async_op)
        run = lambda: _REAL["broadcast"](x, src, group=group)  # noqa: E731
        return self._ends(self._launch("broadcast", [], [x], group, run), async_op)


@contextmanager
def pretended_nccl(card: PretendedCuda) -> Iterator[Nccl]:
    """Inside, fzero's collectives of tensors on the device are those of a pretended
    NCCL.
    """
    nccl = Nccl(card)
    # c10d asks
    capability = patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with (
        capability,
        patch.multiple(dist, **{name: getattr(nccl, name) for name in _REAL}),
        patch.multiple(
            collectives,
            _all_gather=nccl.all_gather_into_tensor,
            _reduce_scatter=nccl.reduce_scatter_tensor,
        ),
        patch("fzero.runtime.step_spec.check_backend", lambda device: None),
    ):
        yield nccl
