"""Full weight, gradient and optimizer state of single parameters, read and written through a state's shards.

For tools and scripts that inspect single parameters; a step itself works on flat buffers.

Shape letters: P padded elements of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.comms.failures import meet
from fzero.optim.transforms import leaf_names
from fzero.plans.plan import FlatParamPlan
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_tensor import FileTensor, in_memory
from fzero.storage.shard_io import own_shard
from sharding import Partial, Replicated, TensorSpec
from sharding.views import torch_dtype, unflatten

ALSO = {"momentum_buffer": "momentum"}
"""Names in torch.optim that differ from those in fzero."""


def full_params(step: TrainStep, state: TrainState[Tensor], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Copies of full parameters in the model's dtypes, by name, on the step's device.

    *Collective* where they are sharded (stage 3): every rank with the same names; one flat buffer is gathered at a time.

    Args:
        names: of parameters; None is all, tied ones under all of their names.
    """
    aliases = step.plan.aliases
    wanted = {*_homes(step), *aliases} if names is None else set(names)
    first = {aliases.get(name, name) for name in wanted}
    found: dict[str, Tensor] = {}
    for buffer in step.plan.flat_buffers:
        if first & set(buffer.layout.names):
            views = unflatten(_whole(step, buffer, state.params[buffer.key], buffer.params), buffer.layout)
            found |= {name: view.detach().clone() for name, view in views.items() if name in first}
    return {name: found[aliases.get(name, name)] for name in sorted(wanted)}


def is_trained(step: TrainStep, name: str) -> bool:
    """Whether a parameter has a gradient and optimizer state, and is not frozen."""
    return _home(step, name).trainable


def weight_of(step: TrainStep, state: TrainState[Tensor], name: str) -> Tensor:
    """A full parameter in fp32 (or fp64, if it is stored so), from the master if there is one. *Collective* if sharded."""
    buffer = _home(step, name)
    flat, spec = state.master.get(buffer.key), buffer.master
    if flat is None:
        flat, spec = state.params[buffer.key], buffer.params
    return _one(step, buffer, _whole(step, buffer, flat, spec), name)


def with_weight(step: TrainStep, state: TrainState[Tensor], name: str, value: Tensor) -> TrainState[Tensor]:
    """The state with another value of a parameter, also in its master; written in place. *Collective* if sharded."""
    buffer = _home(step, name)
    _check_written(name, *(flats[buffer.key] for flats in (state.master, state.params) if buffer.key in flats))
    if buffer.key in state.master:
        _write(step, buffer, state.master[buffer.key], buffer.master, name, value)
    _write(step, buffer, state.params[buffer.key], buffer.params, name, value)
    return state


def grad_of(step: TrainStep, state: TrainState[Tensor], name: str) -> Tensor:
    """The full mean gradient of a parameter, unscaled and before clipping, in fp32. *Collective.*"""
    buffer = _trained(step, name)
    multiple = step.runtime.rules.multiple(None, state.loss_scale.scale)
    return _one(step, buffer, _whole(step, buffer, state.grads[buffer.key], buffer.grads), name).div_(multiple)


def with_grad(step: TrainStep, state: TrainState[Tensor], name: str, value: Tensor) -> TrainState[Tensor]:
    """The state with another mean gradient of a parameter, written in place. *Collective.*"""
    buffer = _trained(step, name)
    multiple = step.runtime.rules.multiple(None, state.loss_scale.scale)
    _check_written(name, state.grads[buffer.key])
    _write(step, buffer, state.grads[buffer.key], buffer.grads, name, value.to(multiple.device) * multiple)
    return state


def optimizer_state_of(step: TrainStep, state: TrainState[Tensor], name: str, key: str) -> Tensor:
    """The full optimizer state of a parameter under `key`, such as `exp_avg`, in fp32. *Collective* if sharded."""
    buffer = _trained(step, name)
    flat, spec = _leaf(step, state, buffer, key)
    return _one(step, buffer, _whole(step, buffer, flat, spec), name)


def with_optimizer_state(
    step: TrainStep, state: TrainState[Tensor], name: str, key: str, value: Tensor
) -> TrainState[Tensor]:
    """The state with another value of a parameter's optimizer state, written in place. *Collective* if sharded."""
    buffer = _trained(step, name)
    flat, spec = _leaf(step, state, buffer, key)
    _check_written(name, flat)
    _write(step, buffer, flat, spec, name, value)
    return state


# --- helpers -----------------------------------------------------------------------------------------------------


def _homes(step: TrainStep) -> dict[str, FlatParamPlan]:
    return {name: buffer for buffer in step.plan.flat_buffers for name in buffer.layout.names}


def _home(step: TrainStep, name: str) -> FlatParamPlan:
    homes = _homes(step)
    name = step.plan.aliases.get(name, name)
    if name not in homes:
        raise ValueError(
            f"parameter {name!r}: must be one of the model, such as {', '.join(list(homes)[:4])}; pass one"
        )
    return homes[name]


def _trained(step: TrainStep, name: str) -> FlatParamPlan:
    buffer = _home(step, name)
    if not buffer.trainable:
        raise ValueError(
            f"parameter {name!r}: must be trained to have a gradient and optimizer state, and is frozen; pass another"
        )
    return buffer


def _leaf(step: TrainStep, state: TrainState[Tensor], buffer: FlatParamPlan, key: str) -> tuple[Tensor, TensorSpec]:
    tree = state.optimizer[buffer.key]
    specs = optree.tree_leaves(step.plan.optimizer[buffer.key])
    names = list(_short(leaf_names(tree)))
    found = [
        i for i, name in enumerate(names) if name in (key, ALSO.get(key)) and specs[i].shape == (buffer.padded_numel,)
    ]
    if len(found) != 1:
        known = [name for name, spec in zip(names, specs) if spec.shape == (buffer.padded_numel,)]
        raise ValueError(
            f"optimizer state {key!r}: must be one that has the parameter's shape: {known}; pass one of these"
        )
    return optree.tree_leaves(tree)[found[0]], specs[found[0]]


def _short(names: Iterable[str]) -> Iterator[str]:
    """`exp_avg` of `state.exp_avg`, and `momentum_buffer` of `state.tensors['momentum_buffer']`."""
    for name in names:
        yield name.rstrip("]'").rpartition("'")[2].rpartition(".")[2]


def _whole(step: TrainStep, buffer: FlatParamPlan, flat: Any, spec: TensorSpec) -> Tensor:
    """The full flat buffer (P), on the step's device; sharded or partial gradients are gathered from reduced shards."""
    held: Tensor = in_memory(flat).to(step.device)
    if isinstance(spec.spec, Replicated):
        return held
    mesh = step.runtime.mesh
    meet(f"reading {buffer.key!r} in full (GatheredParameters, safe_get_full_fp32_param, Engine.gathered)", mesh.world)
    if isinstance(spec.spec, Partial):
        return mesh.all_gather(own_shard(held, buffer, mesh.shard), mesh.axes)
    return mesh.all_gather(held, mesh.axes_of(spec.spec))


def _one(step: TrainStep, buffer: FlatParamPlan, flat_P: Tensor, name: str) -> Tensor:
    view: Tensor = unflatten(flat_P, buffer.layout)[step.plan.aliases.get(name, name)].detach()
    return view.to(torch.promote_types(view.dtype, torch.float32), copy=True)


def _check_written(name: str, *flats: Any) -> None:
    """Raises ValueError if one of these is in a file, before any is written."""
    for flat in flats:
        if isinstance(flat, FileTensor):
            raise ValueError(
                f"parameter {name!r}: must have its state in memory to be written, and it is in {flat.path}; change it before "
                f"training, or keep this state in memory (offload_optimizer.device, offload_param.device)"
            )


def _write(step: TrainStep, buffer: FlatParamPlan, flat: Any, spec: TensorSpec, name: str, value: Tensor) -> None:
    whole = _whole(step, buffer, flat, spec).clone()
    target = unflatten(whole, buffer.layout)[step.plan.aliases.get(name, name)]
    if target.shape != value.shape:
        raise ValueError(
            f"parameter {name!r}: must be given a value of its own shape {tuple(target.shape)}, got {tuple(value.shape)}"
        )
    with torch.no_grad():
        target.copy_(value)
        flat.copy_(step.runtime.builder.cut(whole.to(torch_dtype(spec.dtype)), spec))
