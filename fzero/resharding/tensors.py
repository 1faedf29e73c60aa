"""`FlatTensor`: the tensors of a training state as flat tensors of named entries, in
any layout; the view of `plan_reshard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import optree

from fzero.optim.fragments import grids_of
from fzero.optim.matrix import AdafactorState
from fzero.optim.whole_matrices import EntriesSpec
from fzero.plans.flat_params import ALIGNMENT
from fzero.plans.leaves import StateLeaf
from fzero.plans.plan import FlatParamPlan, Plan
from sharding import FlatLayout, TensorSpec
from sharding.layout import Fragment


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A flat tensor of a state, and its division over the ranks.

    Attributes:
        layout: of W fine shards.
        num_shards: the number of different shards that the ranks hold, each W /
            `num_shards` adjacent fine shards.
    """

    name: str
    layout: FlatLayout
    dtype: str
    num_shards: int

    @property
    def num_fine_shards(self) -> int:
        """The number of fine shards in a shard, which is also the number of ranks that
        hold it.
        """
        return self.layout.world_size // self.num_shards

    def start(self, fine_shard: int) -> int:
        """The first element of a fine shard within its shard."""
        return fine_shard % self.num_fine_shards * self.layout.partition.shard_numel

    def holders(self, fine_shard: int) -> range:
        """The ranks that hold a fine shard, each as the index of its own."""
        first = fine_shard - fine_shard % self.num_fine_shards
        return range(first, first + self.num_fine_shards)

    def fragments(self, fine_shards: range) -> Iterator[Fragment]:
        """The fragments in adjacent fine shards, all held by one rank; their offsets
        count from the start of what it holds.
        """
        numel, start = self.layout.partition.shard_numel, self.start(fine_shards.start)
        for part in self.layout.within(fine_shards.start * numel, fine_shards.stop * numel):
            yield replace(part, offset=start + part.offset)


class Sources(NamedTuple):
    """The sources of a 0-d tensor of the new optimizer state."""

    names: tuple[str, ...]
    """The old 0-d tensors, which must be equal; if empty, the value is that of a new
    state.
    """
    anew: tuple[str, ...] = ()
    """Parameters of the same buffer with new optimizer state; then the old numbers must
    be 0.
    """


def quantity_for(
    quantity: str, param_dtype: str, target: FlatParamPlan, *, has_master: bool
) -> str:
    """The old quantity that is the source of a new one, for old parameters of
    `param_dtype` that may have a master.
    """
    if quantity not in ("params", "master"):
        return quantity
    if quantity == "params" and target.has_master and param_dtype == target.dtypes.param:
        return "params"  # already rounded, and maybe held in full
    return "master" if has_master else "params"


def buffers_of(plan: Plan) -> dict[str, FlatTensor]:
    """The module's own buffers, which are replicated."""
    found = {}
    for name, spec in plan.buffers.items():
        layout = FlatLayout((name,), (spec.shape,), plan.world_size)
        found[name] = FlatTensor(f"state.buffers[{name!r}]", layout, spec.dtype, num_shards=1)
    return found


def hook_states_of(plan: Plan) -> dict[str, tuple[TensorSpec, str]]:
    """The states of reductions' comm hooks, by name in the full state: (spec, text that
    describes mesh, layout and hook).

    Where the text is the same in another step, of any stage, a rank can continue with
    the state.
    """
    found: dict[str, tuple[TensorSpec, str]] = {}
    hook_states = plan.hook_states  # a property that is computed on each access
    for buffer in plan.flat_buffers:
        for axis, specs in hook_states.get(buffer.key, {}).items():
            text = repr((plan.mesh.axes, buffer.layout, plan.comm_hooks.reduce[axis].name))
            accessors, leaves, _ = optree.tree_flatten_with_accessor(specs)
            for accessor, spec in zip(accessors, leaves, strict=True):
                found[accessor.codify(f"state.hook_states[{buffer.key!r}][{axis!r}]")] = (
                    spec,
                    f"{text} {spec}",
                )
    return found


@dataclass(frozen=True)
class BufferTensors:
    """One flat buffer and its tensors that persist between steps, computed on first
    use.
    """

    plan: Plan
    buffer: FlatParamPlan

    @property
    def _leaves(self) -> tuple[StateLeaf, ...]:
        return self.plan.leaves(self.buffer)

    @cached_property
    def tensors(self) -> dict[str, FlatTensor]:
        """The flat tensors, by quantity. (Gradients do not persist.)"""
        plan, layout = self.plan, self._fine_layout
        tensors = {}
        for leaf in self._leaves:
            if leaf.spec.shape != () and leaf.quantity != "grads":
                entries = layout if leaf.is_long else self._entries_layout(leaf)
                num_shards = leaf.spec.num_shards(plan.mesh)
                quantity = leaf.path if leaf.quantity == "optimizer" else leaf.quantity
                tensors[quantity] = FlatTensor(
                    leaf.state_name, entries, leaf.spec.dtype, num_shards
                )
        return tensors

    @property
    def own_grads(self) -> FlatTensor:
        """The reduced gradients, of which each rank uses its finest shard."""
        buffer = self.buffer
        name = f"state.grads[{buffer.key!r}]"
        return FlatTensor(name, self._fine_layout, buffer.grads.dtype, self.plan.num_shards)

    @property
    def _fine_layout(self) -> FlatLayout:
        plan, layout = self.plan, self.buffer.layout
        if (layout.world_size, layout.multiple_of) != (plan.world_size, ALIGNMENT):
            layout = FlatLayout(layout.names, layout.shapes, plan.world_size, multiple_of=ALIGNMENT)
        assert layout.partition.padded_numel == self.buffer.padded_numel
        return layout

    @cached_property
    def numbers(self) -> dict[str, str]:
        """The names of the 0-d tensors of the optimizer state, by path."""
        return {leaf.path: leaf.state_name for leaf in self._leaves if leaf.spec.shape == ()}

    def dtypes(self, names: Sequence[str]) -> dict[str, str]:
        """The dtypes of the optimizer state of some of the parameters, including 0-d
        numbers, by path.
        """
        return {
            leaf.path: leaf.spec.dtype
            for leaf in self._leaves
            if leaf.quantity == "optimizer"
            and (leaf.spec.shape == () or has_entries(self.tensors[leaf.path], names))
        }

    @property
    def kind(self) -> str:
        return type(self.plan.optimizer[self.buffer.key]).__name__

    def _entries_layout(self, leaf: StateLeaf) -> FlatLayout:
        """The layout of each parameter's entries in a state of whole matrices or
        parameters, or in Adafactor's means over rows and columns, which are replicated.
        """
        buffer = self.buffer
        if isinstance(leaf.spec, EntriesSpec):
            own = leaf.spec.layout
            return FlatLayout(own.names, own.shapes, self.plan.world_size, multiple_of=ALIGNMENT)
        if not isinstance(self.plan.optimizer[buffer.key], AdafactorState):
            raise ValueError(
                f"plan_reshard: the optimizer state of {buffer.key!r} must have tensors with an "
                f"entry for each element, or one number, and state{leaf.path} has shape "
                f"{leaf.spec.shape}; start the new step from the weights, init(old.gather(state))"
            )
        grids = {
            buffer.layout.names[index]: grid for index, grid in grids_of(buffer.layout).items()
        }
        lengths = {
            name: grid.rows if leaf.path == ".row_var" else grid.columns
            for name, grid in grids.items()
        }
        shapes = tuple((grid.matrices, lengths[name]) for name, grid in grids.items())
        return FlatLayout(tuple(grids), shapes, self.plan.world_size)


def of_plan(plan: Plan) -> list[BufferTensors]:
    """The tensors of all flat buffers of a plan."""
    return [BufferTensors(plan, buffer) for buffer in plan.flat_buffers]


def has_entries(tensor: FlatTensor, names: Iterable[str]) -> bool:
    """Whether a tensor has elements of any of these parameters."""
    layout = tensor.layout
    for name in names:
        if name in layout:
            start, stop = layout.bounds(name)
            if start < stop:
                return True
    return False
