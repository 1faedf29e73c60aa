"""Parameters with tangents: dual numbers p + ε v, with which a forward and its backward
compute a value and its derivative along v.

PyTorch's forward mode carries ε through every operator of the forward, and of the
backward. So the gradient that a backward gives has a tangent, too: the derivative of
the gradient along v, which is the Hessian's product with v (Pearlmutter 1994).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fzero.common.forward_mode import LEVEL
from fzero.model.transforms import Number, Pulled, PulledGrad, Tensors


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """A view of a tensor with a tangent."""
    made: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
    return made


def parts_of(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A tensor without its tangent, and the tangent, if there is one."""
    if not LEVEL.is_open:
        return x, None
    primal, tangent = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return primal, tangent


@dataclass(frozen=True, slots=True)
class DualView:
    """The view (`ParamView`) of a parameter p that makes it p + ε v.

    Attributes:
        tangent: v, in memory of its own, with the parameter's shape and dtype.
        copies: whether p is copied. A gathered parameter is, so that what autograd
            saves of it, with its tangent, is a view of the dual and not of p.
        gives: the part of a gradient that is collected: its `tangent` or its `value`.
    """

    tangent: Tensor
    copies: bool
    gives: str

    offset: ClassVar[int] = 0
    reads: ClassVar[tuple[str, ...]] = ()
    trains: ClassVar[tuple[str, ...]] = ()
    needs_input: ClassVar[bool] = False

    def shared(self, x: Tensor, tensors: Tensors) -> Tensors:
        return {}

    def value(self, x: Tensor, tensors: Tensors, n: Number) -> Tensor:
        own = x.clone(memory_format=torch.contiguous_format) if self.copies else x
        return dual(own, self.tangent) if LEVEL.is_open else own

    def pulled(self, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number) -> Pulled:
        primal, tangent = parts_of(grad.whole)
        if self.gives == "value":
            return Pulled(PulledGrad(primal))
        return Pulled(PulledGrad(torch.zeros_like(primal) if tangent is None else tangent))
