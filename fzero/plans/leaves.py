"""`StateLeaf`: the tensors of the state of one flat buffer, and their names. They are
listed only here.

Module buffers, random states and comm hooks' states belong to no flat buffer and have
names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import optree

from fzero.optim.whole_matrices import EntriesSpec
from fzero.plans.flat_params import FlatParamPlan
from sharding import TensorSpec

Quantity = Literal["params", "master", "grads", "optimizer"]


class StateLeaf(NamedTuple):
    """One tensor of a flat buffer's state.

    >>> leaf = StateLeaf(
    ...     "optimizer", "h.0/float32", ".exp_avg", TensorSpec((64,), "float32"), is_long=True
    ... )
    >>> leaf.placed_as, leaf.state_name
    ('optimizer/h.0/float32/exp_avg', "state.optimizer['h.0/float32'].exp_avg")
    >>> leaf.stream_name
    'h.0/float32/state.exp_avg'
    """

    quantity: Quantity
    key: str
    """The key of the flat buffer."""
    path: str
    """The path of a tensor within the optimizer state, as Python reads it (`.exp_avg`,
    `[1].exp_avg` in a chain); else empty.
    """
    spec: TensorSpec
    is_long: bool
    """Whether it has as many elements as the buffer (`FlatParamPlan.is_long`)."""
    is_updated: bool = False
    """Whether it is the tensor that the optimizer updates: the master, or the
    parameters where there is none.
    """

    @property
    def is_divided(self) -> bool:
        """Whether it is divided like the buffer, so that it may live off the device:
        also one that holds other entries of each parameter than its elements.
        """
        return self.is_long or isinstance(self.spec, EntriesSpec)

    @property
    def short(self) -> str:
        """The path as users write it: `exp_avg`, `[1].exp_avg`."""
        return self.path.removeprefix(".")

    @property
    def placed_as(self) -> str:
        """`quantity/key/leaf`, which the patterns of `placements` match."""
        return f"{self.quantity}/{self.key}/{self.short}".rstrip("/")

    @property
    def state_name(self) -> str:
        """The expression that reads the tensor from a `TrainState`."""
        return f"state.{self.quantity}[{self.key!r}]{self.path}"

    @property
    def stream_name(self) -> str:
        """The name of the tensor in its stream and its file. For the updated tensor
        this is the buffer's key.
        """
        if self.is_updated:
            return self.key
        return (
            f"{self.key}/state{self.path}"
            if self.quantity == "optimizer"
            else stream_name(self.quantity, self.key)
        )


@cache  # a step asks for it several times per unit
def stream_name(quantity: Literal["params", "master", "grads"], key: str) -> str:
    """The name of a flat buffer's tensor in its stream and its file, unless it is the
    updated tensor.
    """
    return f"{key}/{quantity}"


def state_leaves(buffer: FlatParamPlan, optimizer: Mapping[str, Any]) -> list[StateLeaf]:
    """All tensors of the state of a flat buffer; `optimizer` are the specs of all
    optimizer states (`Plan.optimizer`).
    """
    leaves = [
        StateLeaf("params", buffer.key, "", buffer.params, True, is_updated=not buffer.has_master)
    ]
    if buffer.has_master:
        leaves.append(StateLeaf("master", buffer.key, "", buffer.master, True, is_updated=True))
    if buffer.trainable:
        leaves.append(StateLeaf("grads", buffer.key, "", buffer.grads, True))
    return leaves + optimizer_leaves(buffer, optimizer)


def optimizer_leaves(buffer: FlatParamPlan, optimizer: Mapping[str, Any]) -> list[StateLeaf]:
    """The tensors of a flat buffer's optimizer state, in the order of its leaves; none
    for a frozen buffer.
    """
    if not buffer.trainable:
        return []
    specs, structure = optree.tree_flatten(optimizer[buffer.key])
    return [
        StateLeaf("optimizer", buffer.key, path, spec, buffer.is_long(spec))
        for path, spec in zip(_paths(structure), specs, strict=True)
    ]


@cache  # many flat buffers, few structures
def _paths(structure: optree.PyTreeSpec) -> tuple[str, ...]:
    """The path of each leaf as Python reads it."""
    return tuple(accessor.codify("") for accessor in structure.accessors())
