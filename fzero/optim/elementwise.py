"""Checks that a transform is elementwise: a shard of its update is the update of that
shard.

No number of runs can prove that. The checks try random numbers, long runs, large
tensors and counts of updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.optim.transforms import Transform, check_transform_kind, leaf_names, same_bits
from sharding import Sharded, TensorSpec
from sharding.views import dtype_name


class Trial(NamedTuple):
    """Updates of a flat tensor of random numbers, by which a transform is tested."""

    numel: int
    num_updates: int
    start: int = 0
    """The number to which the state's own counts of updates are set before the first
    one.
    """


SHORT_TRIAL = Trial(numel=128, num_updates=4)

LONG_RUN, LARGE = 128, 1 << 16
"""The number of updates in the longest trial, and of elements in the largest one."""

LATE_STARTS = (498, 998, 2046, 9_998)
"""Counts of updates shortly before a round number."""

TRIALS = (
    Trial(numel=128, num_updates=LONG_RUN),
    *(Trial(numel=128, num_updates=4, start=start) for start in LATE_STARTS),
    Trial(numel=LARGE, num_updates=2),
)
"""The trials of `check_elementwise`."""


def check_elementwise(transform: Transform, *, name: str = "transform") -> None:
    """Raises unless a shard of the update is the update of a shard, as far as updates
    of random numbers show.

    A transform that passes may update shards without knowing which parameters they
    hold. The length of every shard is a multiple of 32, so that vectorised kernels
    treat all elements alike.

    The check runs on the CPU: 128 updates one after the other, a few more around the
    500th, 1000th, 2048th and 10,000th (for a transform whose state has a 0-d count of
    updates), and two updates of 65,536 elements. It does not see the behaviour at other
    counts, with more elements or for other numbers. `fzero.testing.check_transform`
    tries more.

    Raises:
        ValueError: two halves, updated one by one, differ in some bit from the full
            update.

    >>> norm = Transform(
    ...     lambda p: None, lambda g, p, s: (g, p - g / g.norm(), s), lambda spec: None
    ... )
    >>> check_elementwise(norm, name="norm")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: norm: must be elementwise, ...
    >>> from fzero.optim.adam_kernels import adamw
    >>> check_elementwise(adamw(1e-3))
    """
    check_transform_kind(name, transform)
    check_trials(transform, TRIALS, name=name)


def check_trials(transform: Transform, trials: Sequence[Trial], *, name: str) -> None:
    """The check of `check_elementwise`, with other trials."""
    for trial in trials:
        param, grads = trial_tensors(torch.float32, trial)
        half = len(param) // 2
        with torch.random.fork_rng(devices=[]):
            differs = find_cut(
                transform, param, grads, ((0, half), (half, len(param))), start=trial.start
            )
        if differs:
            raise ValueError(
                f"{name}: must be elementwise, but updates of the two halves ({half} elements "
                f"each) differ from the full update in {differs}; a shard does not know the "
                f"elements of other ranks, so use a transform that takes `contents`"
            )


def find_cut(
    transform: Transform,
    param: Tensor,
    grads: Sequence[Tensor] | Tensor,
    bounds: Sequence[tuple[int, int]],
    start: int = 0,
) -> str | None:
    """The first tensor in which slices of a flat tensor, updated one by one, differ
    from the full update; None is no tensor.

    Args:
        param, grads: the parameter and a gradient for each update, flat; they are not
            changed.
        bounds: where each slice starts and stops; together they are all elements, in
            order.
        start: the state's counts of updates before the first one; see `started`.
    """
    slices = [slice(0, len(param)), *(slice(*bound) for bound in bounds)]
    params = [param[of].clone() for of in slices]
    states = [started(transform, x, start) for x in params]
    names = leaf_names(states[0])
    for count, grad in enumerate(grads, start + 1):
        updated = [
            transform.update(grad[of].clone(), x, state)
            for of, x, state in zip(slices, params, states)
        ]
        params, states = [x for _, x, _ in updated], [state for _, _, state in updated]
        if not same_bits(torch.cat(params[1:]), params[0]):
            return f"the parameter after update {count}"
    sharded = TensorSpec(tuple(param.shape), dtype_name(param.dtype), Sharded("data"))
    specs = optree.tree_leaves(transform.specs(sharded))
    leaves = [optree.tree_leaves(state) for state in states]
    for index, (spec, full, *of_slices) in enumerate(zip(specs, *leaves, strict=True)):
        joined = [torch.cat(of_slices)] if isinstance(spec.spec, Sharded) else of_slices
        if not all(same_bits(x, full) for x in joined):
            return names[index]
    return None


def started(transform: Transform, param: Tensor, count: int) -> Any:
    """The state of `init`, with its counts of updates set to `count`.

    >>> from fzero.optim.adam_kernels import adamw
    >>> started(adamw(1e-3), torch.zeros(2), 9_999).step
    tensor(9999.)
    """
    state = transform.init(param)
    return at_count(state, counts_of(transform), count) if count else state


def at_count(state: Any, counts: Sequence[int], count: int) -> Any:
    """The state with `count` in the tensors whose indices among its tensors are
    `counts`.
    """
    leaves, treespec = optree.tree_flatten(state)
    return treespec.unflatten(
        [torch.full_like(x, count) if i in counts else x for i, x in enumerate(leaves)]
    )


def counts_of(transform: Transform) -> list[int]:
    """The indices, among the tensors of a state, of its counts: 0-d tensors that each
    of the first two updates raises by one.
    """
    param, grads = trial_tensors(torch.float32, Trial(numel=32, num_updates=2))
    state = transform.init(param)
    values = [[x.clone() for x in optree.tree_leaves(state)]]
    for grad in grads:
        _, param, state = transform.update(grad, param, state)
        values.append([x.clone() for x in optree.tree_leaves(state)])
    return [
        i
        for i, (x, y, z) in enumerate(zip(*values, strict=True))
        if x.dim() == 0 and y == x + 1 and z == x + 2
    ]


def trial_tensors(dtype: torch.dtype, trial: Trial = SHORT_TRIAL) -> tuple[Tensor, Tensor]:
    """A parameter (numel,) and a gradient for each update (num_updates, numel), random
    and of very different magnitudes.
    """
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(trial.numel, generator=generator)
    grads = torch.randn(trial.num_updates, trial.numel, generator=generator) * torch.logspace(
        -3, 2, trial.numel
    )
    return param.to(dtype), grads.to(dtype)
