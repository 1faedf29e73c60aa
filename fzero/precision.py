"""Which dtype does each tensor of a step have, and how does an update work on numbers that are stored in few bits?

A `Precision` is data: the dtypes that a configuration asks for. `dtypes_of` makes of it and of a parameter's own dtype the
`Dtypes` of that parameter: what the model computes with, what is sent, what gradients are added up in, what the optimizer
updates (the *master*) and what it remembers. Nothing else changes a dtype, and `step.plan` shows every one.

An update is computed in fp32 (fp64 for fp64), whatever the dtypes in memory: `widened` makes of a transform one that reads
narrow numbers and rounds once, at the end. Rounding to the nearest loses updates below half a last bit, for good; stochastic
rounding keeps them on average (Gupta et al. 2015, arXiv:1502.02551).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fzero.transforms import Transform
from sharding import TensorSpec
from sharding.views import torch_dtype


class Dtypes(NamedTuple):
    """The names of a parameter's dtypes."""

    param: str
    """What the model computes with and stage 3 gathers."""
    reduce: str
    """In which gradients are sent and added up over the ranks."""
    grad: str
    """In which they are kept, and added up over micro-steps."""
    master: str
    """What the optimizer updates; a copy of its own where it differs from `param`."""
    optimizer: str
    """The optimizer's state of the parameter's shape."""

    def __str__(self) -> str:
        master = "which are the master" if self.master == self.param else f"master {self.master}"
        return (
            f"parameters {self.param}, {master}, gradients reduced in {self.reduce} and added up in {self.grad}, "
            f"optimizer state {self.optimizer}"
        )


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes that a configuration asks for, by name; None leaves them as they are or to follow from the others.

    Attributes:
        param_dtype: of all parameters; None is each parameter's own.
        reduce_dtype: in which gradients are sent; None is that of the parameters.
        grad_accum_dtype: in which they are kept and added up; None is that of the parameters.
        master_dtype: of what is updated; None is fp32 where `param_dtype` changes a parameter, else the parameter's own.
        optimizer_dtype: of the optimizer's state; None is that of the master.
        buffer_dtype: of the module's floating buffers; None is each buffer's own.
        autocast: the dtype of `torch.autocast` around the forward, if any.
        safe_modules: classes of modules whose own parameters are kept in the autocast dtype beside a master.
        stochastic_rounding: how a master of 16 bits, and its optimizer state, are rounded after an update.
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

    def dtypes_of(self, own: str, owner: nn.Module) -> Dtypes:
        """The dtypes of a parameter of dtype `own` that belongs to the module `owner`."""
        if not torch_dtype(own).is_floating_point:
            return Dtypes(own, own, own, own, own)
        lowered = self.param_dtype or (self.autocast if _is_one_of(owner, self.safe_modules) else None)
        param = lowered or own
        master = self.master_dtype or (_wide(own) if lowered else own)
        return Dtypes(
            param,
            self.reduce_dtype or param,
            self.grad_accum_dtype or param,
            master,
            self.optimizer_dtype or master,
        )

    def buffer_dtype_of(self, own: str) -> str:
        """The dtype of a module's buffer of dtype `own`."""
        return self.buffer_dtype if self.buffer_dtype and torch_dtype(own).is_floating_point else own


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _is_one_of(module: nn.Module, classes: tuple[str, ...]) -> bool:
    """Whether the module's own class is named, with its package or without."""
    cls = type(module)
    package = cls.__module__.split(".")
    spellings = {".".join([*package[:length], cls.__qualname__]) for length in range(len(package) + 1)}
    return not spellings.isdisjoint(classes)


# --- updates of narrow numbers -----------------------------------------------------------------------------------

TILE = 1 << 18
"""Elements that are updated at a time, so that what is made for them stays in the processor's cache."""

Rounding = Callable[[Tensor, Tensor, int, int], None]
"""Writes wide numbers (first) into narrow ones (second), which begin at `start` (third) in the tensor they are part of; the
last integer differs between the tensors of one update."""


def to_nearest(wide: Tensor, narrow: Tensor, start: int, index: int) -> None:
    narrow.copy_(wide)


def salts_of(seed: int, num: int) -> list[int]:
    """What tells the random bits of one update and tensor from those of others."""
    return [zlib.crc32(f"{seed}/{index}".encode()) for index in range(num)]


def stochastic(seed: int | Tensor, place: int) -> Rounding:
    """Rounds fp32 to bf16 up or down, in proportion to where the number lies between the two.

    The random bits are a hash of `seed` (or of its `salts_of`, an int64 tensor) and of the element's place among all
    parameters, where the tensor's first element has the `place`: all ranks and stages round alike. Other pairs of dtypes
    are rounded to the nearest.
    """

    def round_(wide: Tensor, narrow: Tensor, start: int, index: int) -> None:
        if wide.dtype != torch.float32 or narrow.dtype != torch.bfloat16 or not wide.numel():
            narrow.copy_(wide)
            return
        places = torch.arange(place + start, place + start + wide.numel(), device=wide.device)
        salt = seed[index] if isinstance(seed, Tensor) else zlib.crc32(f"{seed}/{index}".encode())
        noise = _hash(places + salt) & 0xFFFF
        bits = wide.contiguous().view(torch.int32) + noise.to(torch.int32)
        # What is cut off are the 16 bits that bf16 does not have. An infinity has none, so that it stays one.
        narrow.copy_(torch.where(wide.isfinite(), (bits & -0x10000).view(torch.float32), wide))

    return round_


def _hash(x: Tensor) -> Tensor:
    """Random-looking 32 bits of int64 numbers (the finalizer of MurmurHash3)."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def widened(
    transform: Transform,
    *,
    state_dtype: str,
    rounding: Rounding = to_nearest,
    factor: Tensor | None = None,
    out: Tensor | None = None,
    tile: int | None = TILE,
) -> Transform:
    """A transform of narrow numbers: what `transform` does with them in fp32 (fp64 if they are), rounded at the end.

    Args:
        transform: elementwise, unless `tile` is None.
        state_dtype: the dtype in which the state's tensors of the parameter's shape are kept; others stay as they are made.
        rounding: how narrow numbers are made of wide ones.
        factor: of the gradient (0-d).
        out: takes the new parameter too, in its own dtype.
        tile: how many elements are updated at a time; None is all.
    """
    kept, is_like = torch_dtype(state_dtype), like_param(transform)

    def init(param: Tensor) -> Any:
        leaves, treespec = optree.tree_flatten(transform.init(_widen(param)))
        return treespec.unflatten([x.to(kept) if like else x for x, like in zip(leaves, is_like, strict=True)])

    def update(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        leaves, treespec = optree.tree_flatten(state)
        numel, is_narrow = param.numel(), any(x.dtype != _widen(x[:0]).dtype for x in (grad, param))
        size = tile if tile and (is_narrow or out is not None) else numel
        starts = range(0, numel, size) if numel > size else (0,)
        for start in starts:
            part = slice(start, start + size) if len(starts) > 1 else slice(None)
            wide_grad = _widen(grad[part])
            if factor is not None:
                wide_grad.mul_(factor.to(wide_grad.dtype))
            # Counters advance once, with the last tile.
            is_last = start == starts[-1]
            old = [x[part] if like else x if is_last else x.clone() for x, like in zip(leaves, is_like, strict=True)]
            wide = [_widen(x) if like else x for x, like in zip(old, is_like, strict=True)]
            _, wide_param, wide_state = transform.update(wide_grad, _widen(param[part]), treespec.unflatten(wide))
            new = [wide_param, *treespec.flatten_up_to(wide_state)]
            for index, (narrow, value, like) in enumerate(zip([param[part], *old], new, [True, *is_like], strict=True)):
                if value.data_ptr() != narrow.data_ptr():
                    (rounding if like else to_nearest)(value, narrow, start, index)
            if out is not None:
                out[part].copy_(param[part])
        return grad, param, state

    def place(param: TensorSpec) -> Any:
        specs = transform.place(replace(param, dtype=_wide(param.dtype)))
        return optree.tree_map(lambda s: replace(s, dtype=state_dtype) if s.shape == param.shape else s, specs)

    return Transform(init, update, place)


def like_param(transform: Transform) -> list[bool]:
    """Which tensors of the transform's state have the parameter's shape."""
    probe = TensorSpec((1_000_003,), "float32")
    return [spec.shape == probe.shape for spec in optree.tree_leaves(transform.place(probe))]


def update_in_graph(
    transform: Transform,
    is_like: Sequence[bool],
    grad: Tensor,
    param: Tensor,
    state: Any,
    *,
    factor: Tensor | None,
    rounding: Rounding = to_nearest,
    out: Tensor | None = None,
) -> None:
    """The update of a `widened` transform, all at once, for a compiler to cut into tiles. Leaves the gradient as it is.

    Args:
        is_like: of `like_param`.
    """
    leaves, treespec = optree.tree_flatten(state)
    wide_grad = _widen(grad)
    wide_grad = wide_grad.clone() if factor is None else wide_grad * factor.to(wide_grad.dtype)
    wide = [_widen(x) if like else x for x, like in zip(leaves, is_like, strict=True)]
    _, wide_param, wide_state = transform.update(wide_grad, _widen(param), treespec.unflatten(wide))
    new = [wide_param, *optree.tree_leaves(wide_state)]
    for index, (narrow, value, like) in enumerate(zip([param, *leaves], new, [True, *is_like], strict=True)):
        if value is not narrow:
            (rounding if like else to_nearest)(value, narrow, 0, index)
    if out is not None:
        out.copy_(param)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
