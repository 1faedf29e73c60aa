"""How is state updated that lives elsewhere than the update runs, a sub-group at a time, while its neighbours move?

    fetch   | 0 | 1 | 2 | 3 |
    update      | 0 | 1 | 2 | 3 |
    put             | 0 | 1 | 2 | 3 |

A *sub-group* is a range of elements of some flat tensors. `stream_update` runs an update on one after the other, while a `Mover`
fetches the next ones and puts back the last ones. Where they live is the mover's affair: in files, with the update on
the CPU, or in host memory, with the update on a device (`fzero.storage.movers`). At most `1 + read_ahead + write_behind`
sub-groups are here at once, so memory does not grow with the state; (0, 0) is one after the other.

A stream that fails midway leaves part of the state updated. It then tells the mover, whose state cannot be used any more.

`update_streamed` does so with the update of a transform, which must be elementwise. It gives the bits of the update of the whole:
sub-groups are multiples of 32 elements, counters advance once, with the last one, and a transform may be told which elements it
is given (`stochastic` rounding and `out` of `fzero.optim.mixed_precision` need their place).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import optree
from torch import Tensor

from fzero.common.profiler_ranges import profiler_range
from fzero.optim.precision import long_leaves
from fzero.optim.transforms import Transform, leaf_names, separate

LANES = 32
"""Elements of which sub-groups are multiples, so that a vectorised kernel does the same to each as in one go."""


@dataclass(frozen=True, slots=True)
class SubGroup:
    """Elements [start, stop) of the flat tensors of these names.

    Attributes:
        made: the names of those whose old numbers nobody asks for: they need not be fetched.
        kept: the names of those that stay as they are: they need not be put.

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
        """The elements of one of the tensors."""
        return self.stop - self.start

    def __str__(self) -> str:
        """In a trace: the first name, which is that of what is updated, and the elements."""
        return f"{self.names[0]} {self.start}:{self.stop}" if self.names else f"{self.start}:{self.stop}"


class Mover(Protocol):
    """Brings sub-groups to where the update runs, and back. The functions that `fetch` and `put` return wait for the end."""

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        """Raises a ValueError unless `num_alive` of these can be here at once."""

    def fetch(self, sub_group: SubGroup) -> Callable[[], list[Tensor]]:
        """Starts to bring a sub-group; its tensors, in the order of the names, may be written to until it is put.

        Those that it calls `made` may hold anything.
        """

    def put(self, sub_group: SubGroup) -> Callable[[], object]:
        """Starts to take a sub-group back that was fetched, with what stands in its tensors now, but for those that it calls
        `kept`: what becomes of these is of no matter."""

    def fence(self) -> None:
        """Waits for all that was put. Raises if anything failed."""

    def fail(self, cause: BaseException) -> None:
        """Waits until nothing moves; whatever is asked for from now on raises, for the state is not whole."""


def cut(
    names: Sequence[str], numel: int, sub_group_numel: int, *, made: Sequence[str] = (), kept: Sequence[str] = ()
) -> list[SubGroup]:
    """The sub-groups of flat tensors of `numel` elements, in order; a single empty one of empty tensors.

    Args:
        made, kept: see `SubGroup`.

    Raises:
        ValueError: `sub_group_numel` is not a multiple of 32.

    >>> [(group.start, group.stop) for group in cut(("exp_avg",), 100, 64)]
    [(0, 64), (64, 100)]
    """
    if sub_group_numel < LANES or sub_group_numel % LANES:
        raise ValueError(
            f"sub_group_numel: must be a positive multiple of {LANES}, got {sub_group_numel}; round it up, so that vectors "
            f"in the kernels are those of the update as a whole"
        )
    starts = range(0, numel, sub_group_numel) or (0,)
    return [
        SubGroup(tuple(names), start, min(start + sub_group_numel, numel), tuple(made), tuple(kept)) for start in starts
    ]


def stream_update(
    update: Callable[[SubGroup, list[Tensor]], None],
    mover: Mover,
    sub_groups: Sequence[SubGroup],
    *,
    read_ahead: int = 1,
    write_behind: int = 1,
) -> None:
    """Updates sub-groups in order. When it returns, all of them are back where they live.

    Args:
        update: changes the tensors of a sub-group in place.
        sub_groups: each element at most once; those of several flat tensors may follow each other.
        read_ahead, write_behind: how many sub-groups are fetched before, and put after, the one that is being updated.

    Raises:
        ValueError: the mover has no room for that, or a number is negative; nothing was done.
        Exception: that of the update or the mover. The mover's state cannot be used any more then.
    """
    if read_ahead < 0 or write_behind < 0:
        raise ValueError(
            f"stream_update: read_ahead and write_behind must be at least 0, got {read_ahead}, {write_behind}"
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
            with profiler_range("put", sub_group):
                written.append((sub_group, mover.put(sub_group)))
            if len(written) > write_behind:
                _end_put(*written.popleft())
        for put in written:
            _end_put(*put)
        with profiler_range("wait fence"):
            mover.fence()
    except BaseException as error:
        mover.fail(error)
        raise


def _update_fetched(
    update: Callable[[SubGroup, list[Tensor]], None], sub_group: SubGroup, wait: Callable[[], list[Tensor]]
) -> None:
    """A function, so that nothing holds the tensors when they are put."""
    with profiler_range("wait fetch", sub_group):
        tensors = wait()
    with profiler_range("update", sub_group):
        update(sub_group, tensors)


def _end_put(sub_group: SubGroup, wait: Callable[[], object]) -> None:
    with profiler_range("wait put", sub_group):
        wait()


class Streamed(NamedTuple):
    """A flat parameter, or its master, and its optimizer state, which live with a mover; tensors have `numel` elements."""

    names: tuple[str, ...]
    """What the mover calls the parameter, and then the state's long tensors in their order (see `streamed_names`)."""
    numel: int
    transform_at: Callable[..., Transform]
    """The elementwise transform for elements [start, stop); with `out`, for `start, stop, tensor`, into which it must write the
    new parameter, too."""
    grad_at: Callable[[int, int], Tensor] | None
    """The gradient of these elements, where the update runs; the update may write to it. None where `grad` names it."""
    state: Any
    """What does not live there: the transform's state of no elements, `transform.init(torch.empty(0))`, with counters."""
    out: str | None = None
    """What the mover calls the parameters that the model computes with, where they are a copy of what is updated and live with
    it."""
    grad: str | None = None
    """What it calls the gradient, where that lives with it."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """All that the mover moves."""
        return (*self.names, *(name for name in (self.out, self.grad) if name is not None))


def streamed_names(transform: Transform, name: str, state: Any) -> tuple[str, ...]:
    """Names for a parameter and for those tensors of its state that are as long as it is.

    Args:
        state: any of this transform.

    >>> import torch
    >>> from fzero.optim.transforms import adamw
    >>> streamed_names(adamw(0.1), "h.0", adamw(0.1).init(torch.empty(0)))
    ('h.0', 'h.0/state.exp_avg', 'h.0/state.exp_avg_sq')
    """
    longs = zip(leaf_names(state), long_leaves(transform), strict=True)
    return (name, *(f"{name}/{leaf}" for leaf, is_long in longs if is_long))


Work = Callable[[Streamed, SubGroup, dict[str, Tensor]], None]


def init_streamed(
    buffers: Sequence[Streamed],
    param_at: Callable[[str, int, int], Tensor],
    mover: Mover,
    *,
    sub_group_numel: int,
    **ahead: int,
) -> None:
    """Puts parameters, and the state that their transforms begin with, where they live.

    Args:
        param_at: by its name, elements [start, stop) of a parameter as it begins.
        buffers, mover, sub_group_numel, ahead: as in `update_streamed`.
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

    groups = [
        (buffer, group)
        for buffer in buffers
        for group in cut(buffer.all_names, buffer.numel, sub_group_numel, made=buffer.all_names)
    ]
    _stream(init, groups, mover, ahead)


def update_streamed(buffers: Sequence[Streamed], mover: Mover, *, sub_group_numel: int, **ahead: int) -> None:
    """Updates parameters and state where they live, bit for bit as their transforms do with whole tensors.

    Args:
        buffers: in the order in which they are updated, as one stream.
        sub_group_numel: elements of a sub-group, a multiple of 32 (and of what the mover moves).
        ahead: `read_ahead` and `write_behind` of `stream_update`, whose errors these are, too.
    """
    groups = []
    for buffer in buffers:
        made = () if buffer.out is None else (buffer.out,)
        kept = () if buffer.grad is None else (buffer.grad,)
        groups += [
            (buffer, group) for group in cut(buffer.all_names, buffer.numel, sub_group_numel, made=made, kept=kept)
        ]
    _stream(_update, groups, mover, ahead)


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


def _stream(work: Work, groups: Sequence[tuple[Streamed, SubGroup]], mover: Mover, ahead: dict[str, int]) -> None:
    buffer_of = {group.names: buffer for buffer, group in groups}

    def update(group: SubGroup, tensors: list[Tensor]) -> None:
        work(buffer_of[group.names], group, dict(zip(group.names, tensors, strict=True)))

    stream_update(update, mover, [group for _, group in groups], **ahead)
