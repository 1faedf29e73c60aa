"""`Precision`: the dtype of each tensor of a step.

A `Precision` is data: the dtypes that a configuration asks for. `dtypes_of` combines it
with a parameter's own dtype into the `Dtypes` of that parameter: the dtypes of compute,
of communication, of gradient sums, of the optimizer's copy (the *master*) and of its
state. Nothing else changes a dtype, and `step.plan` shows all of them.
`mixed_precision` of `fzero.optim.transforms` updates numbers that are stored in few
bits.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torch import nn

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
    """The dtype that the optimizer updates; if it differs from `param`, there is a
    second copy.
    """
    optimizer: str
    """The dtype of those tensors of the optimizer's state that have the parameter's
    shape.
    """

    def __str__(self) -> str:
        master = "which are the master" if self.master == self.param else f"master {self.master}"
        return (
            f"parameters {self.param}, {master}, gradients reduced in {self.reduce} and added up "
            f"in {self.grad}, optimizer state {self.optimizer}"
        )


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes that a configuration asks for, by name; None is the tensor's own
    dtype, or follows from the others.

    Attributes:
        param_dtype: the dtype of all parameters; None is each parameter's own.
        reduce_dtype: the dtype in which gradients are sent; None is that of the
            parameters.
        grad_accum_dtype: the dtype in which gradients are kept and added up; None is
            that of the parameters.
        master_dtype: the dtype of the master; None is fp32 if `param_dtype` changes a
            parameter, else the parameter's own.
        optimizer_dtype: the dtype of the optimizer's state; None is that of the master.
        buffer_dtype: the dtype of the module's floating-point buffers; None is each
            buffer's own.
        autocast: the dtype of `torch.autocast` around the forward, if any.
        safe_modules: classes of modules whose direct parameters are kept in the
            autocast dtype beside a master.
        stochastic_rounding: whether a master of 16 bits, and its optimizer state, are
            rounded at random after an update.
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
        """The dtypes of a parameter of dtype `own` that belongs to a module of the
        class `owner`.

        A frozen parameter has no other tensors. If only autocast lowers its dtype, its
        own values are kept as the master.
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
        return (
            self.buffer_dtype if self.buffer_dtype and torch_dtype(own).is_floating_point else own
        )


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
        raise ValueError(
            f"must be dotted names of classes such as 'torch.nn.Linear', got {name!r}: {error}"
        ) from None
    if not isinstance(found, type):
        raise ValueError(
            f"must be dotted names of classes such as 'torch.nn.Linear', got {name!r}, which is no "
            f"class"
        )
    return found
