"""Parameters with tangents: dual numbers p + ε v, with which a forward and its backward
compute a value and its derivative along v.

PyTorch's forward mode carries ε through every operator of the forward, and of the
backward. So the gradient that a backward gives has a tangent, too: the derivative of
the gradient along v, which is the Hessian's product with v (Pearlmutter 1994).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fzero.model.transforms import Number, Pulled, PulledGrad, Tensors


@dataclass(slots=True)
class MathAttention:
    """PyTorch's switch of attention kernels: inside only the math kernel, the one with
    forward mode. Ranks that run in lockstep in one process share it.
    """

    _num_inside: int = 0
    _switch: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def inside(self) -> Iterator[None]:
        if not self._num_inside:
            self._switch.enter_context(sdpa_kernel(SDPBackend.MATH))
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._switch.close()


MATH_ATTENTION = MathAttention()


@contextmanager
def tangents_allowed(call: str) -> Iterator[None]:
    """A context in which tensors may have tangents.

    Args:
        call: who asks, for errors.

    Raises:
        RuntimeError: the caller's own code has such a context.
    """
    if is_open():
        raise RuntimeError(
            f"{call}: must not be called inside torch.autograd.forward_ad.dual_level or "
            f"torch.func.jvp, because PyTorch has one level of forward mode, got a call inside; "
            f"call it outside"
        )
    with MATH_ATTENTION.inside(), forward_ad.dual_level():
        yield


def is_open() -> bool:
    """Whether tensors may have tangents now."""
    return forward_ad._current_level >= 0


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """A view of a tensor with a tangent."""
    made: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
    return made


def parts_of(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A tensor without its tangent, and the tangent, if there is one."""
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
        return dual(own, self.tangent) if is_open() else own

    def pulled(self, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number) -> Pulled:
        if self.gives == "value":
            # another rank in lockstep may still have tangents
            return Pulled(PulledGrad(grad.whole.detach()))
        primal, tangent = parts_of(grad.whole)
        return Pulled(PulledGrad(torch.zeros_like(primal) if tangent is None else tangent))
