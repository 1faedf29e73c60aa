"""Full or local weight, gradient and optimizer state of single parameters, read and
written through a state's shards.

For tools and scripts that inspect single parameters; a step itself works on flat
buffers.

Shape letters: P padded elements of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.comms.hangs.failures import store_barrier
from fzero.plans.leaves import optimizer_leaves
from fzero.plans.plan import FlatParamPlan
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_tensor import in_memory
from fzero.storage.shard_transfer import own_shard, part_of
from fzero.verbs import gather_flat, start_reduce_scatter_grads
from sharding import Replicated, Sharded, TensorSpec
from sharding.views import torch_dtype, unflatten

ALSO = {"momentum_buffer": "momentum"}
"""Names in torch.optim that differ from those in fzero."""


def full_params(
    step: TrainStep, state: TrainState[Tensor], names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Copies of full parameters in the model's dtypes, by name, on the step's device.

    *Collective* where they are sharded (stage 3): every rank with the same names; one
    flat buffer is gathered at a time. Without names, all are read, tied ones under all
    of their names.
    """
    aliases = step.plan.aliases
    wanted = {*_homes(step), *aliases} if names is None else set(names)
    first = {aliases.get(name, name) for name in wanted}
    found: dict[str, Tensor] = {}
    for buffer in step.plan.flat_buffers:
        if first & set(buffer.layout.names):
            flat = _Flat(step, buffer, state.params[buffer.key], buffer.params)
            views = unflatten(flat.full(), buffer.layout)
            found |= {name: view.detach().clone() for name, view in views.items() if name in first}
    return {name: found[aliases.get(name, name)] for name in sorted(wanted)}


def is_trained(step: TrainStep, name: str) -> bool:
    """Whether a parameter has a gradient and optimizer state, and is not frozen."""
    return _home(step, name).trainable


def weight_of(step: TrainStep, state: TrainState[Tensor], name: str) -> Tensor:
    """A full parameter in fp32 (or fp64, if it is stored so), from the master if there
    is one. *Collective* if sharded.
    """
    return _weights(step, state, name)[0].read(name)


def with_weight(
    step: TrainStep, state: TrainState[Tensor], name: str, value: Tensor
) -> TrainState[Tensor]:
    """The state with another value of a parameter, also in its master; written in
    place. *Collective* if sharded.
    """
    return _written(state, name, value, *_weights(step, state, name))


def grad_of(step: TrainStep, state: TrainState[Tensor], name: str) -> Tensor:
    """The full mean gradient of a parameter, unscaled and before clipping, in fp32.
    *Collective.*
    """
    grads, multiple = _grads(step, state, name)
    return grads.read(name).div_(multiple)


def with_grad(
    step: TrainStep, state: TrainState[Tensor], name: str, value: Tensor
) -> TrainState[Tensor]:
    """The state with another mean gradient of a parameter, written in place.
    *Collective.*
    """
    grads, multiple = _grads(step, state, name)
    return _written(state, name, value.to(multiple.device) * multiple, grads)


def unreduced_grad_of(step: TrainStep, state: TrainState[Tensor], name: str) -> Tensor:
    """The full mean gradient of a parameter, like `grad_of`, where the ranks have not
    reduced theirs yet. *Collective.*

    Reduces a copy, as the last backward will; the state does not change.
    """
    (flat, multiple), mesh = _grads(step, state, name), step.runtime.mesh
    buffer = flat.buffer
    store_barrier("reading a gradient before it is reduced (safe_get_full_grad)", mesh.world)
    full_P = in_memory(flat.flat).to(step.device, torch_dtype(buffer.flow.send_dtype), copy=True)
    states = state.hook_states.get(buffer.key, {})
    mean, _ = start_reduce_scatter_grads(
        full_P, buffer, mesh, step.plan.comm_hooks, states=states
    ).wait()
    if buffer.flow.reduces_to != "full":
        mean = gather_flat(mean.to(torch_dtype(flat.spec.dtype)), buffer, mesh)
    return flat.entries(mean, name).div_(multiple)


def local_weight_of(step: TrainStep, state: TrainState[Tensor], name: str) -> Tensor:
    """This rank's elements of a parameter (1-d) in fp32 or fp64, from the master if
    there is one; all where not sharded.
    """
    return _weights(step, state, name)[0].read_local(name)


def with_local_weight(
    step: TrainStep, state: TrainState[Tensor], name: str, value: Tensor
) -> TrainState[Tensor]:
    """The state with other values of this rank's elements of the master, written in
    place.

    *Collective* where parameters are kept in full beside a sharded master: every rank
    writes its part, and all get them.
    """
    first, *others = _weights(step, state, name)
    first.write_local(name, value)
    if first.buffer.flow.updates == "shard":
        in_full = [flat for flat in (first, *others) if isinstance(flat.spec.spec, Replicated)]
        full = first.joined(name) if in_full else None
    else:
        in_full, full = others, first.read(name)
    for flat in in_full:
        assert full is not None
        flat.write(name, full)
    for flat in others if not in_full else ():  # a sharded master, and sharded parameters
        flat.write_local(name, first.read_local(name))
    return state


def local_grad_of(step: TrainStep, state: TrainState[Tensor], name: str) -> Tensor:
    """This rank's elements (1-d) of the mean gradient of a parameter, unscaled and
    before clipping, in fp32.
    """
    grads, multiple = _grads(step, state, name)
    return grads.read_local(name).div_(multiple)


def with_local_grad(
    step: TrainStep, state: TrainState[Tensor], name: str, value: Tensor
) -> TrainState[Tensor]:
    """The state with other values of this rank's elements of the mean gradient, written
    in place.
    """
    grads, multiple = _grads(step, state, name)
    grads.write_local(name, value.to(multiple.device) * multiple)
    return state


def local_optimizer_state_of(
    step: TrainStep, state: TrainState[Tensor], name: str, key: str
) -> Tensor:
    """This rank's elements (1-d) of the optimizer state of a parameter, in fp32."""
    return _leaf(step, state, name, key).read_local(name)


def with_local_optimizer_state(
    step: TrainStep, state: TrainState[Tensor], name: str, key: str, value: Tensor
) -> TrainState[Tensor]:
    """The state with other values of this rank's elements of a parameter's optimizer
    state, written in place.
    """
    _leaf(step, state, name, key).write_local(name, value)
    return state


def optimizer_keys(step: TrainStep, name: str) -> list[str]:
    """The names of the tensors of a parameter's optimizer state, as torch.optim calls
    them, without the count of updates.
    """
    theirs = {own: name for name, own in ALSO.items()}
    leaves = optimizer_leaves(_trained(step, name), step.plan.optimizer)
    return [theirs.get(_last(leaf.path), _last(leaf.path)) for leaf in leaves if leaf.is_long]


def optimizer_counts(
    step: TrainStep, state: TrainState[Tensor], buffer: FlatParamPlan
) -> list[Tensor]:
    """The counts of updates of a flat buffer, which all of its parameters share."""
    leaves = optimizer_leaves(buffer, step.plan.optimizer)
    tensors = optree.tree_leaves(state.optimizer[buffer.key])
    return [
        x
        for leaf, x in zip(leaves, tensors, strict=True)
        if not leaf.is_long and _last(leaf.path) == "step"
    ]


def optimizer_part(step: TrainStep, state: TrainState[Tensor], name: str, key: str) -> Any:
    """This rank's elements (1-d) of a parameter's optimizer state: a view, or a part of
    a file.
    """
    return _leaf(step, state, name, key).local(name)


def updated_parts(step: TrainStep, state: TrainState[Tensor], name: str) -> list[Any]:
    """This rank's elements (1-d) of all that an update writes of a parameter: views, or
    parts of files.
    """
    keys = optimizer_keys(step, name)
    flats = [*_weights(step, state, name), *(_leaf(step, state, name, key) for key in keys)]
    return [flat.local(name) for flat in flats]


def optimizer_state_of(step: TrainStep, state: TrainState[Tensor], name: str, key: str) -> Tensor:
    """The full optimizer state of a parameter under `key`, such as `exp_avg`, in fp32.
    *Collective* if sharded.
    """
    return _leaf(step, state, name, key).read(name)


def with_optimizer_state(
    step: TrainStep, state: TrainState[Tensor], name: str, key: str, value: Tensor
) -> TrainState[Tensor]:
    """The state with another value of a parameter's optimizer state, written in place.
    *Collective* if sharded.
    """
    return _written(state, name, value, _leaf(step, state, name, key))


class _Flat(NamedTuple):
    """A flat tensor of a state, with the buffer that it belongs to."""

    step: TrainStep
    buffer: FlatParamPlan
    flat: Any
    spec: TensorSpec

    def full(self) -> Tensor:
        """All of it (P), on the step's device; of partial gradients, the reduced shards
        are gathered.
        """
        step, buffer = self.step, self.buffer
        held: Tensor = in_memory(self.flat).to(step.device)
        if isinstance(self.spec.spec, Replicated):
            return held
        mesh = step.runtime.mesh
        call = (
            f"reading {buffer.key!r} in full (GatheredParameters, safe_get_full_fp32_param, "
            f"Engine.gathered)"
        )
        store_barrier(call, mesh.world)
        if self.spec.spec != buffer.params.spec:
            held = own_shard(held, buffer, mesh.shard)
        return gather_flat(held, buffer, mesh)

    def read(self, name: str) -> Tensor:
        """The entries of one parameter, in fp32 or wider. *Collective* if sharded."""
        return self.entries(self.full(), name)

    def entries(self, full_P: Tensor, name: str) -> Tensor:
        """A copy of the entries of one parameter in such a flat tensor, in fp32 or
        wider.
        """
        return _wide(self._view(full_P, name))

    def joined(self, name: str) -> Tensor:
        """The entries of one parameter from the shards that the ranks update.
        *Collective.*
        """
        mesh = self.step.runtime.mesh
        store_barrier("writing a part of a parameter (safe_set_local_fp32_param)", mesh.world)
        own = own_shard(in_memory(self.flat).to(self.step.device), self.buffer, mesh.shard)
        return self.entries(gather_flat(own, self.buffer, mesh), name)

    def write(self, name: str, value: Tensor) -> None:
        """Overwrites the entries of one parameter. *Collective* if sharded."""
        full_P = self.full().clone()
        target = self._view(full_P, name)
        if target.shape != value.shape:
            raise ValueError(
                f"parameter {name!r}: must be given a value of its own shape "
                f"{tuple(target.shape)}, got {tuple(value.shape)}"
            )
        with torch.no_grad():
            target.copy_(value)
            own = self.step.runtime.builder.cut(full_P.to(torch_dtype(self.spec.dtype)), self.spec)
            part_of(self.flat, 0, self.flat.numel()).copy_(own)

    def read_local(self, name: str) -> Tensor:
        """A copy of this rank's elements of one parameter (1-d), in fp32 or wider;
        empty where it has none.
        """
        return _wide(self.local(name)[:].to(self.step.device))

    def write_local(self, name: str, value: Tensor) -> None:
        """Overwrites this rank's elements of one parameter."""
        own = self.local(name)
        if own.numel() != value.numel():
            raise ValueError(
                f"parameter {name!r}: must be given a value for this rank's {own.numel()} "
                f"elements, got {value.numel()}; change the one that safe_get_local_… returned"
            )
        if own.numel():
            with torch.no_grad():
                own.copy_(value.reshape(-1).to(own.dtype))

    def local(self, name: str) -> Any:
        """This rank's elements of one parameter: a view, or a part of a file."""
        buffer, step = self.buffer, self.step
        if isinstance(self.spec.spec, Sharded):
            shard = step.plan.mesh.shard_of(step.runtime.rank, self.spec.spec)
            start = self.spec.partition(step.plan.mesh).bounds(shard)[0]
            own: Any = self.flat
        elif self.flat.numel() != buffer.shard_numel and buffer.flow.updates == "shard":
            # a gradient kept in full
            own, start = (
                own_shard(self.flat, buffer, step.runtime.mesh.shard),
                step.runtime.mesh.shard * buffer.shard_numel,
            )
        else:
            own, start = self.flat, 0
        first, end = buffer.layout.bounds(step.plan.aliases.get(name, name))
        first, end = (min(max(place - start, 0), own.numel()) for place in (first, end))
        return part_of(own, first, end)

    def _view(self, full_P: Tensor, name: str) -> Tensor:
        return unflatten(full_P, self.buffer.layout)[self.step.plan.aliases.get(name, name)]


def _written(
    state: TrainState[Tensor], name: str, value: Tensor, *flats: _Flat
) -> TrainState[Tensor]:
    """The state, after a value was written to these, in memory or in files."""
    for flat in flats:
        flat.write(name, value)
    return state


def _weights(step: TrainStep, state: TrainState[Tensor], name: str) -> list[_Flat]:
    """The flat tensors that hold a parameter: the master if there is one, and the
    model's.
    """
    buffer = _home(step, name)
    both = (state.master, buffer.master), (state.params, buffer.params)
    return [
        _Flat(step, buffer, flats[buffer.key], spec) for flats, spec in both if buffer.key in flats
    ]


def _grads(step: TrainStep, state: TrainState[Tensor], name: str) -> tuple[_Flat, Tensor]:
    """The flat gradient of a parameter, and the multiple of the mean gradient that it
    holds.
    """
    buffer = _trained(step, name)
    multiple = step.runtime.rules.loss.multiple(None, state.loss_scale.scale)
    return _Flat(step, buffer, state.grads[buffer.key], buffer.grads), multiple


def _homes(step: TrainStep) -> dict[str, FlatParamPlan]:
    return {name: buffer for buffer in step.plan.flat_buffers for name in buffer.layout.names}


def _home(step: TrainStep, name: str) -> FlatParamPlan:
    param_units = step.plan.param_units
    name = step.plan.aliases.get(name, name)
    if name not in param_units:
        raise ValueError(
            f"parameter {name!r}: must be one of the model, such as "
            f"{', '.join(list(param_units)[:4])}; "
            f"pass one"
        )
    return param_units[name][1]


def _trained(step: TrainStep, name: str) -> FlatParamPlan:
    buffer = _home(step, name)
    if not buffer.trainable:
        raise ValueError(
            f"parameter {name!r}: must be trained to have a gradient and optimizer state, and is "
            f"frozen; pass another"
        )
    return buffer


def _leaf(step: TrainStep, state: TrainState[Tensor], name: str, key: str) -> _Flat:
    buffer = _trained(step, name)
    leaves, tensors = (
        optimizer_leaves(buffer, step.plan.optimizer),
        optree.tree_leaves(state.optimizer[buffer.key]),
    )
    known = [
        (_last(leaf.path), x, leaf.spec)
        for leaf, x in zip(leaves, tensors, strict=True)
        if leaf.is_long
    ]
    found = [
        _Flat(step, buffer, x, spec) for name, x, spec in known if name in (key, ALSO.get(key))
    ]
    if len(found) != 1:
        raise ValueError(
            f"optimizer state {key!r}: must be one that has the parameter's shape: "
            f"{[name for name, *_ in known]}; pass one of these"
        )
    return found[0]


def _wide(view: Tensor) -> Tensor:
    """A copy in fp32, or fp64 if the values are."""
    return view.detach().to(torch.promote_types(view.dtype, torch.float32), copy=True)


def _last(path: str) -> str:
    """`exp_avg` of `.exp_avg`, and `momentum_buffer` of `.tensors['momentum_buffer']`."""
    return path.rstrip("]'").rpartition("'")[2].rpartition(".")[2]
