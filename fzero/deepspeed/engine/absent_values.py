"""`AbsentValues`: the tensor that `detach()`, `.data` and `state_dict()` give for a
parameter whose values this rank does not have at present.

It is empty, as in DeepSpeed, with the parameter's dtype and device. A script may ask for
these; to compute with it, to copy or to save it is an error, where an empty tensor would
give a sum of 0.0 or a file without weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fzero.model.tensor_uses import called, needs_values

Refusal = Callable[[str], RuntimeError]
"""The error for a use, by its name."""


class AbsentValues(Tensor):
    """The values of a parameter that this rank does not have."""

    fzero_refusal: Refusal

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if gives_absent(func):
            return absent(args[0], args[0].fzero_refusal)
        if needs_values(func, args, kwargs) or reads_memory(func):
            raise _refused(args, kwargs, called(func)[1] or str(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # what reaches an operator past __torch_function__: torch.func, torch.tensor, C++
        raise _refused(args, kwargs or {}, str(func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(dtype={self.dtype}, device={str(self.device)!r})"


def gives_absent(func: Any) -> bool:
    """Whether a function of a parameter gives its values as a tensor of their own,
    without a copy.
    """
    name, used = called(func)
    return used == "detach" or (name == "__get__" and used == "data")


def reads_memory(func: Any) -> bool:
    """Whether a caller asks for the address of values, to read them itself (safetensors
    does). A recurrent module of PyTorch only compares addresses.
    """
    is_address = getattr(func, "__name__", "") == "data_ptr"
    return is_address and sys._getframe(2).f_globals.get("__name__") != "torch.nn.modules.rnn"


def absent(param: Tensor, refusal: Refusal) -> Tensor:
    """What `param.detach()` and `param.data` give.

    Raises:
        RuntimeError: the refusal, for `torch.nn.Parameter(param)`, which takes another
            class for a fault of the class.
    """
    if sys._getframe(2).f_code is nn.Parameter.__new__.__code__ and isinstance(param, nn.Parameter):
        raise refusal("torch.nn.Parameter")
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty(0, dtype=param.dtype, device=param.device)
        found: Any = torch.Tensor._make_subclass(AbsentValues, empty)
    found.fzero_refusal = refusal
    return found  # type: ignore[no-any-return]


def _refused(args: Any, kwargs: dict[str, Any], use: str) -> RuntimeError:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    found: Any = next(x for x in leaves if isinstance(x, AbsentValues))
    return found.fzero_refusal(use)  # type: ignore[no-any-return]
