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
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Generic, Literal, NamedTuple, Self

import optree
import torch
from torch import Tensor

from fzero.optim.adam_kernels import adamw
from fzero.optim.elementwise import check_elementwise
from fzero.optim.fragments import ByContents, ShardContents
from fzero.optim.owner_calls import Calls, OwnerCall
from fzero.optim.transforms import (
    Leaf,
    Transform,
    add_times,
    check_range,
    no_steps,
    step_spec,
    update_by,
)
from sharding import TensorSpec
from sharding.layout import FlatLayout
from sharding.owners import (
    Matrices,
    Matrix,
    OwnedBuffer,
    Work,
    matrices_of,
    newton_schulz_flops,
)
from sharding.views import dtype_name, torch_dtype

Apply = Callable[[Tensor, Tensor, Any], Tensor]
"""(parameter, direction, rate) -> the new parameter, element by element."""


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

    @classmethod
    def of(cls, param: TensorSpec, layout: FlatLayout, dtype: str) -> Self:
        """The spec of a tensor that is divided and placed like the parameters."""
        shape = (layout.partition.padded_numel,)
        return cls(shape, dtype, param.spec, param.placement, param.multiple_of, layout)


@dataclass(frozen=True, slots=True)
class ComputeLayout:
    """Where the matrices of a flat buffer and their states are.

    Attributes:
        buffers: the flat buffer, and each tensor of the state, with owners.
        shapes: by tensor and matrix, the shape of its entries.
        treespec: the structure of the state.
    """

    matrix: MatrixTransform
    buffers: tuple[OwnedBuffer, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    treespec: optree.PyTreeSpec

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """In the order of the flat buffer."""
        return self.buffers[0].matrices

    @property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """Of each tensor of the state."""
        return tuple(buffer.layout for buffer in self.buffers[1:])

    def init(self, param: Tensor, contents: ShardContents) -> list[Tensor]:
        """The state's tensors, as much of each as the flat tensor holds."""
        made = {
            matrix.shape: optree.tree_leaves(self.matrix.init(param.new_zeros(1, *matrix.shape)))
            for matrix in self.matrices
        }
        found = []
        for k, layout in enumerate(self.layouts):
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
            EntriesSpec.of(param, layout, dtype)
            for layout, dtype in zip(self.layouts, dtypes, strict=True)
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
    treespec = optree.tree_structure(matrix.specs(TensorSpec((1, 1), "float32")))
    states = [
        [spec.shape for spec in optree.tree_leaves(matrix.specs(TensorSpec(each.shape, "float32")))]
        for each in matrices
    ]
    shapes = tuple(tuple(shapes_of[k] for shapes_of in states) for k in range(treespec.num_leaves))
    buffers = owned_buffers(layout, matrices, shapes, owners, places, holds)
    of_matrices = tuple(each.shape for each in matrices)
    return ComputeLayout(matrix, buffers, (of_matrices, *shapes), treespec)


@lru_cache(maxsize=4096)  # likewise
def owned_buffers(
    layout: FlatLayout,
    matrices: tuple[Matrix, ...],
    shapes: tuple[tuple[tuple[int, ...], ...], ...],
    owners: tuple[int, ...] | None,
    places: tuple[tuple[int, int], ...],
    holds: Literal["shard", "full"],
) -> tuple[OwnedBuffer, ...]:
    """A flat buffer, and the flat tensors of its state, with the owners of the matrices;
    without `owners` those of a single rank.

    Args:
        shapes: by tensor of the state and matrix, the shape of its entries.
    """
    how = (0,) * len(matrices) if owners is None else owners, places, holds
    found = [OwnedBuffer(layout, matrices, *how)]
    for of_leaf in shapes:
        numbers = Counter(each.name for each in matrices)
        lengths = {m.name: math.prod(shape) for m, shape in zip(matrices, of_leaf, strict=True)}
        of_entries = FlatLayout(
            layout.names,
            tuple((numbers[name], lengths.get(name, 0)) for name in layout.names),
            layout.world_size,
            layout.multiple_of,
        )
        found.append(OwnedBuffer(of_entries, entries_of(of_entries, matrices), *how))
    return tuple(found)


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
    apply: Apply | None = None,
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
        apply: the new parameter; None subtracts `lr · scale · direction`.

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
    treespec, counts_updates = compute.treespec, bool(compute.layouts)
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
            rate, old = lr * lengths[layout.names[part.index]], part.of(param)
            if apply is None:
                add_times(old, part.of(reply), -rate)
            else:
                old.copy_(apply(old, part.of(reply), rate))
        return grad, param, MatrixState(step, state.momentum, treespec.unflatten(new))

    update = partial(update_by, calls)

    def specs(param: TensorSpec) -> MatrixState[TensorSpec]:
        return MatrixState(
            step_spec(param) if counts_updates else None,
            None if momentum is None else param,
            treespec.unflatten(compute.specs(param)),
        )

    return Transform(init, update, specs, calls=(update, calls))


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix that is neither an embedding nor the output layer,
    by its name.

    >>> is_hidden_matrix("h.0.mlp.weight", (4, 8)), is_hidden_matrix("wte.weight", (9, 4))
    (True, False)
    """
    is_other = any(x in name.lower() for x in ("embed", "wte", "wpe", "lm_head"))
    return len(shape) >= 2 and not is_other


@dataclass(frozen=True)
class MatrixOptimizer(ByContents):
    """An optimizer of a model: `matrix` for the parameters that `takes` selects, and
    `others` for the rest. `matrix_transform` makes and documents it.
    """

    matrix: MatrixTransform
    name: str
    momentum: float | None
    nesterov: bool
    weight_decay: float
    scale: Callable[[int, int], float] | None
    sends: str | None
    parts: Mapping[str, int]
    takes: Callable[[str, tuple[int, ...]], bool]
    others: Callable[[Any], Transform]
    work: Work
    apply: Apply | None = None

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        return "matrix" if self.takes(name, tuple(shape)) else "other"

    def is_elementwise(self, kind: str) -> bool:
        return kind == "other"

    def matrices(self, layout: FlatLayout, kind: str) -> Matrices | None:
        if kind != "matrix":
            return None
        try:
            found = matrices_of(layout, parts=self._parts_of(layout), work=self.work)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return Matrices(found, (self.sends or "float32",), "float32")

    def check(self, field: str) -> None:
        check_matrices(self.matrix, name=f"{field} ({self.name})")
        check_elementwise(self.others(1e-3), name=f"{field}.others")
        if self.apply is not None:
            _check_apply(self.apply, f"{field} ({self.name})")

    def __call__(self, lr: Any, contents: ShardContents | None = None, kind: str = "") -> Transform:
        if kind == "other":
            return self.others(lr)
        contents = contents or ShardContents.whole(FlatLayout(("x",), ((4, 8),), 1))
        return owned_transform(
            self.name,
            self.matrix,
            lr,
            contents=contents,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            scale=self.scale,
            send_dtype=None if self.sends is None else torch_dtype(self.sends),
            parts=self._parts_of(contents.layout),
            apply=self.apply,
        )

    def _parts_of(self, layout: FlatLayout) -> dict[str, int]:
        """The parts of each parameter: those of the first pattern that its name has."""
        found = {}
        for name in layout.names:
            number = next((n for pattern, n in self.parts.items() if re.search(pattern, name)), 1)
            if number != 1:
                found[name] = number
        return found


def matrix_transform(
    matrix: MatrixTransform,
    *,
    name: str = "matrix_transform",
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    scale: Callable[[int, int], float] | None = None,
    sends: Literal["bfloat16"] | None = None,
    parts: Mapping[str, int] = {},
    takes: Callable[[str, tuple[int, ...]], bool] = is_hidden_matrix,
    others: Callable[[Any], Transform] = adamw,
    work: Work = newton_schulz_flops,
    apply: Apply | None = None,
) -> MatrixOptimizer:
    """An optimizer of whole matrices, for `make_train_step(…, transform=…)`.

    Each matrix is computed by one rank, its owner (`sharding.owners`). *Collective:* an
    update sends the matrices and their states to the owners, and the results back.

    Args:
        matrix: the functions of a stack of matrices.
        name: of the optimizer, for error messages.
        momentum: the weight of the past in a running mean of gradients, which `matrix`
            then gets instead of the gradients.
        nesterov: whether the newest gradient is mixed in once more.
        weight_decay: decoupled: parameters shrink by `lr · weight_decay` per update.
        scale: the length of a step of a matrix of R rows and C columns, times `lr`.
        sends: the dtype in which gradients or momentum go to owners; None is that of
            the update.
        parts: by a regular expression on the name, the number of equal blocks of rows
            into which a parameter is cut, each a matrix of its own: heads, or q, k, v.
        takes: which parameters, by name and shape, `matrix` updates.
        others: a function of the learning rate that makes the elementwise transform of
            all other parameters.
        work: the work of a matrix of R rows and C columns, by which owners are chosen.
        apply: (parameter, direction, lr · scale) -> the new parameter, element by
            element, on shards: a weight decay of your own, say. None subtracts the
            direction times `lr · scale`.

    >>> signs = MatrixTransform(lambda x: (), lambda x, s, n: (x.sign(), s), lambda spec: ())
    >>> optimizer = matrix_transform(signs, momentum=0.9)
    >>> optimizer.kind_of("h.0.weight", (4, 8)), optimizer.kind_of("h.0.bias", (4,))
    ('matrix', 'other')
    """
    check_range(name, momentum=momentum or 0.0, weight_decay=weight_decay)
    return MatrixOptimizer(
        matrix,
        name,
        momentum,
        nesterov,
        weight_decay,
        scale,
        sends,
        parts,
        takes,
        others,
        work,
        apply,
    )


def _check_apply(apply: Apply, name: str) -> None:
    """Raises a ValueError unless a tensor's new values are those of its halves."""
    generator = torch.Generator().manual_seed(0)
    param, direction = torch.randn(2, 8, generator=generator)
    whole = apply(param.clone(), direction.clone(), 0.1)
    halves = [apply(param[of], direction[of], 0.1) for of in (slice(0, 4), slice(4, 8))]
    if whole.shape != param.shape or not torch.allclose(whole, torch.cat(halves)):
        raise ValueError(
            f"{name}: apply must return the new parameter element by element, and two halves of a "
            f"tensor have other values than the tensor; compute what needs whole matrices in update"
        )


def check_matrices(matrix: MatrixTransform, *, name: str = "matrix") -> None:
    """Raises a ValueError unless a `MatrixTransform` keeps its laws on random stacks:
    `specs` describes what `init` makes, `init` depends on the shape alone, each matrix of
    a stack is treated alone, and everything that it keeps is in its state.
    """
    generator = torch.Generator().manual_seed(0)
    for shape in ((4, 6), (6, 4), (5, 5)):
        stacks = torch.randn(3, 2, *shape, generator=generator)
        zeros = torch.zeros(2, *shape)
        state = matrix.init(zeros)
        specs = optree.tree_leaves(matrix.specs(TensorSpec(shape, "float32")))
        made = optree.tree_leaves(state)
        described = [(spec.shape, spec.dtype) for spec in specs]
        found = [(tuple(x.shape[1:]), dtype_name(x.dtype)) for x in made]
        if described != found:
            raise ValueError(
                f"{name}: specs must describe the state of one matrix of shape {shape}, which init "
                f"makes as {found}, got {described}; return the shapes without the number of "
                f"matrices"
            )
        _check_equal(name, "init must depend on shapes alone", made, matrix.init(stacks[0]))
        runs = [_updates(name, matrix, stacks, shape) for _ in range(2)]
        _check_equal(name, "update must keep everything in its state", runs[0], runs[1])
        for index in range(2):
            alone = _updates(name, matrix, stacks[:, index : index + 1], shape)
            own = [x[index : index + 1] for x in runs[0]]
            _check_equal(name, "update must treat each matrix of a stack alone", own, alone, 1e-4)


def _updates(
    name: str, matrix: MatrixTransform, stacks: Tensor, shape: tuple[int, int]
) -> list[Tensor]:
    """The directions and the last state of updates with each stack."""
    state, found = matrix.init(torch.zeros(len(stacks[0]), *shape)), []
    for count, stack in enumerate(stacks, 1):
        counts = torch.full((len(stack),), float(count))
        direction, state = matrix.update(stack.clone(), state, counts)
        if direction.shape != stack.shape:
            raise ValueError(
                f"{name}: update must return a direction of the stack's shape {tuple(stack.shape)}, got "
                f"{tuple(direction.shape)}; return (directions, state)"
            )
        found.append(direction)
    return [*found, *optree.tree_leaves(state)]


def _check_equal(name: str, rule: str, expected: Any, found: Any, tolerance: float = 0.0) -> None:
    """Raises unless tensors are equal; a product of a batch may round in another way."""
    pairs = zip(optree.tree_leaves(expected), optree.tree_leaves(found), strict=True)
    for index, (x, y) in enumerate(pairs):
        if not torch.allclose(x, y, rtol=tolerance, atol=tolerance):
            far = (x - y).abs().max().item()
            raise ValueError(
                f"{name}: {rule}, and tensor {index} of its result differs by {far:.1e}; compute "
                f"it from the arguments"
            )
