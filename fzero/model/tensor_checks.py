"""Checks of a model's tensors: a step raises for a model that it would not train, or
would train differently from a plain loop.

`check_tensors` runs when the step is made. After the first backward
`ModuleGradsUnused` finds a use of the module's own parameters that cannot be
intercepted (`fzero.model.own_params`), and after each forward `check_unchanged` a
change of memory that buffers share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fzero.model.errors import ParameterError, not_trained
from fzero.model.own_params import address, state_tensors


def check_tensors(model: nn.Module) -> None:
    """Raises ValueError for a model whose parameters a step would not train, or would
    train differently from a plain loop.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in state_tensors(module)):
            raise ValueError(
                f"model: must have no modules of TorchScript with parameters or buffers, because "
                f"they compute with their own tensors and would not be trained, got "
                f"{type(module).__name__} {name or '(root)'!r}; use the module that it was made "
                f"from, and script the trained model"
            )
    for name, param in model.named_parameters():
        check_no_hooks(name, param)
        if hasattr(param, "ds_param_type") or (
            hasattr(param, "fzero_divided") and not param.numel()
        ):
            raise ValueError(
                f"parameter {name!r}: must have its values, and is divided over the ranks, which "
                f"zero.Init has done; pass a model of fzero.deepspeed.zero.Init to "
                f"fzero.initialize, or make the model outside of it"
            )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        is_param, kind = isinstance(tensor, nn.Parameter), type(tensor)
        wraps = is_param and not issubclass(kind, nn.Parameter) and kind.__name__ != "FakeTensor"
        if (
            wraps
            or tensor.layout != torch.strided
            or tensor.is_quantized
            or hasattr(tensor, "__tensor_flatten__")
        ):
            raise ValueError(
                f"{'parameter' if is_param else 'buffer'} {name!r}: must be dense, because the "
                f"state holds it in flat memory, got {kind.__name__} of {tensor.dtype} and layout "
                f"{tensor.layout}; keep it in a plain attribute if it never changes, or register "
                f"the plain tensors that it is made from (indices and values), and make it in the "
                f"forward"
            )
    listed = {id(param) for param in model.parameters()}
    if hidden := [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and id(param) not in listed
    ]:
        raise ValueError(
            f"parameter {hidden[0]!r}: must be listed by the model's parameters(), as optimizers "
            f"read it, and its own method leaves it out; freeze it instead (requires_grad_(False))"
        )
    _check_memory(model)


def check_no_hooks(name: str, param: Tensor) -> None:
    """Raises ValueError for a gradient hook: it would never run, because the module's
    own parameters are not used.
    """
    if param._backward_hooks or param._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        raise ValueError(
            f"parameter {name!r}: has a gradient hook, which would never be called; remove it, and "
            f"change the gradient in the forward (a torch.autograd.Function around the parameter) "
            f"or the parameter after the step"
        )


class _Span(NamedTuple):
    """The byte range of a tensor in memory, half open."""

    start: int
    stop: int
    name: str
    tensor: Tensor


def _check_memory(model: nn.Module) -> None:
    """Raises where a trained parameter shares elements with another parameter or a
    buffer: a state would hold them twice.
    """
    for one, other in _sharing(model):
        trained = [
            isinstance(x.tensor, nn.Parameter) and x.tensor.requires_grad for x in (one, other)
        ]
        if any(trained):
            raise ValueError(
                f"parameter {(one if trained[0] else other).name!r}: must have memory of its own, "
                f"and shares it with {(other if trained[0] else one).name!r}; a state would hold "
                f"and train both separately; tie them (assign the Parameter itself, a.weight = "
                f"b.weight), or .clone() the tensor that one is made from"
            )


def sharing_buffers(model: nn.Module) -> frozenset[str]:
    """The names of the parameters and buffers that share elements with another: none
    may change in a forward.
    """
    return frozenset(span.name for pair in _sharing(model) for span in pair)


def check_unchanged(names: Collection[str], shared: frozenset[str]) -> None:
    """Raises ValueError where a forward has changed one of the buffers that share
    memory.
    """
    if found := shared.intersection(names):
        raise ParameterError(
            f"buffer {min(found)!r}: must have memory of its own where a forward changes it, and "
            f"shares it with another buffer, which a plain loop would change too; register one of "
            f"them, and make the other from it in the forward"
        )


def _sharing(model: nn.Module) -> Iterator[tuple[_Span, _Span]]:
    """The pairs of parameters and buffers that have elements in common."""
    spans = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        start = address(tensor)
        if tensor.device.type != "meta" and start > 0 and tensor.numel():
            reach = (
                sum(
                    (n - 1) * stride
                    for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
                )
                + 1
            )
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
    """Whether two tensors with overlapping byte ranges have an element in common
    (columns of one matrix have none).
    """

    def places(span: _Span) -> Tensor:
        numel = (span.stop - span.start) // span.tensor.element_size()
        offsets = torch.arange(numel).as_strided(span.tensor.shape, span.tensor.stride())
        return offsets.reshape(-1) * span.tensor.element_size() + span.start

    if one.tensor.is_contiguous() or other.tensor.is_contiguous():
        dense, strided = (one, other) if one.tensor.is_contiguous() else (other, one)
        return bool(((places(strided) >= dense.start) & (places(strided) < dense.stop)).any())
    return bool(torch.isin(places(one), places(other)).any())


class ModuleGradsUnused:
    """The gradients of a module's own parameters, as they were; a backward must not
    change them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = [
            (name, param, _version(param.grad)) for name, param in model.named_parameters()
        ]

    def check(self) -> None:
        """Raises ValueError if a backward has written one of them."""
        for name, param, before in self._found:
            if _version(param.grad) != before:
                raise not_trained(name)


def _version(grad: Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), grad._version)
