"""`truncated`: batches cut to a sequence length, for a curriculum of lengths (Li et al.
2021, arXiv:2108.06084).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
from torch import Tensor

__all__ = ["truncated"]


def truncated(
    batch: Any, seqlen: int, *, dims: Mapping[str, int | tuple[int, ...]] | None = None
) -> Any:
    """A batch whose sequences end after `seqlen` positions; a pure transform, for the
    moment before a step.

        n = int(state.step)
        state, metrics = step(state, truncated(batch, schedule(n + 1)))

    Args:
        batch: tensors in tuples, lists and mappings; it is not changed, and tensors
            that are not cut are its own.
        seqlen: positions to keep; a batch that is no longer is returned as it is.
        dims: for a mapping, the sequence dimensions of each tensor by key,
            `{"input_ids": 1, "mask": (2, 3)}`. None cuts dimension 1 of every tensor in
            which that is as long as the longest one of the batch.

    Raises:
        ValueError: `seqlen` is not positive, or `dims` has a key or a dimension that
            the batch does not have.
    """
    if seqlen < 1:
        raise ValueError(
            f"truncated: seqlen must be at least 1, got {seqlen}; raise min_difficulty"
        )
    if dims is not None:
        known = [*batch] if isinstance(batch, Mapping) else []
        missing = [key for key in dims if key not in known]
        if missing:
            of_batch = ", ".join(map(str, known)) or f"a {type(batch).__name__}, which has none"
            raise ValueError(
                f"truncated: dims must name keys of the batch ({of_batch}), got {missing[0]!r}; "
                f"correct the key, or leave dims out to cut dimension 1"
            )
        ways = {key: (own,) if isinstance(own, int) else own for key, own in dims.items()}
        for key, own in ways.items():
            value = batch[key]
            if not isinstance(value, Tensor) or not all(
                -value.dim() <= dim < value.dim() for dim in own
            ):
                given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"truncated: dims must be dimensions of the tensor {key!r}, got {own} for "
                    f"{given}; correct them"
                )
        cut = {key: _cut(batch[key], seqlen, own) for key, own in ways.items()}
        return {**batch, **cut}
    batch = dict(batch) if isinstance(batch, Mapping) else batch  # optree looks into dicts only
    leaves = [x for x in optree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim() >= 2]
    longest = max((x.shape[1] for x in leaves), default=0)

    def one(x: Any) -> Any:
        has_sequence = isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == longest
        return _cut(x, seqlen, (1,)) if has_sequence else x

    return optree.tree_map(one, batch) if longest > seqlen else batch


def _cut(x: Tensor, seqlen: int, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        x = x.narrow(dim, 0, seqlen) if x.shape[dim] > seqlen else x
    return x
