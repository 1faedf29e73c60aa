"""A module's own parameters and buffers, while a step computes with the tensors of a state instead of them.

Code may hold a parameter outside `module._parameters`: in a list, a closure, a `functools.partial`. While the module is bound
(`fzero.model.binding`), each own parameter is a `StandIn`: an operator receives the state's tensor instead. That tensor
is gathered and trained like any other. The same holds for a tensor that shares a parameter's memory (`held_tensors`). Some uses
cannot be intercepted in Python. They raise when the step is made (`check_tensors`: TorchScript modules, memory that two tensors
share) or after the first backward (`OwnGrads`). The module must not change before the first use of its state (`Origin`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Self

import optree
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fzero.model.errors import ParameterError, ShapeAndDtype, not_trained
from fzero.model.held_tensors import Held, address
from fzero.model.tensor_uses import called, needs_values

Fetch = Callable[[str], Tensor]


class Substitutes(NamedTuple):
    """Present values for the tensors of a module.

    Attributes:
        own: the tensors that are substituted, by identity.
        names: the names of the module's own parameters, by identity.
        fetch: the value of a parameter, by name; see `module_binding.bound`.
        buffer: the value of a buffer, by name.
        held: for the other tensors in `own`, the parameter or buffer whose memory each shares.
    """

    own: Mapping[int, Tensor]
    names: Mapping[int, str]
    fetch: Fetch
    buffer: Fetch
    held: Mapping[int, Held] = {}

    @classmethod
    def of(
        cls, own: dict[int, Tensor], names: Mapping[int, str], fetch: Fetch, buffer: Fetch, held: Iterable[Held]
    ) -> Self:
        """Adds to `own` the tensors of `held` that are still alive."""
        alive = [(x, each) for each in held if (x := each.tensor()) is not None and id(x) not in own]
        own.update((id(x), x) for x, _ in alive)
        return cls(own, names, fetch, buffer, {id(x): each for x, each in alive})

    def value_of(self, x: Tensor) -> Tensor:
        """The present value of one of the tensors."""
        held = self.held.get(id(x))
        if held is None:
            return self.fetch(self.names[id(x)])
        name = self.names.get(id(held.owner()), held.name)  # a stage of a pipeline has names of its own
        return held.of(self.buffer(name) if held.is_buffer else self.fetch(name))


class _Bound(NamedTuple):
    """One binding of a module by a thread."""

    thread: int
    substitutes: Substitutes


_BOUND: list[_Bound] = []
"""The present bindings, the innermost last. Ranks in lockstep are threads that share parameters; each thread has its own
values."""


class HeldStandIn(Tensor):
    """A plain tensor that shares memory with a parameter or buffer of a module, while the module is bound."""

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
        return nn.Parameter(torch.empty(0) if data is None else data, requires_grad)  # a copy is an ordinary parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return with_present(func, args, kwargs or {})


def with_present(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls `func` with the state's tensors instead of the parameters of a bound module."""
    # While torch.compile traces, it inspects parameters. This is not part of the model's computation.
    if torch._guards.TracingContext.try_get() is None and getattr(func, "__name__", "") != "__hash__":
        args, values = optree.tree_map(_present, (tuple(args), tuple(kwargs.values())))  # no dict: 2.11 cannot trace it
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
    """The innermost binding of a tensor: by this thread, or by any thread if this is a thread of autograd (on CUDA)."""
    found = [bound for bound in _BOUND if id(x) in bound.substitutes.own]
    if not found:
        return None
    is_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    mine = [bound for bound in found if is_autograd or bound.thread == threading.get_ident()]
    return mine[-1] if mine else None


_STAND_INS: dict[type, type] = {nn.Parameter: StandIn, Tensor: HeldStandIn}
_PLAIN = {stand_in: plain for plain, stand_in in _STAND_INS.items()}


def own_class(x: Tensor) -> type | None:
    """The class of a parameter, where it is the user's own subclass of `nn.Parameter`; else None."""
    kind = x.__dict__.get("fzero_class", type(x))
    is_own = kind is not nn.Parameter and issubclass(kind, nn.Parameter) and not kind.__module__.startswith("fzero.")
    return kind if is_own else None


@contextmanager
def substituted(substitutes: Substitutes) -> Iterator[None]:
    """In the body, operators get present values for the tensors of a module, by this thread. Nothing of PyTorch, and no class of
    a parameter, stays changed behind the last such body."""
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
    """As PyTorch's, by which a parametrization gives a tensor its unparametrized values. One without an inverse gives the tensor
    to itself: no change, but it would count as one."""
    if src is not dest:
        _MAYBE_SET(dest, src)


def pass_as_parameter(tensor: Tensor, name: str) -> None:
    """Makes a tensor of the state look like the module's parameter `name`: `nn.Parameter` by class (one of its own could not pass
    as that), and, while a module is bound, a leaf of autograd."""
    tensor.__class__ = nn.Parameter  # type: ignore[assignment]
    tensor.fzero_name = name  # type: ignore[attr-defined]


def _is_leaf(param: nn.Parameter) -> bool:
    if "fzero_name" in param.__dict__ and torch._guards.TracingContext.try_get() is None:  # Dynamo needs the truth
        return True
    with torch._C.DisableTorchFunctionSubclass():  # a `StandIn` answers for itself
        return torch._C.TensorBase.is_leaf.__get__(param)  # type: ignore[attr-defined, no-any-return]


def as_plain(param: Any) -> Any:
    """The parameter with its own class, because torch.compile does not look through a subclass."""
    if type(param) is StandIn:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
    return param


# --- when a step is made -------------------------------------------------------------------------------------------


def check_tensors(model: nn.Module) -> None:
    """Raises ValueError for a model whose parameters a step would not train, or would train differently from a plain loop."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in state_tensors(module)):
            raise ValueError(
                f"model: must have no modules of TorchScript with parameters or buffers, because they compute with their own "
                f"tensors and would not be trained, got {type(module).__name__} {name or '(root)'!r}; use the module that it was "
                f"made from, and script the trained model"
            )
    for name, param in model.named_parameters():
        check_no_hooks(name, param)
        if hasattr(param, "ds_param_type") or (hasattr(param, "fzero_divided") and not param.numel()):
            raise ValueError(
                f"parameter {name!r}: must have its values, and is divided over the ranks, which zero.Init has done; "
                f"pass a model of fzero.deepspeed.zero.Init to fzero.initialize, or make the model outside of it"
            )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        is_param, kind = isinstance(tensor, nn.Parameter), type(tensor)
        wraps = is_param and not issubclass(kind, nn.Parameter) and kind.__name__ != "FakeTensor"
        if wraps or tensor.layout != torch.strided or tensor.is_quantized or hasattr(tensor, "__tensor_flatten__"):
            raise ValueError(
                f"{'parameter' if is_param else 'buffer'} {name!r}: must be dense, because the state holds it in flat memory, "
                f"got {kind.__name__} of {tensor.dtype} and layout {tensor.layout}; keep it in a plain attribute if it never "
                f"changes, or register the plain tensors that it is made from (indices and values), and make it in the forward"
            )
    listed = {id(param) for param in model.parameters()}
    if hidden := [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in listed]:
        raise ValueError(
            f"parameter {hidden[0]!r}: must be listed by the model's parameters(), as optimizers read it, and its own method "
            f"leaves it out; freeze it instead (requires_grad_(False))"
        )
    _check_memory(model)


def check_no_hooks(name: str, param: Tensor) -> None:
    """Raises ValueError for a gradient hook: it would never run, because the module's own parameters are not used."""
    if param._backward_hooks or param._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        raise ValueError(
            f"parameter {name!r}: has a gradient hook, which would never be called; remove it, and change the gradient "
            f"in the forward (a torch.autograd.Function around the parameter) or the parameter after the step"
        )


class _Span(NamedTuple):
    """The byte range of a tensor in memory, half open."""

    start: int
    stop: int
    name: str
    tensor: Tensor


def _check_memory(model: nn.Module) -> None:
    """Raises where a trained parameter shares elements with another parameter or a buffer: a state would hold them twice."""
    for one, other in _sharing(model):
        trained = [isinstance(x.tensor, nn.Parameter) and x.tensor.requires_grad for x in (one, other)]
        if any(trained):
            raise ValueError(
                f"parameter {(one if trained[0] else other).name!r}: must have memory of its own, and shares it with "
                f"{(other if trained[0] else one).name!r}; a state would hold and train both separately; tie them "
                f"(assign the Parameter itself, a.weight = b.weight), or .clone() the tensor that one is made from"
            )


def sharing_buffers(model: nn.Module) -> frozenset[str]:
    """The names of the parameters and buffers that share elements with another: none may change in a forward."""
    return frozenset(span.name for pair in _sharing(model) for span in pair)


def check_unchanged(names: Collection[str], shared: frozenset[str]) -> None:
    """Raises ValueError where a forward has changed one of the buffers that share memory."""
    if found := shared.intersection(names):
        raise ParameterError(
            f"buffer {min(found)!r}: must have memory of its own where a forward changes it, and shares it with another buffer, "
            f"which a plain loop would change too; register one of them, and make the other from it in the forward"
        )


def _sharing(model: nn.Module) -> Iterator[tuple[_Span, _Span]]:
    """The pairs of parameters and buffers that have elements in common."""
    spans = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        start = address(tensor)
        if tensor.device.type != "meta" and start > 0 and tensor.numel():
            reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            first = start + int(tensor.storage_offset()) * tensor.element_size()
            spans.append(_Span(first, first + int(reach) * tensor.element_size(), name, tensor))
    spans.sort(key=lambda span: span[:2])
    for index, one in enumerate(spans):
        for other in spans[index + 1 :]:
            if other.start >= one.stop:
                break
            if _share_elements(one, other):
                yield one, other


def _share_elements(one: _Span, other: _Span) -> bool:
    """Whether two tensors with overlapping byte ranges have an element in common (columns of one matrix have none)."""

    def places(span: _Span) -> Tensor:
        numel = (span.stop - span.start) // span.tensor.element_size()
        offsets = torch.arange(numel).as_strided(span.tensor.shape, span.tensor.stride())
        return offsets.reshape(-1) * span.tensor.element_size() + span.start

    if one.tensor.is_contiguous() or other.tensor.is_contiguous():
        dense, strided = (one, other) if one.tensor.is_contiguous() else (other, one)
        return bool(((places(strided) >= dense.start) & (places(strided) < dense.stop)).any())
    return bool(torch.isin(places(one), places(other)).any())


# --- while it runs -------------------------------------------------------------------------------------------------


def shape_and_dtype(tensor: Tensor | None) -> ShapeAndDtype:
    return None if tensor is None else (tensor.shape, tensor.dtype)


# --- in the first step ---------------------------------------------------------------------------------------------


class OwnGrads:
    """The gradients of a module's own parameters, as they were; a backward must not change them."""

    def __init__(self, model: nn.Module) -> None:
        self._found = [(name, param, _version(param.grad)) for name, param in model.named_parameters()]

    def check(self) -> None:
        """Raises ValueError if a backward has written one of them."""
        for name, param, before in self._found:
            if _version(param.grad) != before:
                raise not_trained(name)


def _version(grad: Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), grad._version)


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under every name: moving a module to `meta` unties tied ones."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def full_values(tensor: Tensor) -> Tensor:
    """A parameter's or buffer's values. *Collective* where it is divided (`fzero.engine.divided_params`): every rank."""
    divided = getattr(tensor, "fzero_divided", None)
    return tensor.detach() if divided is None else divided.full()  # type: ignore[no-any-return]


def bits_of(tensor: Tensor) -> Tensor:
    """A checksum of the tensor's values: the sum of its bits as integers, 0-d int64 on the CPU."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64))
    wide = torch.empty(min(bits.numel(), 1 << 18), dtype=torch.int64, device=bits.device)  # sums are of 64 bits
    return torch.stack([wide[: len(x)].copy_(x).sum() for x in torch.split(bits, 1 << 18)]).sum().cpu()
