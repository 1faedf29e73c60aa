"""The dtype of each tensor of a step, and updates of numbers that are stored in few bits.

A `Precision` is data: the dtypes that a configuration asks for. `dtypes_of` combines it with a parameter's own dtype into the
`Dtypes` of that parameter: the dtypes of compute, of communication, of gradient sums, of the optimizer's copy (the *master*)
and of its state. Nothing else changes a dtype, and `step.plan` shows all of them.

An update is computed in fp32 (fp64 for fp64), whatever the dtypes in memory: `mixed_precision` wraps a transform, so that it
reads narrow numbers and rounds once, at the end. Rounding to the nearest loses updates smaller than half the last bit;
`fzero.optim.rounding` keeps them on average.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from operator import is_
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fzero.optim.transforms import Transform, is_in_place, separate
from sharding import TensorSpec
from sharding.views import torch_dtype


class Dtypes(NamedTuple):
    """The names of a parameter's dtypes."""

    param: str
    """The dtype in which the model computes, and which stage 3 gathers."""
    reduce: str
    """The dtype in which gradients are sent and added up over the ranks."""
    grad: str
    """The dtype in which gradients are kept, and added up over micro-steps."""
    master: str
    """The dtype that the optimizer updates; if it differs from `param`, there is a second copy."""
    optimizer: str
    """The dtype of those tensors of the optimizer's state that have the parameter's shape."""

    def __str__(self) -> str:
        master = "which are the master" if self.master == self.param else f"master {self.master}"
        return (
            f"parameters {self.param}, {master}, gradients reduced in {self.reduce} and added up in {self.grad}, "
            f"optimizer state {self.optimizer}"
        )


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes that a configuration asks for, by name; None is the tensor's own dtype, or follows from the others.

    Attributes:
        param_dtype: the dtype of all parameters; None is each parameter's own.
        reduce_dtype: the dtype in which gradients are sent; None is that of the parameters.
        grad_accum_dtype: the dtype in which gradients are kept and added up; None is that of the parameters.
        master_dtype: the dtype of the master; None is fp32 if `param_dtype` changes a parameter, else the parameter's own.
        optimizer_dtype: the dtype of the optimizer's state; None is that of the master.
        buffer_dtype: the dtype of the module's floating-point buffers; None is each buffer's own.
        autocast: the dtype of `torch.autocast` around the forward, if any.
        safe_modules: classes of modules whose direct parameters are kept in the autocast dtype beside a master.
        stochastic_rounding: whether a master of 16 bits, and its optimizer state, are rounded at random after an update.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    grad_accum_dtype: str | None = None
    master_dtype: str | None = None
    optimizer_dtype: str | None = None
    buffer_dtype: str | None = None
    autocast: str | None = None
    safe_modules: tuple[str, ...] = ()
    stochastic_rounding: bool = False

    def dtypes_of(self, own: str, owner: type[nn.Module], *, trainable: bool = True) -> Dtypes:
        """The dtypes of a parameter of dtype `own` that belongs to a module of the class `owner`.

        A frozen parameter has no other tensors. If only autocast lowers its dtype, its own values are kept as the master.
        """
        if not torch_dtype(own).is_floating_point:
            return Dtypes(own, own, own, own, own)
        is_safe = any(owner is find_class(name) for name in self.safe_modules)
        lowered = self.param_dtype or (self.autocast if is_safe else None)
        param = lowered or own
        if not trainable:
            kept = self.param_dtype or own
            return Dtypes(param, param, param, kept, kept)
        reduce, grad = self.reduce_dtype or param, self.grad_accum_dtype or param
        master = self.master_dtype or (_wide(own) if lowered else own)
        return Dtypes(param, reduce, grad, master, self.optimizer_dtype or master)

    def buffer_dtype_of(self, own: str) -> str:
        """The dtype of a module's buffer of dtype `own`."""
        return self.buffer_dtype if self.buffer_dtype and torch_dtype(own).is_floating_point else own


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


@cache
def find_class(name: str) -> type:
    """The class of a dotted name.

    Raises:
        ValueError: there is no such class.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"must be dotted names of classes such as 'torch.nn.Linear', got {name!r}: {error}") from None
    if not isinstance(found, type):
        raise ValueError(f"must be dotted names of classes such as 'torch.nn.Linear', got {name!r}, which is no class")
    return found


# --- updates of narrow numbers -----------------------------------------------------------------------------------

TILE = 1 << 19
"""Elements that a processor updates at a time, so that their temporary tensors fit into its cache."""
TILES_ON_GPU = 128
"""As many tiles are one on a GPU. The wide gradient of one takes 256 MB, while no activations are there; a block of 50M
parameters is one tile, where smaller ones would add small kernels (counters, flags) to each."""


NUM_SALTS = 16
"""The largest number of tensors of one update that a graph rounds at random."""

Rounding = Callable[[Tensor, Tensor, int, int], None]
"""Writes wide numbers into narrow ones: (wide, narrow, start, index). The narrow numbers are a slice of a tensor from `start`
on; `index` is the index of that tensor in the update."""


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
    """A transform of narrow numbers: `transform` computed in fp32 (fp64 if the parameter is fp64), and rounded at the end.

    Args:
        transform: elementwise, unless `tile` is None.
        state_dtype: the dtype of the state's tensors of the parameter's shape; others keep the dtype of `transform.init`.
        rounding: rounds wide numbers to narrow ones.
        factor: multiplies the gradient (0-d).
        out: the new parameter is also written here, in the dtype of `out`.
        tile: the number of elements that are updated at a time. None updates all at once: in a graph a compiler makes the tiles.
    """
    kept = torch_dtype(state_dtype)
    is_long = long_leaves(transform)
    is_cast = [(spec.shape, spec.dtype) == (_PROBE.shape, _PROBE.dtype) for spec in _probed(transform.specs)]

    def init(param: Tensor) -> Any:
        leaves, treespec = optree.tree_flatten(transform.init(param.to(_wide_dtype(param))))
        return treespec.unflatten([x.to(kept) if cast else x for x, cast in zip(leaves, is_cast, strict=True)])

    def update(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        leaves, treespec = optree.tree_flatten(state)
        dtype, numel = _wide_dtype(param), param.numel()
        size = _most(tile, param) if tile and ({grad.dtype, param.dtype} != {dtype} or out is not None) else numel
        num_tiles = -(-numel // size) if numel > size else 1
        widen = _widener(dtype, size) if num_tiles > 1 else lambda x, _: x.to(dtype)
        wide_factor = None if factor is None else factor.to(dtype)
        cut = partial(_tiles, size=size, num_tiles=num_tiles)
        rest = [cut(x, is_long=long) for x, long in zip(leaves, is_long, strict=True)]
        outs = [None] * num_tiles if out is None else cut(out)
        tiles = zip(cut(grad), cut(param), outs, *rest, strict=True)
        for place, (narrow_grad, narrow_param, new_param, *old) in enumerate(tiles):
            wide_grad = widen(narrow_grad, "grad")
            if wide_factor is not None:
                wide_grad.mul_(wide_factor)
            wide = [widen(x, i) if cast else x for i, (x, cast) in enumerate(zip(old, is_cast, strict=True))]
            updated = transform.update(wide_grad, widen(narrow_param, "param"), treespec.unflatten(wide))
            narrows, news = [narrow_param, *old], [updated[1], *treespec.flatten_up_to(updated[2])]
            if not all(map(is_, narrows, news)):
                written = zip(separate(news, narrows), narrows, [True, *is_cast], strict=True)
                for index, (new, narrow, cast) in enumerate(written):
                    if not is_in_place(new, narrow):
                        (rounding if cast else to_nearest)(new, narrow, place * size, index)
            if new_param is not None:
                new_param.copy_(narrow_param)
        return grad, param, state

    def update_fused(grads: Sequence[Tensor], params: Sequence[Tensor], states: Sequence[Any]) -> list[Any]:
        found = {x.dtype for x in (*grads, *params)}
        is_wide = out is None and found <= {kept} and kept == torch.promote_types(kept, torch.float32)
        if not (transform.is_fused and is_wide):
            return [update(*of)[2] for of in zip(grads, params, states, strict=True)]
        if factor is not None:
            torch._foreach_mul_(list(grads), factor.to(kept))
        return transform.update_each(grads, params, states)[1]

    def specs(param: TensorSpec) -> Any:
        leaves, treespec = optree.tree_flatten(transform.specs(replace(param, dtype=_wide(param.dtype))))
        return treespec.unflatten(
            [replace(spec, dtype=state_dtype) if cast else spec for spec, cast in zip(leaves, is_cast, strict=True)]
        )

    return Transform(init, update, specs, fused=(update, update_fused))


def _most(tile: int, param: Tensor) -> int:
    """The most elements that are updated at a time where a parameter is."""
    return tile if param.is_cpu else tile * TILES_ON_GPU


def _tiles(x: Tensor, size: int, num_tiles: int, *, is_long: bool = True) -> Sequence[Tensor]:
    """The tiles of a tensor. A single one is the tensor itself, for writes into a view would be copies in a graph. A tensor
    that is not long, such as a counter, is copied for all tiles but the last, so that it advances once."""
    if num_tiles == 1:
        return (x,)
    return torch.split(x, size) if is_long else (*(x.clone() for _ in range(num_tiles - 1)), x)


def _widener(dtype: torch.dtype, size: int) -> Callable[[Tensor, str | int], Tensor]:
    """A function that copies narrow tensors into wide ones, in memory that all tiles of an update share.

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

    This asks a transform about a flat tensor of any length. For the state of a given flat buffer, use
    `FlatParamPlan.is_long`, which asks the specs, too.
    """
    return [spec.shape == _PROBE.shape for spec in _probed(transform.specs)]


_PROBE = TensorSpec((1_000_003,), "float32")  # no other tensor of a state has this many elements


@lru_cache(maxsize=64)  # steps keep their transforms from update to update
def _probed(specs: Callable[[TensorSpec], Any]) -> list[TensorSpec]:
    """The specs of a state, from a transform's `specs`.

    It does not take the transform: an `update` may hold tensors, and the cache would keep them alive.
    """
    leaves: list[TensorSpec] = optree.tree_leaves(specs(_PROBE))
    return leaves


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
