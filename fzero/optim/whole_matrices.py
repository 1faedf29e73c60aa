"""Optimizers of whole matrices, written for one matrix: `MatrixTransform`, and the
transform of flat buffers that it makes.

The author writes three functions of a stack (n, R, C) of matrices of one shape. fzero
does the rest: momentum on shards, the transfer to the owner of each matrix and back
(`fzero.optim.owner_calls`), weight decay and the step on shards. The state of the
matrices is flat, too, divided like the parameters, so that it is saved, loaded and
resharded as these are.

Shape letters: n matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.optim.fragments import ShardContents
from fzero.optim.owner_calls import Calls, OwnerCall
from fzero.optim.transforms import (
    Leaf,
    Transform,
    add_times,
    calling,
    check_range,
    no_steps,
    step_spec,
)
from sharding import TensorSpec
from sharding.layout import FlatLayout
from sharding.owners import Matrix, OwnedBuffer, matrices_of


class MatrixTransform(NamedTuple):
    """The triple of an optimizer of whole matrices.

    Attributes:
        init: a stack (n, R, C) of zeros -> the state, a pytree of tensors (n, …). It
            depends on shapes alone.
        update: (stack, state, counts) -> (directions (n, R, C), new state). The stack
            holds gradients, or their momentum; `counts` (n,), float32, the number of
            this update, from 1 (0 if there is no state). Each matrix must be treated alone.
        specs: the `TensorSpec` of one matrix (R, C) -> the state of one matrix, as
            `TensorSpec`s.

    >>> signs = MatrixTransform(
    ...     lambda x: (), lambda x, state, counts: (x.sign(), state), lambda spec: ()
    ... )
    """

    init: Callable[[Tensor], Any]
    update: Callable[[Tensor, Any, Tensor], tuple[Tensor, Any]]
    specs: Callable[[TensorSpec], Any]


class MatrixState(NamedTuple, Generic[Leaf]):
    """The state of an optimizer of whole matrices.

    Attributes:
        step: counts updates (0-d float32); None if the matrices have no state.
        momentum: the running mean of gradients, in the parameter's shape; None if there
            is none.
        matrices: the state of the matrices, as `MatrixTransform.init` makes it; each
            tensor is flat, the entries of all matrices one after another.
    """

    step: Leaf | None
    momentum: Leaf | None
    matrices: Any


@dataclass(frozen=True, slots=True)
class EntriesSpec(TensorSpec):
    """The spec of a flat tensor that holds other entries of each parameter than its
    elements, in the places that `layout` says.
    """

    layout: FlatLayout = field(default_factory=lambda: FlatLayout((), (), 1))


@dataclass(frozen=True, slots=True)
class ComputeLayout:
    """Where the matrices of a flat buffer and their states are.

    Attributes:
        matrices: in the order of the layout.
        layouts: of the buffer, and of each tensor of the state.
        buffers: the same, with owners; none for a shard without owners.
        shapes: by tensor and matrix, the shape of its entries.
        treespec: the structure of the state.
    """

    matrix: MatrixTransform
    matrices: tuple[Matrix, ...]
    layouts: tuple[FlatLayout, ...]
    buffers: tuple[OwnedBuffer, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    treespec: optree.PyTreeSpec

    def init(self, param: Tensor, contents: ShardContents) -> list[Tensor]:
        """The state's tensors, as much of each as the flat tensor holds."""
        made = {
            matrix.shape: optree.tree_leaves(self.matrix.init(param.new_zeros(1, *matrix.shape)))
            for matrix in self.matrices
        }
        found = []
        for k, layout in enumerate(self.layouts[1:]):
            numel = layout.partition.shard_numel
            first, last = contents.ranks[0] * numel, (contents.ranks[-1] + 1) * numel
            flat = param.new_zeros(last - first)
            if made:
                flat = flat.to(next(iter(made.values()))[k].dtype)
            for matrix, shape in zip(self.matrices, self.shapes[k + 1], strict=True):
                start = layout.bounds(matrix.name)[0] + _index(matrix) * math.prod(shape)
                begin, end = max(start, first), min(start + math.prod(shape), last)
                if begin < end:
                    values = made[matrix.shape][k].reshape(-1)
                    flat[begin - first : end - first] = values[begin - start : end - start]
            found.append(flat)
        return found

    def specs(self, param: TensorSpec) -> list[TensorSpec]:
        """The specs of the state's tensors."""
        dtypes = [
            spec.dtype
            for spec in optree.tree_leaves(self.matrix.specs(TensorSpec((1, 1), param.dtype)))
        ]
        return [
            EntriesSpec(
                (layout.partition.padded_numel,),
                dtype,
                param.spec,
                param.placement,
                param.multiple_of,
                layout,
            )
            for layout, dtype in zip(self.layouts[1:], dtypes, strict=True)
        ]


def entries_of(layout: FlatLayout, matrices: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """The entries of each matrix in the layout of a state (`EntriesSpec`)."""
    found = []
    for matrix in matrices:
        _, length = layout.shape(matrix.name)
        found.append(Matrix(matrix.name, _index(matrix) * length, length, 1, 0))
    return tuple(found)


def _index(matrix: Matrix) -> int:
    """The number of a matrix among those of its parameter."""
    return matrix.start // max(matrix.numel, 1)


@lru_cache(maxsize=4096)  # an update asks again, with the values of the last one
def compute_layout(
    layout: FlatLayout,
    parts: tuple[tuple[str, int], ...],
    matrix: MatrixTransform,
    owners: tuple[int, ...] | None,
    places: tuple[tuple[int, int], ...],
    holds: Literal["shard", "full"],
) -> ComputeLayout:
    """The compute layout of a flat buffer; without `owners` that of a single rank."""
    matrices = matrices_of(layout, parts=dict(parts))
    specs = optree.tree_flatten(matrix.specs(TensorSpec((1, 1), "float32")))
    states = [
        [spec.shape for spec in optree.tree_leaves(matrix.specs(TensorSpec(each.shape, "float32")))]
        for each in matrices
    ]
    layouts, entries = [layout], [matrices]
    shapes = [tuple(each.shape for each in matrices)]
    for k in range(len(specs[0])):
        of_leaf = tuple(shapes_of[k] for shapes_of in states)
        numbers: dict[str, int] = {}
        lengths: dict[str, int] = {}
        for each, shape in zip(matrices, of_leaf, strict=True):
            numbers[each.name] = numbers.get(each.name, 0) + 1
            lengths[each.name] = math.prod(shape)
        layouts.append(
            FlatLayout(
                layout.names,
                tuple((numbers.get(name, 0), lengths.get(name, 0)) for name in layout.names),
                layout.world_size,
                layout.multiple_of,
            )
        )
        entries.append(entries_of(layouts[-1], matrices))
        shapes.append(of_leaf)
    if owners is None:
        owners = (0,) * len(matrices)
    buffers = tuple(
        OwnedBuffer(of_tensor, of_layout, owners, places, holds)
        for of_tensor, of_layout in zip(layouts, entries, strict=True)
    )
    return ComputeLayout(matrix, matrices, tuple(layouts), buffers, tuple(shapes), specs[1])


def owned_transform(
    name: str,
    matrix: MatrixTransform,
    lr: float | Tensor,
    *,
    contents: ShardContents,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    scale: Callable[[int, int], float] | None = None,
    send_dtype: torch.dtype | None = None,
    reply_dtype: torch.dtype | None = None,
    parts: Mapping[str, int] = {},
) -> Transform:
    """The transform of a flat tensor from that of its matrices.

    *Collective:* an update sends each matrix from its shards to its owner, and the
    result back: together at most the elements of the shard, and of the matrices that
    the rank owns (`sharding.owners.OwnedBuffer.num_sent`).

    Args:
        name: of the optimizer, for error messages.
        momentum: the weight of the past in the running mean of gradients; None has no
            mean, and the owners get the gradients.
        scale: the length of a step of a matrix of R rows and C columns, times `lr`.
        send_dtype, reply_dtype: the dtypes in which matrices are sent to owners, and
            results back; None is that of the gradient.
        parts: see `sharding.owners.matrices_of`.

    Raises:
        ValueError: a parameter is not a matrix, or cannot be cut into its parts.
    """
    check_range(name, lr=lr, momentum=momentum or 0.0, weight_decay=weight_decay)
    layout, holds = contents.layout, contents.holds
    try:
        compute = compute_layout(
            layout, tuple(sorted(parts.items())), matrix, contents.owners, contents.places, holds
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    treespec, counts_updates = compute.treespec, len(compute.layouts) > 1
    lengths = {each.name: 1.0 if scale is None else scale(*each.shape) for each in compute.matrices}

    def init(param: Tensor) -> MatrixState[Tensor]:
        contents.check(name, param)
        return MatrixState(
            no_steps(param) if counts_updates else None,
            None if momentum is None else torch.zeros_like(param),
            treespec.unflatten(compute.init(param, contents)),
        )

    def run(stack: Tensor, entries: tuple[Tensor, ...], counts: Tensor) -> Any:
        result, new = matrix.update(stack, treespec.unflatten(entries), counts)
        return result, treespec.flatten_up_to(new)

    def calls(grad: Tensor, param: Tensor, state: MatrixState[Tensor]) -> Calls:
        step = None if state.step is None else state.step.add_(1)
        direction = grad
        if momentum is not None and state.momentum is not None:
            state.momentum.lerp_(grad, 1 - momentum)
            direction = grad.lerp_(state.momentum, momentum) if nesterov else state.momentum
        reply, *new = yield OwnerCall(
            run,
            (name, matrix),
            (
                direction if send_dtype is None else direction.to(send_dtype),
                *treespec.flatten_up_to(state.matrices),
            ),
            compute.buffers,
            compute.shapes,
            no_steps(param) if step is None else step,
            direction.dtype if reply_dtype is None else reply_dtype,
            contents.rank,
            contents.exchange,
        )
        if weight_decay:
            param.mul_(1 - lr * weight_decay)
        for part in contents.parts:
            length = lengths[layout.names[part.index]]
            add_times(part.of(param), part.of(reply), -lr * length)
        return grad, param, MatrixState(step, state.momentum, treespec.unflatten(new))

    update = calling(calls)

    def specs(param: TensorSpec) -> MatrixState[TensorSpec]:
        return MatrixState(
            step_spec(param) if counts_updates else None,
            None if momentum is None else param,
            treespec.unflatten(compute.specs(param)),
        )

    return Transform(init, update, specs, calls=(update, calls))
