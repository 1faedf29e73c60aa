"""Tensors that a model keeps from the first step: parameters as its forward got them, and views of gathered memory.

In a plain loop these tensors follow the parameter. So from the second step on they are `Held`: while the model is bound,
operators receive the present values instead.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from weakref import ref

from torch import Tensor

from fzero.model.held_tensors import Held, has_storage
from fzero.plans.flat_params import FlatParamPlan
from fzero.runtime.step_runtime import StepRuntime
from fzero.storage.file_tensor import StoredTensor


def hold(run: StepRuntime, params: Mapping[str, StoredTensor]) -> None:
    """Finds what the model has kept since the last step. Warns of views of gathered memory that are kept later.

    Views of the state's own flat buffers, `params`, follow it by themselves.
    """
    learned, own = run.learned, dict(run.spec.model.named_parameters(remove_duplicate=False))
    homes = {flat.untyped_storage()._cdata for flat in params.values() if isinstance(flat, Tensor)}
    kept = {
        each.memory.cdata: each.key for each in learned.lingering if each.is_held and each.memory.cdata not in homes
    }
    if learned.leaves:
        found = [Held(leaf, ref(own[name]), name, False) for name, leaf in learned.leaves if leaf() is not None]
        for x in gc.get_objects() if kept else ():
            if type(x) is Tensor and has_storage(x) and (key := kept.get(x.untyped_storage()._cdata)):
                found += _view_of(x, run.plan.flats[key][1], own)
        run.binding.hold(found)
        learned.leaves = []
    elif kept:
        warnings.warn(
            f"parameters of {min(kept.values())!r}: a tensor that a forward of an earlier step made without a copy (weight.data, "
            f"weight.detach()) is still held, and keeps the values of that step, because stage 3 gathers others; if the "
            f"model computes with it, make it anew in each forward; if not, hold a clone, which takes less memory",
            stacklevel=4,
        )


def _view_of(x: Tensor, buffer: FlatParamPlan, own: Mapping[str, Tensor]) -> Iterator[Held]:
    """The `Held` of a view of a gathered flat buffer: with the parameter that has all of its elements."""
    first = int(x.storage_offset())
    last = first + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    for name in buffer.layout.names:
        start, stop = buffer.layout.bounds(name)
        if start <= first and last < stop and x.dtype == own[name].dtype:
            yield Held(ref(x), ref(own[name]), name, False, (*x.shape,), x.stride(), first - start, x.requires_grad)
