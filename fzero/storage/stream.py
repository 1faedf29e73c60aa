"""`stream_update`: updates offloaded state one sub-group at a time, while the next ones
are read and the last ones written.

    fetch       | 0 | 1 | 2 | 3 |
    update          | 0 | 1 | 2 | 3 |
    write back          | 0 | 1 | 2 | 3 |

A *sub-group* is a range of elements of some flat tensors. Only a `Mover` knows where
they live (`fzero.storage.movers`). At most `1 + read_ahead + write_behind` sub-groups
are in transfer or updated at once, so memory does not grow with the state.

A stream that fails midway leaves part of the state updated. It then marks the mover as
failed; its state cannot be used again.

`update_streamed` is the stream of an elementwise transform's updates. The result has
the same bits as an update of the full tensors: sub-groups are multiples of 32 elements,
and counters advance once, with the last sub-group. A transform may depend on the range
of elements (`stochastic` rounding and `out` of `fzero.optim.mixed_precision` do).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import optree
from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.optim.transforms import Transform, long_leaves, separate

LANES = 32
"""Sub-groups are multiples of so many elements, so that a vectorised kernel rounds as
it does on full tensors.
"""


@dataclass(frozen=True, slots=True)
class SubGroup:
    """Elements [start, stop) of the flat tensors of these names.

    Attributes:
        made: the names of tensors that the update overwrites without reading: they need
            not be fetched.
        kept: the names of tensors that the update does not change: they need not be
            put.

    >>> SubGroup(("exp_avg", "exp_avg_sq"), 0, 64).numel
    64
    """

    names: tuple[str, ...]
    start: int
    stop: int
    made: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        """For traces: the name of the updated tensor, which is the first, and the
        elements.
        """
        return (
            f"{self.names[0]} {self.start}:{self.stop}"
            if self.names
            else f"{self.start}:{self.stop}"
        )


class Mover(Protocol):
    """Moves sub-groups to the device of the update and back. `fetch` and `write_back`
    return functions that wait.
    """

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        """Raises a ValueError unless there is room for `num_alive` of these at once."""

    def fetch(self, sub_group: SubGroup) -> Callable[[], list[Tensor]]:
        """Starts to fetch a sub-group. The caller may write to its tensors, in the
        order of the names, until it is put.

        The contents of its `made` tensors are undefined.
        """

    def write_back(self, sub_group: SubGroup) -> Callable[[], object]:
        """Starts to write the present values of a fetched sub-group back, except its
        `kept` tensors, which are discarded.
        """

    def fence(self) -> None:
        """Waits for everything that was put. Raises if anything failed."""

    def fail(self, cause: BaseException) -> None:
        """Waits for all transfers. Every later call raises, because the state is only
        partly updated.
        """


def cut(
    names: Sequence[str],
    numel: int,
    sub_group_numel: int,
    *,
    made: Sequence[str] = (),
    kept: Sequence[str] = (),
) -> list[SubGroup]:
    """The sub-groups of flat tensors of `numel` elements, in order; for empty tensors a
    single, empty sub-group.

    Args:
        made, kept: see `SubGroup`.

    Raises:
        ValueError: `sub_group_numel` is not a multiple of 32.

    >>> [(group.start, group.stop) for group in cut(("exp_avg",), 100, 64)]
    [(0, 64), (64, 100)]
    """
    if sub_group_numel < LANES or sub_group_numel % LANES:
        raise ValueError(
            f"sub_group_numel: must be a positive multiple of {LANES}, got {sub_group_numel}; "
            f"round it up, so that the kernels use the same vectors as an update of full tensors"
        )
    of_names = {"names": tuple(names), "made": tuple(made), "kept": tuple(kept)}
    starts = range(0, numel, sub_group_numel) or (0,)
    return [
        SubGroup(start=start, stop=min(start + sub_group_numel, numel), **of_names)
        for start in starts
    ]


def stream_update(
    update: Callable[[SubGroup, list[Tensor]], None],
    mover: Mover,
    sub_groups: Sequence[SubGroup],
    *,
    read_ahead: int = 1,
    write_behind: int = 1,
    ended: Callable[[SubGroup], object] = lambda _: None,
) -> None:
    """Updates sub-groups in order. When it returns, all of them have been written back.

    Args:
        update: changes the tensors of a sub-group in place.
        sub_groups: each element at most once; sub-groups of several flat tensors may
            follow each other.
        read_ahead, write_behind: how many sub-groups are in transfer before, and after,
            the one that is being updated.
        ended: is called with each sub-group that has been written back.

    Raises:
        ValueError: the mover has no room for that, or a number is negative; nothing was
            done.
        Exception: from the update or the mover, whose state cannot be used any more
            then.
    """
    if read_ahead < 0 or write_behind < 0:
        raise ValueError(
            f"stream_update: read_ahead and write_behind must be at least 0, got {read_ahead}, "
            f"{write_behind}"
        )
    mover.check(sub_groups, 1 + read_ahead + write_behind)
    fetched: deque[Callable[[], list[Tensor]]] = deque()
    written: deque[tuple[SubGroup, Callable[[], object]]] = deque()
    try:
        for index, sub_group in enumerate(sub_groups):
            for following in sub_groups[index + len(fetched) : index + read_ahead + 1]:
                with profiler_range("fetch", following):
                    fetched.append(mover.fetch(following))
            _update_fetched(update, sub_group, fetched.popleft())
            with profiler_range("write_back", sub_group):
                written.append((sub_group, mover.write_back(sub_group)))
            if len(written) > write_behind:
                ended(_end_put(*written.popleft()))
        for put in written:
            ended(_end_put(*put))
        with profiler_range("wait fence"):
            mover.fence()
    except BaseException as error:
        mover.fail(error)
        raise


def _update_fetched(
    update: Callable[[SubGroup, list[Tensor]], None],
    sub_group: SubGroup,
    wait: Callable[[], list[Tensor]],
) -> None:
    """A function of its own, so that no local variable holds the tensors when they are
    written back.
    """
    with profiler_range("wait fetch", sub_group):
        tensors = wait()
    with profiler_range("update", sub_group):
        update(sub_group, tensors)


def _end_put(sub_group: SubGroup, wait: Callable[[], object]) -> SubGroup:
    with profiler_range("wait write_back", sub_group):
        wait()
    return sub_group


class Streamed(NamedTuple):
    """A flat parameter or its master, with its optimizer state, which a mover moves;
    tensors have `numel` elements.
    """

    names: tuple[str, ...]
    """The mover's names of the parameter and then of the state's long tensors in their
    order.
    """
    numel: int
    transform_at: Callable[..., Transform]
    """The elementwise transform of elements [start, stop). With `out`, called as
    (start, stop, tensor); it must also write the new parameters into the tensor."""
    grad_at: Callable[[int, int], Tensor] | None
    """The gradient of elements [start, stop), on the device of the update, which may
    write to it. None where `grad` names it.
    """
    state: Any
    """The part of the state that is not moved: `transform.init(torch.empty(0))`, with
    counters.
    """
    out: str | None = None
    """The mover's name of the model's parameters, where they are a copy of the updated
    tensor that is moved too.
    """
    grad: str | None = None
    """The mover's name of the gradient, where it is moved too."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all tensors that the mover moves."""
        return (*self.names, *(name for name in (self.out, self.grad) if name is not None))


StreamedUpdate = Callable[[Streamed, SubGroup, dict[str, Tensor]], None]


def init_streamed(
    buffers: Sequence[Streamed],
    param_at: Callable[[str, int, int], Tensor],
    mover: Mover,
    *,
    sub_group_numel: int,
    **ahead: int,
) -> None:
    """Writes the initial parameters, which `param_at(name, start, stop)` returns, and
    optimizer states to their targets.

    The other arguments are those of `update_streamed`.
    """

    def init(buffer: Streamed, group: SubGroup, at: dict[str, Tensor]) -> None:
        param, *tensors = (at[name] for name in buffer.names)
        param.copy_(param_at(buffer.names[0], group.start, group.stop))
        if buffer.out is not None:
            at[buffer.out].copy_(param)
        if buffer.grad is not None:
            at[buffer.grad].zero_()
        transform = buffer.transform_at(group.start, group.stop)
        begun = optree.tree_leaves(transform.init(param))
        longs = [x for x, is_long in zip(begun, long_leaves(transform), strict=True) if is_long]
        for tensor, value in zip(tensors, longs, strict=True):
            tensor.copy_(value)

    groups = []
    for buffer in buffers:
        names = buffer.all_names
        groups += [
            (buffer, group) for group in cut(names, buffer.numel, sub_group_numel, made=names)
        ]
    _stream(init, groups, mover, ahead)


def update_streamed(
    buffers: Sequence[Streamed],
    mover: Mover,
    *,
    sub_group_numel: int,
    ended: Callable[[str], object] = lambda _: None,
    **ahead: int,
) -> None:
    """Updates parameters and state by sub-groups, bit for bit as their transforms do on
    full tensors.

    Args:
        buffers: in the order in which they are updated, as one stream.
        sub_group_numel: elements of a sub-group, a multiple of 32 (and of the mover's
            own granularity).
        ended: is called with the name of the updated tensor of each buffer of which all
            tensors have been written back.
        ahead: `read_ahead` and `write_behind` of `stream_update`, which also documents
            the errors.
    """
    groups = []
    for buffer in buffers:
        made = () if buffer.out is None else (buffer.out,)
        kept = () if buffer.grad is None else (buffer.grad,)
        of_buffer = cut(buffer.all_names, buffer.numel, sub_group_numel, made=made, kept=kept)
        groups += [(buffer, group) for group in of_buffer]
    lasts = {buffer.names[0]: buffer.numel for buffer in buffers}

    def is_back(group: SubGroup) -> None:
        if group.stop == lasts[group.names[0]]:
            ended(group.names[0])

    _stream(_update, groups, mover, {**ahead, "ended": is_back})


def _update(buffer: Streamed, group: SubGroup, at: dict[str, Tensor]) -> None:
    outs = () if buffer.out is None else (at[buffer.out],)
    transform = buffer.transform_at(group.start, group.stop, *outs)
    kept, treespec = optree.tree_flatten(buffer.state)
    param, *longs = (at[name] for name in buffer.names)
    rest = iter(longs)
    is_last = group.stop == buffer.numel  # counters advance once
    old = [
        next(rest) if is_long else x if is_last else x.clone()
        for x, is_long in zip(kept, long_leaves(transform), strict=True)
    ]
    grad = at[buffer.grad] if buffer.grad_at is None else buffer.grad_at(group.start, group.stop)  # type: ignore[index]
    _, *new = transform.update(grad, param, treespec.unflatten(old))
    news = separate([new[0], *treespec.flatten_up_to(new[1])], [param, *old])
    for x, value in zip([param, *old], news, strict=True):
        if value.data_ptr() != x.data_ptr():
            x.copy_(value)


def _stream(
    work: StreamedUpdate,
    groups: Sequence[tuple[Streamed, SubGroup]],
    mover: Mover,
    how: dict[str, Any],
) -> None:
    buffer_of = {group.names: buffer for buffer, group in groups}

    def update(group: SubGroup, tensors: list[Tensor]) -> None:
        work(buffer_of[group.names], group, dict(zip(group.names, tensors, strict=True)))

    stream_update(update, mover, [group for _, group in groups], **how)
