"""A module's own parameters and buffers, while a step computes with the tensors of a
state instead of them.

The module finds these tensors in its `_parameters` (`FetchedParameters`). Code may hold
a parameter elsewhere: in a list, a closure, a `functools.partial`. While the module is
bound (`fzero.model.binding`), each own parameter is a `StandIn`: an operator receives
the state's tensor instead. That tensor is gathered and trained like any other. The same
holds for a tensor that shares a parameter's memory (`held_tensors`). Some uses cannot
be intercepted in Python: `tensor_checks` raises for them. The module must not change
before the first use of its state (`ModelCheck`).
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.utils import parametrize

from fzero.model.errors import ShapeAndDtype
from fzero.model.module_index import ModuleIndex
from fzero.model.tensor_uses import called, needs_values

if TYPE_CHECKING:
    from fzero.model.held_tensors import SharedTensor

Fetch = Callable[[str], Tensor]


class Substitutes(NamedTuple):
    """Present values for the tensors of a module.

    Attributes:
        own: the tensors that are substituted, by identity.
        names: the names of the module's own parameters, by identity.
        fetch: the value of a parameter, by name; see `module_binding.bound`.
        buffer: the value of a buffer, by name.
        held: for the other tensors in `own`, the parameter or buffer whose memory each
            shares.
    """

    own: Mapping[int, Tensor]
    names: Mapping[int, str]
    fetch: Fetch
    buffer: Fetch
    held: Mapping[int, SharedTensor] = {}

    def value_of(self, x: Tensor) -> Tensor:
        """The present value of one of the tensors."""
        held = self.held.get(id(x))
        if held is None:
            return self.fetch(self.names[id(x)])
        # a stage of a pipeline has names of its own
        name = self.names.get(id(held.owner()), held.name)
        return held.of(self.buffer(name) if held.is_buffer else self.fetch(name))


class _Bound(NamedTuple):
    """One binding of a module by a thread."""

    thread: int
    substitutes: Substitutes


_BOUND: list[_Bound] = []
"""The present bindings, the innermost last. Ranks in lockstep are threads that share
parameters; each thread has its own values."""


class HeldStandIn(Tensor):
    """A plain tensor that shares memory with a parameter or buffer of a module, while
    the module is bound.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Tensor:  # type: ignore[misc]
        return data.detach().requires_grad_(requires_grad)  # a copy is an ordinary tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if needs_values(func, args, kwargs) or called(func)[1] == "detach":
            return with_present(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class StandIn(nn.Parameter):
    """A module's own parameter while the module is bound."""

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        # a copy is an ordinary parameter
        return nn.Parameter(torch.empty(0) if data is None else data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return with_present(func, args, kwargs or {})


def with_present(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls `func` with the state's tensors instead of the parameters of a bound
    module.
    """
    # While torch.compile traces, it inspects parameters. This is not part of the model's
    # computation.
    if (
        torch._guards.TracingContext.try_get() is None
        and getattr(func, "__name__", "") != "__hash__"
    ):
        # no dict: 2.11 cannot trace it
        args, values = optree.tree_map(_present, (tuple(args), tuple(kwargs.values())))
        kwargs = dict(zip(kwargs, values, strict=True))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def is_bound(tensor: Any) -> bool:
    """Whether the tensor is a parameter of a module that this thread has bound."""
    return _bound_with(tensor) is not None


def _present(x: Any) -> Any:
    bound = _bound_with(x) if isinstance(x, nn.Parameter | HeldStandIn) else None
    return x if bound is None else bound.substitutes.value_of(x)


def _bound_with(x: Any) -> _Bound | None:
    """The innermost binding of a tensor: by this thread, or by any thread if this is a
    thread of autograd (on CUDA).
    """
    found = [bound for bound in _BOUND if id(x) in bound.substitutes.own]
    if not found:
        return None
    is_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    mine = [bound for bound in found if is_autograd or bound.thread == threading.get_ident()]
    return mine[-1] if mine else None


_STAND_INS: dict[type, type] = {nn.Parameter: StandIn, Tensor: HeldStandIn}
_PLAIN = {stand_in: plain for plain, stand_in in _STAND_INS.items()}


def own_class(x: Tensor) -> type | None:
    """The class of a parameter, where it is the user's own subclass of `nn.Parameter`;
    else None.
    """
    kind = x.__dict__.get("fzero_class", type(x))
    is_own = (
        kind is not nn.Parameter
        and issubclass(kind, nn.Parameter)
        and not kind.__module__.startswith("fzero.")
    )
    return kind if is_own else None


@contextmanager
def substituted(substitutes: Substitutes) -> Iterator[None]:
    """In the body, operators get present values for the tensors of a module, by this
    thread. Nothing of PyTorch, and no class of a parameter, stays changed behind the
    last such body."""
    mine = _Bound(threading.get_ident(), substitutes)
    try:
        if not _BOUND:
            nn.Parameter.is_leaf = property(_is_leaf)  # type: ignore[assignment]
            parametrize._maybe_set = _maybe_set
        _BOUND.append(mine)
        for x in substitutes.own.values():
            if type(x) in _STAND_INS:  # a subclass has rules of its own
                x.__class__ = _STAND_INS[type(x)]
        yield
    finally:
        # By identity: two bindings of one module are equal as values.
        _BOUND[:] = [bound for bound in _BOUND if bound is not mine]
        still_bound = set().union(*(bound.substitutes.own for bound in _BOUND))
        for key, x in substitutes.own.items():
            if type(x) in _PLAIN and key not in still_bound:
                x.__class__ = _PLAIN[type(x)]
        if not _BOUND and "is_leaf" in vars(nn.Parameter):
            del nn.Parameter.is_leaf
            parametrize._maybe_set = _MAYBE_SET


_MAYBE_SET = parametrize._maybe_set


def _maybe_set(dest: Tensor, src: Tensor) -> None:
    """As PyTorch's, by which a parametrization gives a tensor its unparametrized
    values. One without an inverse gives the tensor to itself: no change, but it would
    count as one."""
    if src is not dest:
        _MAYBE_SET(dest, src)


def pass_as_parameter(tensor: Tensor, name: str) -> None:
    """Makes a tensor of the state look like the module's parameter `name`:
    `nn.Parameter` by class (one of its own could not pass as that), and, while a module
    is bound, a leaf of autograd."""
    tensor.__class__ = nn.Parameter  # type: ignore[assignment]
    tensor.fzero_name = name  # type: ignore[attr-defined]


def _is_leaf(param: nn.Parameter) -> bool:
    # Dynamo needs the truth
    if "fzero_name" in param.__dict__ and torch._guards.TracingContext.try_get() is None:
        return True
    with torch._C.DisableTorchFunctionSubclass():  # a `StandIn` answers for itself
        return torch._C.TensorBase.is_leaf.__get__(param)  # type: ignore[attr-defined, no-any-return]


def as_plain(param: Any) -> Any:
    """The parameter with its own class, because torch.compile does not look through a
    subclass.
    """
    if type(param) is StandIn:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
    return param


# --- a module's tensors as they are ---------------------------------------------------------------


def shape_and_dtype(tensor: Tensor | None) -> ShapeAndDtype:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under every name: moving a module to `meta`
    unties tied ones.
    """
    yield from model.named_parameters(remove_duplicate=False)
    for slot in ModuleIndex.of(model).slots("_buffers", every=True):
        if (buffer := slot.owner[slot.key]) is not None and not slot.is_cache:
            yield slot.name, buffer


def full_values(tensor: Tensor) -> Tensor:
    """A parameter's or buffer's values. *Collective* where it is divided
    (`deepspeed.engine.divided_params`): every rank.
    """
    divided = getattr(tensor, "fzero_divided", None)
    return tensor.detach() if divided is None else divided.full()  # type: ignore[no-any-return]


def bits_of(tensor: Tensor) -> Tensor:
    """A checksum of the tensor's values: the sum of its bits as integers, 0-d int64 on
    the CPU.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    bits = flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    )
    # sums are of 64 bits
    wide = torch.empty(min(bits.numel(), 1 << 18), dtype=torch.int64, device=bits.device)
    return (
        torch.stack([wide[: len(x)].copy_(x).sum() for x in torch.split(bits, 1 << 18)]).sum().cpu()
    )


def address(tensor: Tensor) -> int:
    """The address of the tensor's storage; -1 for a wrapper (torch.func, a subclass) or
    a lazy tensor, which have none.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return -1


# --- what the module itself finds -----------------------------------------------------------------


class FetchedParameters(dict[str, Any]):
    """A module's `_parameters` whose values come from `fetch`, unless the model assigns
    another value.
    """

    def __init__(self, own: dict[str, Any], names: dict[str, str], fetch: Fetch) -> None:
        super().__init__(own)
        self.names, self.fetch = names, fetch
        self.put: set[str] = set()
        """The keys to which the model has assigned a value of its own."""
        self.is_changed = False
        """Whether the model has assigned or deleted any value."""

    def __getitem__(self, key: str) -> Any:
        name = self.names.get(key)
        return super().__getitem__(key) if name is None else self.fetch(name)

    def __setitem__(self, key: str, value: Any) -> None:
        # `torch.func.functional_call` inside the model's own code swaps parameters like this, then
        # restores a tensor of `fetch`. After its unit is gathered again this tensor must not be
        # used, so only its name is kept.
        self.is_changed, name = True, getattr(value, "fzero_name", None)
        if name is not None:
            self.names[key] = name
            self.put.discard(key)
        else:
            self.names.pop(key, None)
            self.put.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.is_changed = True
        self.names.pop(key, None)
        self.put.discard(key)
        super().__delitem__(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        # For a module that the model copies in its forward.
        return {key: copy.deepcopy(self[key], memo) for key in self}

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - `get` would call itself

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((key, self[key]) for key in self)

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[key] for key in self)


_NOT_PASSED = ("ds_", "fzero_", "_dynamo_")
"""Prefixes of attributes that describe the module's own tensors; these attributes are
not copied to fetched ones.
"""


_OF_TRACED = ("elem", "_inference_mode_base")
"""PyTorch's own attributes of a `FunctionalTensor`, which stands for a tensor while a
step is captured.
"""


def marks_of(param: Tensor) -> dict[str, Any]:
    """The Python attributes that code has set on a tensor."""
    own = _OF_TRACED if type(param) is FunctionalTensor else ()
    return {
        key: value
        for key, value in param.__dict__.items()
        if not key.startswith(_NOT_PASSED) and key not in own
    }


def new_marks(param: Tensor) -> list[str]:
    """The attributes that a forward has set on a fetched parameter."""
    own = param.__dict__.get("fzero_marks", {})
    return [
        key for key, value in marks_of(param).items() if key not in own or own[key] is not value
    ]


def marked(fetch: Fetch, marks: Mapping[str, dict[str, Any]], name: str) -> Tensor:
    """`fetch(name)` with the class and the Python attributes of the module's own
    parameter.
    """
    tensor = fetch(name)
    if name in marks:
        untraced(_mark)(tensor, marks[name])
    return tensor


def _mark(tensor: Tensor, marks: Mapping[str, Any]) -> None:
    if "fzero_marks" not in tensor.__dict__:
        tensor.__class__ = marks.get("__class__", type(tensor))
        tensor.__dict__.update(marks, fzero_marks=marks)
        tensor.__dict__.pop("__class__", None)


_UNTRACED: dict[Callable[..., Any], Callable[..., Any]] = {}


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a module or class, hidden from torch.compile, which would
    otherwise trace it as part of a model that compiles its own code."""
    if "torch._dynamo" not in sys.modules:  # importing it takes longer than all of fzero
        return function
    if function not in _UNTRACED:
        _UNTRACED[function] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return _UNTRACED[function]
