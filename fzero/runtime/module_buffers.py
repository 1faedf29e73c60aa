"""`agree`: makes the module buffers that steps change equal on all ranks.

A forward writes into a buffer, or replaces it by another tensor. The ranks agree once
on which buffers steps change. These are averaged in every step, so that BatchNorm's
running statistics cover the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.records import Label
from fzero.model.errors import not_a_view
from fzero.model.module_index import ModuleIndex
from fzero.model.tensor_checks import check_unchanged
from fzero.runtime.finish import mean_in_rank_order
from fzero.state import TrainState

if TYPE_CHECKING:
    from fzero.runtime.step_runtime import StepRuntime


def moved(buffers: Mapping[str, Tensor], before: Mapping[str, tuple[Tensor, int]]) -> set[str]:
    """The names of buffers that were replaced by another tensor, or changed in place."""
    return {
        n
        for n, (tensor, version) in before.items()
        if buffers[n] is not tensor or tensor._version != version
    }


def check_no_views(index: ModuleIndex, holds: Callable[[Tensor], bool]) -> None:
    """Raises ValueError if a persistent buffer of a bound model is in the memory of a
    parameter (`holds` decides).
    """
    for slot in index.slots("_buffers"):
        if (buffer := slot.owner[slot.key]) is not None and not slot.is_cache and holds(buffer):
            raise not_a_view(slot.name)


def agree(
    run: StepRuntime,
    state: TrainState[Tensor],
    buffers: Mapping[str, Tensor],
    before: Mapping[str, tuple[Tensor, int]],
    news_AW: Tensor,
) -> frozenset[str]:
    """Makes the buffers that steps change equal on all ranks, and returns their names.
    *Collective:* every rank.

    Args:
        state: from before the step.
        buffers, before: after the forwards of the step, and before them (see `moved`).
        news_AW: the number of buffers that changed for the first time, by micro-step
            and rank.
    """
    changed, moving = moved(buffers, before), run.learned.moving_buffers
    if moving is None:  # kernels such as BatchNorm's change a buffer without its version
        changed |= run.statistics | {
            n for n in buffers if not torch.equal(buffers[n], state.buffers[n])
        }
    check_unchanged(changed, run.learned.sharing)
    run.changes.check_unread(changed)
    # On CUDA the host would wait for the device here, to read whether any rank has a newly changed
    # buffer.
    has_news = bool(news_AW.any()) if run.device.type == "cpu" else run.spec.schedule != "learned"
    return make_equal(
        buffers, changed, moving, run.mesh.world, has_news=has_news, ranges=run.changes.ranges
    )


def make_equal(
    buffers: Mapping[str, Tensor],
    moved: set[str],
    moving: frozenset[str] | None,
    world: RankAxis,
    *,
    has_news: bool,
    ranges: Collection[str] = (),
) -> frozenset[str]:
    """Makes buffers that steps change equal on all ranks, in place: averages inexact
    ones, takes rank 0's others.

    *Collective:* every rank.

    Args:
        buffers: all buffers, after the forwards of this step.
        moved: the names of the buffers that changed on this rank.
        moving: the names that the ranks have agreed on so far; None before the first
            agreement.
        ranges: the buffers that hold (min, max), of which all ranks take the least and
            the largest.
        has_news: whether, on any rank, a buffer changed that is not in `moving`; then
            the ranks agree again.

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
            f"buffer {min(unexpected)!r}: changed for the first time after the first step (on the "
            f"CPU: in the backward), too late for the ranks to agree to average it; change it once "
            f"in the first forward"
        )
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for name, buffer in buffers.items():
        if name in moving:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    of_range = {id(buffers[name]) for name in ranges if name in buffers}
    for alike in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in alike])
        rows_WN = collectives.stack(flat, world, label=Label("buffers", phase="update"))
        agreed = agreed_buffers(
            rows_WN, range_starts([(b.numel(), id(b) in of_range) for b in alike])
        )
        for buffer, values in zip(
            alike, torch.split(agreed, [buffer.numel() for buffer in alike]), strict=True
        ):
            buffer.copy_(values.view(buffer.shape))
    return moving


def range_starts(sizes: Iterable[tuple[int, bool]]) -> list[int]:
    """The index of the minimum of each range (min, max) in the concatenation of these
    buffers.

    Args:
        sizes: the elements of each buffer, and whether it is a range.

    >>> range_starts([(3, False), (2, True), (2, True)])
    [3, 5]
    """
    places, start = [], 0
    for numel, is_range in sizes:
        places += [start] if is_range else []
        start += numel
    return places


def agreed_buffers(rows_WN: Tensor, ranges: Sequence[int] = ()) -> Tensor:
    """One value (N,) for the module buffers of all ranks: the mean for floating and
    complex ones, rank 0's for others.

    Args:
        ranges: the indices of (min, max) pairs; of these the least and the largest
            value of all ranks are taken.
    """
    if not (rows_WN.dtype.is_floating_point or rows_WN.dtype.is_complex):
        return rows_WN[0]
    if ranges:
        mean_N = agreed_buffers(rows_WN)
        places = torch.tensor(ranges, device=rows_WN.device)
        mean_N = mean_N.index_copy(0, places, rows_WN[:, places].amin(0))
        return mean_N.index_copy(0, places + 1, rows_WN[:, places + 1].amax(0))
    # If all ranks have equal values, these must not change, not even in the last bit.
    return torch.where((rows_WN == rows_WN[0]).all(dim=0), rows_WN[0], mean_in_rank_order(rows_WN))
