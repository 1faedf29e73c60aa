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
from collections.abc import Callable
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

Rounding = Callable[[Tensor, Tensor, int], None]
"""Writes wide numbers (first) into narrow ones (second); the integer differs between the tensors of one update."""


def to_nearest(wide: Tensor, narrow: Tensor, index: int) -> None:
    narrow.copy_(wide)


def stochastic(seed: int, start: int) -> Rounding:
    """Rounds fp32 to bf16 up or down, in proportion to where the number lies between the two.

    The random bits are a hash of `seed` and of the element's place in its whole flat buffer, which begins at `start`: all
    ranks and stages round alike. Other pairs of dtypes are rounded to the nearest.
    """

    def round_(wide: Tensor, narrow: Tensor, index: int) -> None:
        if wide.dtype != torch.float32 or narrow.dtype != torch.bfloat16 or not wide.numel():
            narrow.copy_(wide)
            return
        places = torch.arange(start, start + wide.numel(), device=wide.device)
        noise = _hash(places + zlib.crc32(f"{seed}/{index}".encode())) & 0xFFFF
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


def widened(transform: Transform, *, state_dtype: str, rounding: Rounding = to_nearest) -> Transform:
    """A transform of narrow numbers: what `transform` does with them in fp32 (fp64 if they are), rounded at the end.

    The state's tensors of the parameter's shape are kept in `state_dtype`, others as `transform` makes them. Where all are
    wide already nothing is copied.
    """
    kept = torch_dtype(state_dtype)
    probe = TensorSpec((1_000_003,), "float32")
    is_like = [spec.shape == probe.shape for spec in optree.tree_leaves(transform.place(probe))]

    def map_like(function: Callable[[Tensor], Tensor], state: Any) -> Any:
        leaves, treespec = optree.tree_flatten(state)
        return treespec.unflatten([function(x) if like else x for x, like in zip(leaves, is_like, strict=True)])

    def init(param: Tensor) -> Any:
        return map_like(lambda x: x.to(kept), transform.init(_widen(param)))

    def update(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        wide_grad, wide_param, wide_state = transform.update(_widen(grad), _widen(param), map_like(_widen, state))
        narrow = [param, *optree.tree_leaves(state)]
        for index, (old, new) in enumerate(zip(narrow, [wide_param, *optree.tree_leaves(wide_state)], strict=True)):
            if new is not old:
                (rounding if old.shape == param.shape else to_nearest)(new, old, index)
        return wide_grad, param, state

    def place(param: TensorSpec) -> Any:
        specs = transform.place(replace(param, dtype=_wide(param.dtype)))
        return optree.tree_map(lambda s: replace(s, dtype=state_dtype) if s.shape == param.shape else s, specs)

    return Transform(init, update, place)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
