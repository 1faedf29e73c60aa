"""`SharedTensor`: a tensor through which code outside `module._parameters` and
`module._buffers` reads a parameter or buffer of a model.

It is a plain tensor that shares a parameter's memory (`weight.data`, `weight.t()`) in a
list, a closure or an attribute; or the registered tensor itself, where the module no
longer has it (a buffer is replaced by that of the state, and a parameter by
`model.to("meta")`). While the model is bound, operators receive the present values
instead (`own_params.with_present`).

Finding them costs about a microsecond per tensor: PyTorch counts the tensors that share
a storage, and Python the references to a tensor. All tensors of the process are
searched only if a count is too large.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from fzero.model.module_index import ModuleIndex
from fzero.model.own_params import address


@dataclass(frozen=True, slots=True, eq=False)
class SharedTensor:
    """A tensor that shares the memory of a parameter or buffer.

    Attributes:
        tensor: a reference to it.
        owner: the parameter or buffer.
        name: the name of the owner.
        is_buffer: whether the owner is a buffer.
        size, stride, offset: its elements, counted from the owner's first one; None if
            they are all elements of the owner.
        is_attached: whether its gradient is passed on to the owner.
        is_apart: whether it cannot be made from the owner, because it has elements that
            the owner lacks, or another dtype.
    """

    tensor: ref[Tensor]
    owner: ref[Tensor]
    name: str
    is_buffer: bool
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    is_attached: bool = True
    is_apart: bool = False

    def of(self, present: Tensor) -> Tensor:
        """The tensor, made from the present values of its owner. Raises ValueError if
        it cannot be made from them.
        """
        if self.is_apart:
            raise ValueError(
                f"parameter {self.name!r}: must not be read through a tensor that shares its "
                f"memory and shows more than it, or another dtype, and was; such a tensor has none "
                f"of the values that are trained, so make it in the forward"
            )
        present = present if self.is_attached else present.detach()
        if self.size is None:
            return present
        if torch.compiler.is_compiling():  # there as_strided does not compose with other views
            raise ValueError(
                f"{'buffer' if self.is_buffer else 'parameter'} {self.name!r}: must not be read "
                f"through a view that was made before the forward, in one graph; make the view in "
                f"the forward, or leave compile='step' out"
            )
        return present.as_strided(
            self.size, self.stride, int(present.storage_offset()) + self.offset
        )


def find_held(model: nn.Module) -> tuple[SharedTensor, ...]:
    """The tensors outside of the model's slots that share memory with its parameters or
    its persistent buffers.
    """
    slots = list(_slots(model))
    owners = {id(owner): (owner, name, is_buffer) for owner, name, is_buffer, _ in slots}
    found = [
        SharedTensor(ref(owner), ref(owner), name, is_buffer)
        for owner, name, is_buffer, is_alone in slots
        if not is_alone
    ]
    by_storage: dict[int, list[int]] = {}
    for index, (owner, _, _) in owners.items():
        by_storage.setdefault(owner.untyped_storage()._cdata, []).append(index)
    shared = {
        storage: [owners[index] for index in indices]
        for storage, indices in by_storage.items()
        # One more is the Python object of the storage.
        if torch._C._storage_Use_Count(storage) > len(indices) + 1  # type: ignore[attr-defined]
    }
    if shared:
        for x in gc.get_objects():
            if type(x) in (Tensor, nn.Parameter) and id(x) not in owners and has_storage(x):
                found += _held_by(x, shared.get(x.untyped_storage()._cdata, ()))
    return tuple(found)


def _slots(model: nn.Module) -> Iterator[tuple[Tensor, str, bool, bool]]:
    """The tensors that a state holds: tensor, name, whether it is a buffer, and whether
    nothing else refers to it.
    """
    for slot in ModuleIndex.of(model).slots():
        is_alone = _num_references(slot.owner, slot.key) <= _ALONE
        tensor = slot.owner[slot.key]
        if type(tensor) in (Tensor, nn.Parameter) and not slot.is_cache and has_storage(tensor):
            yield tensor, slot.name, slot.kind == "_buffers", is_alone


def _num_references(slots: Mapping[str, Any], key: str) -> int:
    return sys.getrefcount(slots[key])


_ALONE = _num_references({"one": object()}, "one")
"""The references to a tensor that only its module holds."""


def has_storage(x: Any) -> bool:
    """Whether a tensor is dense and has memory with an address."""
    return (
        x.layout == torch.strided and x.device.type != "meta" and x.numel() > 0 and address(x) > 0
    )


def _held_by(x: Tensor, owners: Any) -> Iterator[SharedTensor]:
    """The `SharedTensor` of `x`: with the owner that has all of its elements, or else,
    `is_apart`, with the first trained owner.
    """
    for owner, name, is_buffer in owners:
        first = int(x.storage_offset() - owner.storage_offset())
        is_same = first == 0 and x.size() == owner.size() and x.stride() == owner.stride()
        last = first + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        is_inside = owner.is_contiguous() and first >= 0 and last < owner.numel()
        if x.dtype == owner.dtype and (is_same or is_inside):
            shown: dict[str, Any] = (
                {} if is_same else {"size": (*x.shape,), "stride": x.stride(), "offset": first}
            )
            yield SharedTensor(
                ref(x),
                ref(owner),
                name,
                is_buffer,
                **shown,
                is_attached=x._base is owner and x.requires_grad,
            )
            return
    for owner, name, _ in owners:
        if owner.requires_grad:
            yield SharedTensor(ref(x), ref(owner), name, is_buffer=False, is_apart=True)
            return
