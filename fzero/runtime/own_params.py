"""A module's own parameters and buffers, while a step computes with the tensors of a state in their place.

Code may hold a parameter besides `module._parameters`: in a list, a closure, a `functools.partial`. While the module is bound
(`fzero.runtime.module_binding`), each own parameter is a `StandIn`: an operator that gets one gets the state's tensor
instead, so that it is gathered and trained like any other. What no operator of Python's shows is found when the step is
made (`check_tensors`: modules of TorchScript, memory that two tensors share), or after the first backward (`OwnGrads`).
What the state was made from must not change until it is first used (`Origin`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import optree
import torch
from torch import Tensor, nn

Fetch = Callable[[str], Tensor]


class ParameterError(ValueError):
    """The model uses its parameters in a way that a step does not follow."""


class _Bound(NamedTuple):
    """A module that is bound now, by a thread: the names of its own parameters by identity, and who has their values."""

    thread: int
    names: Mapping[int, str]
    fetch: Fetch


_BOUND: list[_Bound] = []
"""The innermost last. Ranks in lockstep are threads that share parameters, and each has its own values."""


class StandIn(nn.Parameter):
    """A module's own parameter while the module is bound."""

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(
            torch.empty(0) if data is None else data, requires_grad
        )  # a copy is a parameter like any other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return with_present(func, args, kwargs or {})


def with_present(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func` of the state's tensors, where it is given parameters of a bound module."""
    # What torch.compile looks at while it traces is no computation of the model's.
    is_traced = torch._guards.TracingContext.try_get() is not None
    if not is_traced and getattr(func, "__name__", "") != "__hash__":
        args, kwargs = optree.tree_map(_present, (tuple(args), kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def is_bound(tensor: Any) -> bool:
    """Whether that is a parameter of a module that is bound here."""
    return _bound_with(tensor) is not None


def _present(x: Any) -> Any:
    bound = _bound_with(x) if isinstance(x, nn.Parameter) else None
    return x if bound is None else bound.fetch(bound.names[id(x)])


def _bound_with(x: Any) -> _Bound | None:
    """The innermost binding that has a parameter: of this thread, or of any in a thread of autograd's (on CUDA)."""
    found = [bound for bound in _BOUND if id(x) in bound.names]
    if not found:
        return None
    is_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    mine = [bound for bound in found if is_autograd or bound.thread == threading.get_ident()]
    return mine[-1] if mine else None


def enter(own: Mapping[int, nn.Parameter], names: Mapping[int, str], fetch: Fetch) -> Callable[[], None]:
    """Makes parameters stand for the tensors of `fetch`; the function returned ends that.

    Args:
        own: the parameters by identity.
        names: what `fetch` calls them.
        fetch: see `binding.bound`.
    """
    mine = _Bound(threading.get_ident(), names, fetch)
    _BOUND.append(mine)
    for param in own.values():
        if type(param) is nn.Parameter:  # a class of somebody else's has its own rules
            param.__class__ = StandIn

    def leave() -> None:
        # By identity: two bindings of one module are equal as values.
        _BOUND[:] = [bound for bound in _BOUND if bound is not mine]
        for key, param in own.items():
            if type(param) is StandIn and not any(key in bound.names for bound in _BOUND):
                param.__class__ = nn.Parameter  # type: ignore[assignment]

    return leave


def as_plain(param: Any) -> Any:
    """The parameter with its own class, for torch.compile, which looks through no other."""
    if type(param) is StandIn:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
    return param


# --- when a step is made -------------------------------------------------------------------------------------------


def check_tensors(model: nn.Module) -> None:
    """Raises ValueError for a model whose parameters a step would not reach, or not train as a plain loop does."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in _tensors(module)):
            raise ValueError(
                f"model: must have no modules of TorchScript with parameters or buffers, for these compute with their own and "
                f"would not be trained, got {type(module).__name__} {name or '(root)'!r}; put the module there that it was made "
                f"from, and script what comes out of training"
            )
    for name, param in model.named_parameters():
        check_no_hooks(name, param)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.layout != torch.strided:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ValueError(
                f"{kind} {name!r}: must be dense, for the state holds it in flat memory, got layout {tensor.layout}; keep it in "
                f"a plain attribute if it never changes, or register its indices and values and build it in the forward"
            )
    _check_memory(model)


def check_no_hooks(name: str, param: Tensor) -> None:
    """Hooks of modules run as they are; those of a parameter would not, for the module's parameters are not used."""
    if param._backward_hooks or param._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        raise ValueError(
            f"parameter {name!r}: has a gradient hook, which would never be called; remove it, and change the gradient "
            f"in the forward (a torch.autograd.Function around the parameter) or the parameter after the step"
        )


class _Span(NamedTuple):
    """The bytes of a tensor, from its first to its last."""

    start: int
    stop: int
    name: str
    tensor: Tensor


def _check_memory(model: nn.Module) -> None:
    """Raises where a trained parameter shares elements with another parameter or a buffer: a state would hold them twice."""
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
            trained = [isinstance(x.tensor, nn.Parameter) and x.tensor.requires_grad for x in (one, other)]
            if any(trained) and _share_elements(one, other):
                raise ValueError(
                    f"parameter {(one if trained[0] else other).name!r}: must have memory of its own, and shares it with "
                    f"{(other if trained[0] else one).name!r}, so that a state would hold and train both apart; tie them "
                    f"(assign the Parameter itself, a.weight = b.weight), or .clone() what one is made from"
                )


def _share_elements(one: _Span, other: _Span) -> bool:
    """Whether two tensors whose bytes lie between each other (columns of one matrix, say) have an element in common."""

    def places(span: _Span) -> Tensor:
        numel = (span.stop - span.start) // span.tensor.element_size()
        offsets = torch.arange(numel).as_strided(span.tensor.shape, span.tensor.stride())
        return offsets.reshape(-1) * span.tensor.element_size() + span.start

    if one.tensor.is_contiguous() or other.tensor.is_contiguous():
        whole, part = (one, other) if one.tensor.is_contiguous() else (other, one)
        return bool(((places(part) >= whole.start) & (places(part) < whole.stop)).any())
    return bool(torch.isin(places(one), places(other)).any())


def address(tensor: Tensor) -> int:
    """Where the tensor's storage begins; -1 for a wrapper (of torch.func, of a subclass) or a lazy one, which have none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return -1


# --- while it runs -------------------------------------------------------------------------------------------------


def was_changed(name: str | None, where: str = "of the model") -> ParameterError:
    """What is raised where a forward has changed a parameter: of a gathered one the change would be lost."""
    return ParameterError(
        f"{f'parameter {name!r}' if name else f'parameters {where}'}: must not be changed in place by the forward (under "
        f"no_grad, through .data, by embedding(max_norm=...)), and {'was' if name else 'were'}; what a gathered unit is given is "
        f"dropped with it, so compute with a changed value (linear(x, normalize(weight))), change the state between two "
        f"steps, or register what the forward changes as a buffer"
    )


def late(kind: str, name: str) -> ParameterError:
    """What is raised where the model has a parameter or buffer that the state does not have."""
    return ParameterError(
        f"{kind} {name!r}: must be there when the step is made, and was registered later; register it before (in __init__, or "
        f"with a forward before make_train_step), and leave the module that has it in its place"
    )


def wrong_kind(name: str, before: Tensor | None, now: Tensor | None) -> ParameterError:
    """What is raised where a buffer of the state would grow, come or go."""
    then, there = ("None" if x is None else f"{x.dtype} of shape {tuple(x.shape)}" for x in (before, now))
    return ParameterError(
        f"buffer {name!r}: must keep its shape and dtype, or stay None, for the state holds what is there when the step is "
        f"made, and the forward made {there} of {then}; register it at its largest size (or run a forward before "
        f"make_train_step, in which it comes), or keep what grows, comes or goes in a plain attribute"
    )


def has_hook(name: str) -> ParameterError:
    """What is raised where the forward sets a hook on what it is given as a parameter."""
    return ParameterError(
        f"parameter {name!r}: must get no gradient hook in the forward, which would last until the parameter's unit is left "
        f"and not until the hook is removed, and got one; change the gradient in the forward (a torch.autograd.Function around "
        f"the parameter, or a hook on weight * 1), or the parameter after the step"
    )


def flag_changed(name: str | None) -> ParameterError:
    """What is raised where the forward freezes or unfreezes a parameter."""
    return ParameterError(
        f"{f'parameter {name!r}' if name else 'parameters of the model'}: must keep requires_grad in the forward, for PyTorch "
        f"lets nobody change it of a tensor that belongs to a graph, and it was changed; compute with weight.detach() "
        f"where no gradient is wanted (torch.func.functional_call with detached parameters), or change the flag between "
        f"two steps"
    )


def partial_grad(name: str) -> ParameterError:
    """What is raised where autograd is asked, inside the forward, for the gradient of one of several tensors of a parameter."""
    return ParameterError(
        f"parameter {name!r}: must not be differentiated by inside the forward (torch.autograd.grad, backward) where this "
        f"uses its unit a second time, for each time it is another tensor, so that the gradient may be a part of what a plain "
        f"loop gets; differentiate by a copy that the uses share (weight = 1 * module.weight, passed on with "
        f"torch.func.functional_call), or name a module in units= that holds all that runs between the uses"
    )


# --- in the first step ---------------------------------------------------------------------------------------------


class OwnGrads:
    """The gradients that a module's own parameters had; a backward must leave them alone."""

    def __init__(self, model: nn.Module) -> None:
        self._found = [(name, param, _version(param.grad)) for name, param in model.named_parameters()]

    def check(self) -> None:
        """Raises ValueError where a backward has written one."""
        for name, param, before in self._found:
            if _version(param.grad) != before:
                raise not_trained(name)


def not_trained(name: str) -> ValueError:
    """What is raised where a parameter of the module itself has a gradient."""
    return ValueError(
        f"parameter {name!r}: must be used inside the forward (loss_fn included), and a loss was computed with the module's own, "
        f"whose gradient is in its .grad, where nothing trains it; move that computation (a penalty, say) into the forward, or "
        f"give compiled code the parameter as an argument; module.zero_grad() drops that gradient"
    )


def _version(grad: Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), grad._version)


class _Seen(NamedTuple):
    """A tensor of the module when a state took its values."""

    tensor: ref[Tensor]
    """Weak, so that a module that moves to `meta` frees its own."""
    identity: tuple[int, int, int]
    bits: Tensor


class Origin:
    """What a module is when a step is made, and what its tensors hold when a state is made from them.

    Until that state is used nothing looks at the module again, so that a change would be lost.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(model)}
        self._seen: dict[str, _Seen] = {}
        self._is_open = True

    def look(self, *, given: bool) -> None:
        """Notes what the tensors hold where a state is made from them; with values `given`, only what they are."""
        self._check_kinds()
        self._is_open, self._seen = True, {}
        for name, x in () if given else _tensors(self._model):
            if not x.is_meta and type(x) in (Tensor, nn.Parameter, StandIn):
                self._seen[name] = _Seen(ref(x), _identity(x), bits_of(x))

    def close(self) -> None:
        """Looks no more."""
        self._is_open, self._seen = False, {}

    def leave(self) -> None:
        """What the state was made from has been used. Costs nothing after the first time.

        Raises:
            ValueError: the module is another one, or its tensors hold something else than was noted.
        """
        if not self._is_open:
            return
        now = self._check_kinds()
        for name, seen in self._seen.items():
            tensor = now[name]
            is_same = tensor is seen.tensor() and _identity(tensor) == seen.identity
            if not (is_same or tensor.is_meta or torch.equal(bits_of(tensor), seen.bits)):
                raise ValueError(
                    f"model: must hold what it held in init until the first step, and {name!r} was changed since "
                    f"(load_state_dict, a reset), which the state does not see; call init after the change, or "
                    f"init(params=state_dict)"
                )
        self.close()

    def _check_kinds(self) -> dict[str, Tensor]:
        now = dict(_tensors(self._model))
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in now.items()}
        differing = [name for name in {**self._kinds, **found} if self._kinds.get(name) != found.get(name)]
        if differing:
            then, there = (_told(kinds.get(differing[0])) for kinds in (self._kinds, found))
            raise ValueError(
                f"model: must stay as it was when the step was made, and {differing[0]!r} was {then} and is {there}; change the "
                f"model (a new head, .half()) before make_train_step"
            )
        return now


def _told(kind: tuple[torch.Size, torch.dtype] | None) -> str:
    return "not there" if kind is None else f"{kind[1]} of shape {tuple(kind[0])}"


def _identity(tensor: Tensor) -> tuple[int, int, int]:
    version = -1 if tensor.is_inference() else tensor._version  # PyTorch counts no changes of inference tensors
    return address(tensor), int(tensor.storage_offset()), version


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Under every name, for tied ones are no longer one when a module moves to `meta`; without what a module may make anew."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def bits_of(tensor: Tensor) -> Tensor:
    """A number that changes when the tensor's values do: the sum of its bits as integers, 0-d int64 on the CPU."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)).sum().cpu()
