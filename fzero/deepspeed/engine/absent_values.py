"""`AbsentValues`: the tensor that `detach()`, `.data` and `state_dict()` give for a
parameter whose values this rank does not have at present.

It is empty, as in DeepSpeed, with the parameter's dtype and device. A script may ask for
these; to compute with it, to copy or to save it is an error, where an empty tensor would
give a sum of 0.0 or a file without weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
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
        return answer(func, args, kwargs, partial(_refused, args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # what reaches an operator past __torch_function__: torch.func, torch.tensor, C++
        raise _refused(args, kwargs or {}, str(func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(dtype={self.dtype}, device={str(self.device)!r})"


def answer(func: Any, args: Any, kwargs: dict[str, Any], refusal: Refusal) -> Any:
    """The result of a function of tensors without values, which `__torch_function__`
    has got; `param.detach()` and `param.data` are an `AbsentValues`.

    Raises:
        RuntimeError: the refusal: the function needs values, or the address of values
            to read them itself (safetensors does; a recurrent module of PyTorch only
            compares addresses). Also for `torch.nn.Parameter(param)`, which takes
            another class for a fault of the class.
    """
    (name, used), caller = called(func), sys._getframe(2)
    if used == "detach" or (name == "__get__" and used == "data"):
        param = args[0]
        if caller.f_code is nn.Parameter.__new__.__code__ and isinstance(param, nn.Parameter):
            raise refusal("torch.nn.Parameter")
        with torch._C.DisableTorchFunctionSubclass():
            empty = torch.empty(0, dtype=param.dtype, device=param.device)
            found: Any = torch.Tensor._make_subclass(AbsentValues, empty)
        found.fzero_refusal = getattr(param, "fzero_refusal", refusal)
        return found
    reads = name == "data_ptr" and caller.f_globals.get("__name__") != "torch.nn.modules.rnn"
    if reads or needs_values(func, args, kwargs):
        raise refusal(used or str(func))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _refused(args: Any, kwargs: dict[str, Any], use: str) -> RuntimeError:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    found: Any = next(x for x in leaves if isinstance(x, AbsentValues))
    return found.fzero_refusal(use)  # type: ignore[no-any-return]
