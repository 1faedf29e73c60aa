"""Optimizers as transforms of flat buffers: the update of a gradient, a parameter and a
state.

A transform is three pure functions, in the manner of optax, of one flat buffer. The
buffer has any number N of elements: in stage 0 it is a full buffer, in other stages a
shard, and no transform knows which.

- `init(param_N)` makes the state, a NamedTuple of tensors.
- `update(grad_N, param_N, state)` returns the new gradient, parameter and state. Its
  arguments are *donated*: it may write into them and return them. Callers copy what
  they want to keep first (as `fzero.optimizer_update` does).
- `specs(param_spec)` returns, from the parameter's spec, how each tensor of the state
  is divided and where it lives.

A link of a `chain` that changes gradients (`scale`, say) returns the parameter
unchanged. A link that changes the parameter consumes the gradient. Both have one type,
so that a fused kernel is a link like any other.

The transforms of `fzero.optim.adam_kernels` and `fzero.optim.optimizers` are
elementwise: a shard of the update is the update of a shard. Those of
`fzero.optim.matrix` are not. `fzero.optim.elementwise` checks whether a transform is
elementwise.

An update is computed in fp32 (fp64 for fp64), whatever the dtypes in memory:
`mixed_precision` wraps a transform, so that it reads narrow numbers and rounds once, at
the end. Rounding to the nearest loses updates smaller than half the last bit;
`fzero.optim.rounding` keeps them on average.

A learning rate may be a 0-d tensor. Then it is data in a captured graph and not a
constant. Fused kernels cannot be captured; a graph holds the same formula, operation by
operation, for a compiler to fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import is_
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from fzero.optim.owner_calls import Calls, run_together
from sharding import Replicated, TensorSpec
from sharding.views import dtype_name, torch_dtype

Leaf = TypeVar("Leaf")
"""The type of the leaves of a state: tensors, or their specs."""


class Transform(NamedTuple):
    """The triple (init, update, specs), with an `update_skip_if` for kernels that can
    skip an update.

    A kernel that updates several buffers in one call adds the pair `fused`. Its second
    item is the function of lists, which writes in place and returns the states. Its
    first item is the `update` that it equals: if `update` is replaced by another
    function, `fused` no longer applies.

    A transform that looks at whole matrices adds the pair `calls`, likewise: its second
    item is the update as a generator, which calls the owners of matrices
    (`fzero.optim.owner_calls`). The updates of several buffers call them together.
    """

    init: Callable[[Tensor], Any]
    update: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor, Any]]
    specs: Callable[[TensorSpec], Any]
    update_skip_if: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor, Any]] | None = (
        None
    )
    fused: (
        tuple[Any, Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], list[Any]]] | None
    ) = None
    calls: tuple[Any, Callable[[Tensor, Tensor, Any], Calls]] | None = None

    @property
    def calls_owners(self) -> bool:
        """Whether an update calls the owners of matrices."""
        return self.calls is not None and self.calls[0] is self.update

    def start(self, grad: Tensor, param: Tensor, state: Any) -> Calls:
        """The update as a generator; without calls of owners it is made at once."""
        if self.calls is not None and self.calls_owners:
            return self.calls[1](grad, param, state)
        return _at_once(self, grad, param, state)

    @property
    def is_fused(self) -> bool:
        """Whether one call updates several buffers."""
        return self.fused is not None and self.fused[0] is self.update

    def update_each(
        self, grads: Sequence[Tensor], params: Sequence[Tensor], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        """The parameters and states after the updates of several buffers, in one call
        if there is a kernel for that.
        """
        if self.fused is not None and self.is_fused:
            return list(params), self.fused[1](grads, params, states)
        updated = [self.update(*of) for of in zip(grads, params, states, strict=True)]
        return [param for _, param, _ in updated], [state for _, _, state in updated]


def _at_once(transform: Transform, grad: Tensor, param: Tensor, state: Any) -> Calls:
    updated = transform.update(grad, param, state)
    yield from ()
    return updated


def update_by(
    calls: Callable[[Tensor, Tensor, Any], Calls], grad: Tensor, param: Tensor, state: Any
) -> tuple[Tensor, Tensor, Any]:
    """The update of one flat tensor by the generator that calls owners."""
    (updated,) = run_together([calls(grad, param, state)])
    result: tuple[Tensor, Tensor, Any] = updated
    return result


def is_traced() -> bool:
    """Whether the code is captured in a graph or runs under `torch.vmap`, where fused
    kernels cannot run.
    """
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def skip_if(skip: Tensor, transform: Transform) -> Transform:
    """The transform whose update leaves parameter and state unchanged if `skip` is true
    (a 0-d bool).

    The host does not read `skip`: the choice is part of the data flow. A skipped
    gradient may hold any values, also NaN.
    """

    def calls(grad: Tensor, param: Tensor, state: Any) -> Calls:
        leaves, treespec = optree.tree_flatten(state)
        old = [param, *leaves]
        kept = [x.clone() for x in old]
        if transform.calls_owners:  # decompositions of matrices that are not finite raise
            grad.masked_fill_(skip, 0.0)
        _, *new = yield from transform.start(grad, param, state)
        chosen = [
            torch.where(skip, x, y)
            for x, y in zip(kept, [new[0], *treespec.flatten_up_to(new[1])], strict=True)
        ]
        for x, value in zip(old, chosen, strict=True):
            x.copy_(value)
        return grad, param, state

    def update(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        if transform.update_skip_if is not None and not is_traced():
            return transform.update_skip_if(skip, grad, param, state)
        return update_by(calls, grad, param, state)

    pair = (update, calls) if transform.calls_owners else None
    return Transform(transform.init, update, transform.specs, calls=pair)


def chain(*transforms: Transform) -> Transform:
    """The transforms one after the other; the state is the tuple of their states.

    >>> from fzero.optim.optimizers import scale, sgd
    >>> halved = chain(scale(0.5), sgd(lr=1.0))
    >>> grad, param = torch.tensor([4.0]), torch.tensor([10.0])
    >>> halved.update(grad, param, halved.init(param))[1]
    tensor([8.])
    """
    for index, transform in enumerate(transforms):
        check_transform_kind(f"chain[{index}]", transform)

    def init(param: Tensor) -> tuple[Any, ...]:
        return tuple(transform.init(param) for transform in transforms)

    def update(
        grad: Tensor, param: Tensor, state: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        new_state = []
        for transform, old in zip(transforms, state, strict=True):
            grad, param, new = transform.update(grad, param, old)
            new_state.append(new)
        return grad, param, tuple(new_state)

    def specs(param: TensorSpec) -> tuple[Any, ...]:
        return tuple(transform.specs(param) for transform in transforms)

    return Transform(init, update, specs)


_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def separate(news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
    """The new values. One that shares memory with another old value is copied, because
    the old one may be written first.
    """
    return [
        new
        if is_in_place(new, old) or not any(new is x or _is_alias_of(new, x) for x in olds)
        else new.clone()
        for new, old in zip(news, olds, strict=True)
    ]


def is_in_place(new: Tensor, old: Tensor) -> bool:
    """Whether a new value has been written into the old tensor. A trace has no
    addresses to compare.
    """
    return new is old or (_is_alias_of(new, old) and new.storage_offset() == old.storage_offset())


Rate = float | Tensor
"""A number, or a 0-d tensor that holds it."""


def add_times(x: Tensor, y: Tensor, factor: Rate) -> Tensor:
    """Adds `factor * y` to `x`, in place. It rounds once if the factor is a number,
    twice (product, sum) if it is a tensor.
    """
    return x.add_(y.to(x.dtype) * factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)


def lerp(x: Tensor, y: Tensor, weight: Rate) -> Tensor:
    """Sets `x` to `x + weight * (y - x)`, in place."""
    return x.lerp_(y, weight.to(x.dtype)) if isinstance(weight, Tensor) else x.lerp_(y, weight)


def run_fused(
    kernel: Callable[..., None],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *moments: Sequence[Tensor],
) -> None:
    """Calls a fused kernel of PyTorch, which writes parameters and moments in place.

    On the CPU such a kernel ignores strides and takes numel consecutive elements: it
    would pair wrong elements, and write past the end of an expanded tensor. So a tensor
    that is not contiguous goes through a copy.
    """
    written = [params, *moments]
    # a contiguous tensor is not copied
    copies = [[x.contiguous() for x in tensors] for tensors in written]
    kernel(copies[0], [x.contiguous() for x in grads], *copies[1:])
    for tensors, dense in zip(written, copies, strict=True):
        for x, copy in zip(tensors, dense, strict=True):
            if copy is not x:
                x.copy_(copy)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and elements; a NaN equals a NaN
    of the same bits.
    """
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(x, y) or torch.equal(
        x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)
    )


def leaf_names(state: Any) -> list[str]:
    """The tensors of a state, each as the Python expression that reads it.

    >>> from fzero.optim.adam_kernels import AdamState
    >>> leaf_names(AdamState(torch.zeros(()), torch.zeros(1), torch.zeros(1)))
    ['state.step', 'state.exp_avg', 'state.exp_avg_sq']
    """
    return [accessor.codify("state") for accessor in optree.tree_accessors(state)]


def check_transform_kind(name: str, transform: object) -> None:
    """Raises unless `transform` is a transform, and not a function that makes one."""
    if not isinstance(transform, Transform) or not all(map(callable, transform[:3])):
        raise ValueError(
            f"{name}: must be a Transform of three functions, got {transform!r:.80}; pass "
            f"fzero.adamw(1e-3), say"
        )


def _is_unknown(value: Rate) -> bool:
    """Whether a number is in a tensor that a trace does not read."""
    return isinstance(value, Tensor) and is_traced()


def check_betas(name: str, betas: tuple[Rate, float]) -> None:
    """Raises unless both are in [0, 1)."""
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not is_pair or not all(_is_unknown(beta) or 0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"{name}: each of betas must be in [0, 1), got {betas}; 0.9 for the first is usual"
        )


def no_steps(param: Tensor) -> Tensor:
    """The count of updates before the first one: a float32, as in torch.optim, on the
    parameter's device.
    """
    return torch.zeros((), dtype=torch.float32, device=param.device)


def step_spec(param: TensorSpec) -> TensorSpec:
    """The spec of that count: every rank has it."""
    return replace(param, shape=(), dtype="float32", spec=Replicated(), multiple_of=1)


def check_range(name: str, **values: Rate) -> None:
    """Raises unless all are numbers of at least 0."""
    for field, value in values.items():
        if not _is_unknown(value) and not (isinstance(value, int | float | Tensor) and value >= 0):
            raise ValueError(
                f"{name}: {field} must be at least 0, got {value!r}; pass a number that is not "
                f"negative"
            )


# --- updates of narrow numbers --------------------------------------------------------------------

TILE = 1 << 19
"""Elements that a processor updates at a time, so that their temporary tensors fit into
its cache.
"""


TILES_ON_GPU = 128
"""As many tiles are one on a GPU. The wide gradient of one takes 256 MB, while no
activations are there; a block of 50M parameters is one tile, where smaller ones would
add small kernels (counters, flags) to each."""


NUM_SALTS = 16
"""The largest number of tensors of one update that a graph rounds at random."""


Rounding = Callable[[Tensor, Tensor, int, int], None]
"""Writes wide numbers into narrow ones: (wide, narrow, start, index). The narrow
numbers are a slice of a tensor from `start` on; `index` is the index of that tensor in
the update."""


def to_nearest(wide: Tensor, narrow: Tensor, start: int, index: int) -> None:
    narrow.copy_(wide)


def mixed_precision(
    transform: Transform,
    *,
    state_dtype: str,
    rounding: Rounding = to_nearest,
    factor: Tensor | None = None,
    out: Tensor | None = None,
    tile: int | None = TILE,
) -> Transform:
    """A transform of narrow numbers: `transform` computed in fp32 (fp64 if the
    parameter is fp64), and rounded at the end.

    Args:
        transform: elementwise, unless `tile` is None.
        state_dtype: the dtype of the state's tensors of the parameter's shape; others
            keep the dtype of `transform.init`.
        rounding: rounds wide numbers to narrow ones.
        factor: multiplies the gradient (0-d).
        out: the new parameter is also written here, in the dtype of `out`.
        tile: the number of elements that are updated at a time. None updates all at
            once: in a graph a compiler makes the tiles.
    """
    kept = torch_dtype(state_dtype)
    is_cast = [
        (spec.shape, spec.dtype) == (_PROBE.shape, _PROBE.dtype)
        for spec in _probed(transform.specs)
    ]

    def init(param: Tensor) -> Any:
        leaves, treespec = optree.tree_flatten(transform.init(param.to(_wide_dtype(param))))
        return treespec.unflatten(
            [x.to(kept) if cast else x for x, cast in zip(leaves, is_cast, strict=True)]
        )

    def calls(grad: Tensor, param: Tensor, state: Any) -> Calls:
        leaves, treespec = optree.tree_flatten(state)
        dtype, numel = _wide_dtype(param), param.numel()
        size = (
            _most(tile, param)
            if tile and ({grad.dtype, param.dtype} != {dtype} or out is not None)
            else numel
        )
        num_tiles = -(-numel // size) if numel > size else 1
        widen = _widener(dtype, size) if num_tiles > 1 else lambda x, _: x.to(dtype)
        wide_factor = None if factor is None else factor.to(dtype)
        cut = partial(_tiles, size=size, num_tiles=num_tiles)
        rest = [
            cut(x, is_long=long) for x, long in zip(leaves, long_leaves(transform), strict=True)
        ]
        outs = [None] * num_tiles if out is None else cut(out)
        tiles = zip(cut(grad), cut(param), outs, *rest, strict=True)
        for place, (narrow_grad, narrow_param, new_param, *old) in enumerate(tiles):
            wide_grad = widen(narrow_grad, "grad")
            if wide_factor is not None:
                wide_grad.mul_(wide_factor)
            wide = [
                widen(x, i) if cast else x
                for i, (x, cast) in enumerate(zip(old, is_cast, strict=True))
            ]
            given = wide_grad, widen(narrow_param, "param"), treespec.unflatten(wide)
            # a generator for each tile would cost as much as a small update
            updated = (
                (yield from transform.start(*given))
                if transform.calls_owners
                else transform.update(*given)
            )
            narrows, news = [narrow_param, *old], [updated[1], *treespec.flatten_up_to(updated[2])]
            if not all(map(is_, narrows, news)):
                written = zip(separate(news, narrows), narrows, [True, *is_cast], strict=True)
                for index, (new, narrow, cast) in enumerate(written):
                    if not is_in_place(new, narrow):
                        (rounding if cast else to_nearest)(new, narrow, place * size, index)
            if new_param is not None:
                new_param.copy_(narrow_param)
        return grad, param, state

    update = partial(update_by, calls)

    def update_fused(
        grads: Sequence[Tensor], params: Sequence[Tensor], states: Sequence[Any]
    ) -> list[Any]:
        found = {x.dtype for x in (*grads, *params)}
        is_wide = (
            out is None and found <= {kept} and kept == torch.promote_types(kept, torch.float32)
        )
        if not (transform.is_fused and is_wide):
            return [update(*of)[2] for of in zip(grads, params, states, strict=True)]
        if factor is not None:
            torch._foreach_mul_(list(grads), factor.to(kept))
        return transform.update_each(grads, params, states)[1]

    def specs(param: TensorSpec) -> Any:
        wide = dtype_name(torch.promote_types(torch_dtype(param.dtype), torch.float32))
        leaves, treespec = optree.tree_flatten(transform.specs(replace(param, dtype=wide)))
        return treespec.unflatten(
            [
                replace(spec, dtype=state_dtype) if cast else spec
                for spec, cast in zip(leaves, is_cast, strict=True)
            ]
        )

    calls_owners = transform.calls is not None and transform.calls_owners
    pair = (update, calls) if calls_owners else None
    return Transform(init, update, specs, fused=(update, update_fused), calls=pair)


def _most(tile: int, param: Tensor) -> int:
    """The most elements that are updated at a time where a parameter is."""
    return tile if param.is_cpu else tile * TILES_ON_GPU


def _tiles(x: Tensor, size: int, num_tiles: int, *, is_long: bool = True) -> Sequence[Tensor]:
    """The tiles of a tensor. A single one is the tensor itself, for writes into a view
    would be copies in a graph. A tensor that is not long, such as a counter, is copied
    for all tiles but the last, so that it advances once."""
    if num_tiles == 1:
        return (x,)
    return torch.split(x, size) if is_long else (*(x.clone() for _ in range(num_tiles - 1)), x)


def _widener(dtype: torch.dtype, size: int) -> Callable[[Tensor, str | int], Tensor]:
    """A function that copies narrow tensors into wide ones, in memory that all tiles of
    an update share.

    The first use of new memory would cost more than the update.
    """
    memory: dict[str | int, Tensor] = {}

    def widen(x: Tensor, name: str | int) -> Tensor:
        if x.dtype == dtype:
            return x
        if name not in memory:
            memory[name] = x.new_empty(size, dtype=dtype)
        return memory[name][: x.numel()].copy_(x)

    return widen


def long_leaves(transform: Transform) -> list[bool]:
    """Per tensor of the transform's state, whether it has the parameter's shape.

    This asks a transform about a flat tensor of any length. For the state of a given
    flat buffer, use `FlatParamPlan.is_long`, which asks the specs, too.
    """
    return [spec.shape == _PROBE.shape for spec in _probed(transform.specs)]


_PROBE = TensorSpec((1_000_003,), "float32")  # no other tensor of a state has this many elements


@lru_cache(maxsize=64)  # steps keep their transforms from update to update
def _probed(specs: Callable[[TensorSpec], Any]) -> list[TensorSpec]:
    """The specs of a state, from a transform's `specs`.

    It does not take the transform: an `update` may hold tensors, and the cache would
    keep them alive.
    """
    leaves: list[TensorSpec] = optree.tree_leaves(specs(_PROBE))
    return leaves


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
