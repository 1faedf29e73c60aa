"""`Leaves`: the flat tensors that one rank holds of a flat buffer, by name, with the memory where each of them lives.

`Update` is one flat buffer to be updated. An optimizer state is a tree; its *long* tensors, as long as the parameters, live
where the plan places them and are replaced by name (`with_long`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.comms.pending import Pending
from fzero.optim.transforms import Transform
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.storage.shard_io import Leaf
from sharding.specs import Placement

Parts = dict[str, Any]
"""One flat buffer's part of a state: `params`, `grads`, `master` and `optimizer`, where it has them."""


class Home(NamedTuple):
    """The placement of a flat tensor of one rank's state, its dtype and its elements."""

    placement: Placement
    dtype: str
    numel: int


class Leaves(NamedTuple):
    """The flat tensors that a rank holds of a buffer, by name."""

    updated: str
    """The master, or the rank's shard of the parameters where there is none."""
    longs: tuple[str, ...]
    """The long tensors of the optimizer state."""
    param: str
    """The same as `updated` where there is no master."""
    grad: str
    """Empty where nothing is trained."""
    numel: int
    """Elements that the rank updates."""
    homes: Mapping[str, Home]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that an update reads and writes, the gradient and the model's parameters aside."""
        return (self.updated, *self.longs)


Join = Callable[[Tensor, Tensor], Pending]
"""Starts the all-gather of the ranks' updated shards (first argument: this rank's) into the second tensor."""


class Update(NamedTuple):
    """One flat buffer to be updated."""

    buffer: FlatParamPlan
    grad: Leaf
    """This rank's (S)."""
    master: Leaf
    """The tensor to update: a shard of the parameters if there is no master."""
    state: Any
    transform_at: Callable[..., Transform]
    """The transform of elements [start, stop). Third argument: where the new parameters are written, if they live elsewhere."""
    param: Leaf
    """This rank's shard of the model's parameters; all that the rank holds of them if they are gathered elsewhere (`joins`)."""
    join: Join


def leaves_of(plan: Plan, buffer: FlatParamPlan) -> Leaves:
    """The flat tensors that a rank holds of a buffer under a plan."""
    updated = param = buffer.key
    params = buffer.params
    shard_of_params = Home(params.placement, params.dtype, params.local_shape(plan.mesh)[0])
    numel = buffer.master.local_shape(plan.mesh)[0]
    homes = {updated: shard_of_params}
    if buffer.has_master:
        param = f"{buffer.key}/params"
        homes = {updated: Home(buffer.placement, buffer.dtypes.master, numel), param: shard_of_params}
    if not buffer.trainable:
        return Leaves(updated, (), param, "", 0, homes)
    accessors, specs, _ = optree.tree_flatten_with_accessor(plan.optimizer[buffer.key])
    longs = []
    for accessor, spec in zip(accessors, specs, strict=True):
        if buffer.is_long(spec):
            longs.append(f"{buffer.key}/{accessor.codify('state')}")
            homes[longs[-1]] = Home(spec.placement, spec.dtype, numel)
    grads, grad = buffer.grads, f"{buffer.key}/grads"
    homes[grad] = Home(grads.placement, grads.dtype, grads.local_shape(plan.mesh)[0])
    return Leaves(updated, tuple(longs), param, grad, numel, homes)


def is_long(accessor: Any, leaves: Leaves) -> bool:
    """Whether the tensor under this accessor of the optimizer state is as long as the parameters."""
    return f"{leaves.updated}/{accessor.codify('state')}" in leaves.longs


def long_tensors(state: Any, leaves: Leaves) -> list[Leaf]:
    """The tensors of an optimizer state that are as long as the parameters."""
    accessors, tensors, _ = optree.tree_flatten_with_accessor(state)
    return [x for accessor, x in zip(accessors, tensors, strict=True) if is_long(accessor, leaves)]


def with_long(state: Any, leaves: Leaves, tensors: Mapping[str, Leaf]) -> Any:
    """The optimizer state with these tensors in place of its long ones."""
    accessors, found, treespec = optree.tree_flatten_with_accessor(state)
    names = [f"{leaves.updated}/{accessor.codify('state')}" for accessor in accessors]
    return treespec.unflatten([tensors.get(name, x) for name, x in zip(names, found, strict=True)])


def to_host(x: Tensor, *, pinned: bool) -> Tensor:
    """A copy in host memory."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned and torch.cuda.is_available()).copy_(x)
