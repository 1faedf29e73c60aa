"""`Leaves`: the flat tensors that one rank holds of a flat buffer, by name, with the
memory where each of them lives.

An optimizer state is a tree. Its *long* tensors are divided like the parameters. They
live where the plan places them, and are replaced by name (`with_long`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import optree

from fzero.plans.plan import FlatParamPlan, Plan
from fzero.storage.file_tensor import StoredTensor
from sharding.specs import Placement

if TYPE_CHECKING:
    from fzero.storage.state_memory import Update


class LeafSpec(NamedTuple):
    """The placement of a flat tensor of one rank's state, its dtype and its elements."""

    placement: Placement
    dtype: str
    numel: int


class Leaves(NamedTuple):
    """The flat tensors that a rank holds of a buffer, by name."""

    updated: str
    """The master, or the rank's shard of the parameters where there is none."""
    of_state: tuple[str, ...]
    """The tensors of the optimizer state in their order; short ones have empty names,
    and live where the update runs.
    """
    param: str
    """The parameters; the same as `updated` if there is no master."""
    grad: str
    """The gradient; empty for a frozen buffer."""
    numel: int
    """Elements that the rank updates."""
    specs: Mapping[str, LeafSpec]

    @property
    def longs(self) -> tuple[str, ...]:
        """The long tensors of the optimizer state."""
        return tuple(filter(None, self.of_state))

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that an update reads and writes, except the gradient and the
        model's parameters.
        """
        return (self.updated, *self.longs)


def leaves_of(plan: Plan, buffer: FlatParamPlan) -> Leaves:
    """The flat tensors that a rank holds of a buffer under a plan."""
    leaves = plan.leaves(buffer)
    specs = {
        leaf.stream_name: LeafSpec(
            leaf.spec.placement, leaf.spec.dtype, leaf.spec.local_shape(plan.mesh)[0]
        )
        for leaf in leaves
        if leaf.is_divided
    }
    names = {leaf.quantity: leaf.stream_name for leaf in leaves}
    of_state = tuple(
        leaf.stream_name if leaf.is_divided else ""
        for leaf in leaves
        if leaf.quantity == "optimizer"
    )
    numel = buffer.flow.updated_numel if buffer.trainable else 0
    return Leaves(buffer.key, of_state, names["params"], names.get("grads", ""), numel, specs)


def long_tensors(state: Any, leaves: Leaves) -> list[StoredTensor]:
    """The tensors of an optimizer state that are divided like the parameters."""
    return [x for x, name in zip(optree.tree_leaves(state), leaves.of_state, strict=True) if name]


def tensors_of(update: Update, leaves: Leaves) -> dict[str, StoredTensor]:
    """The tensors that the update of a buffer reads and writes, by name, each where it
    lives.
    """
    found = dict(
        zip(leaves.names, (update.master, *long_tensors(update.state, leaves)), strict=True)
    )
    return {leaves.param: update.param, leaves.grad: update.grad} | found


def with_long(state: Any, leaves: Leaves, tensors: Mapping[str, StoredTensor]) -> Any:
    """The optimizer state with these tensors instead of its long ones."""
    found, treespec = optree.tree_flatten(state)
    return treespec.unflatten(
        [tensors.get(name, x) for name, x in zip(leaves.of_state, found, strict=True)]
    )
