"""`FunctionView`: a view that is a differentiable function, for transforms of a few
lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fzero.model.transforms import Number, Pulled, PulledGrad, Tensors, pulled_by_autograd


@dataclass(frozen=True, slots=True)
class FunctionView:
    """The view `of(x, *trained)`, whose gradients autograd finds (see `ParamView`).

    Attributes:
        of: a function of the parameter and the values of `trains`; differentiable, and
            the same in every call.
        trains: full names of parameters of the same module.
    """

    of: Callable[..., Tensor]
    trains: tuple[str, ...] = ()

    @property
    def offset(self) -> int:
        """See `ParamView`: it always applies."""
        return 0

    @property
    def reads(self) -> tuple[str, ...]:
        """See `ParamView`."""
        return self.trains

    @property
    def needs_input(self) -> bool:
        """See `ParamView`."""
        return True

    def shared(self, x: Tensor, tensors: Tensors) -> Tensors:
        """See `ParamView`."""
        return {}

    def value(self, x: Tensor, tensors: Tensors, n: Number) -> Tensor:
        """See `ParamView`."""
        return self.of(x, *(tensors[name] for name in self.trains))

    def pulled(self, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number) -> Pulled:
        """See `ParamView`."""
        return pulled_by_autograd(self, grad, x, tensors, n)
