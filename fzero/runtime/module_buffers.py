"""`make_equal`: makes the module buffers that steps change equal on all ranks.

A forward writes into a buffer, or replaces it by another tensor. The ranks agree once on which buffers steps change. These
are averaged in every step, so that BatchNorm's running statistics cover the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.records import Label
from fzero.model.errors import not_a_view
from fzero.runtime.loss import agreed_buffers, range_places


def moved(buffers: Mapping[str, Tensor], before: Mapping[str, tuple[Tensor, int]]) -> set[str]:
    """The names of buffers that were replaced by another tensor, or changed in place."""
    return {n for n, (tensor, version) in before.items() if buffers[n] is not tensor or tensor._version != version}


def check_no_views(model: nn.Module, holds: Callable[[Tensor], bool]) -> None:
    """Raises ValueError if a persistent buffer of a bound model is in the memory of a parameter (`holds` decides)."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set and holds(buffer):
                raise not_a_view(f"{prefix}.{key}" if prefix else key)


def make_equal(
    buffers: Mapping[str, Tensor],
    moved: set[str],
    moving: frozenset[str] | None,
    world: RankAxis,
    *,
    has_news: bool,
    ranges: Collection[str] = (),
) -> frozenset[str]:
    """Makes buffers that steps change equal on all ranks, in place: averages inexact ones, takes rank 0's others.

    *Collective:* every rank.

    Args:
        buffers: all buffers, after the forwards of this step.
        moved: the names of the buffers that changed on this rank.
        moving: the names that the ranks have agreed on so far; None before the first agreement.
        ranges: the buffers that hold (min, max), of which all ranks take the least and the largest.
        has_news: whether, on any rank, a buffer changed that is not in `moving`; then the ranks agree again.

    Returns:
        The names of the buffers that steps change.

    Raises:
        ValueError: a buffer changed too late to be agreed on.
    """
    if world.size == 1 or not buffers:
        return (moving or frozenset()) | moved
    if moving is None or has_news:
        moved_on = collectives.exchange(moved, world, label=Label("agree", phase="update"))
        moving = (moving or frozenset()).union(*moved_on)
    unexpected = moved - moving
    if unexpected:
        raise ValueError(
            f"buffer {min(unexpected)!r}: changed for the first time after the first step (on the CPU: in the backward), too "
            f"late for the ranks to agree to average it; change it once in the first forward"
        )
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for name, buffer in buffers.items():
        if name in moving:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    of_range = {id(buffers[name]) for name in ranges if name in buffers}
    for alike in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in alike])
        rows_WN = collectives.stack(flat, world, label=Label("buffers", phase="update"))
        agreed = agreed_buffers(rows_WN, range_places([(b.numel(), id(b) in of_range) for b in alike]))
        for buffer, values in zip(alike, torch.split(agreed, [buffer.numel() for buffer in alike]), strict=True):
            buffer.copy_(values.view(buffer.shape))
    return moving
