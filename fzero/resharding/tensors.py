"""The tensors of a training state as flat tensors of named entries, whatever their layout: the view of `plan_reshard`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import optree

from fzero.optim.fragments import grids_of
from fzero.optim.matrix import AdafactorState
from fzero.plans.flat_params import ALIGNMENT
from fzero.plans.mesh_axes import num_ranks
from fzero.plans.plan import FlatParamPlan, Plan
from sharding import FlatLayout, Sharded, TensorSpec


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A flat tensor of a state, and what of it the ranks hold.

    Attributes:
        name: of the tensor.
        layout: of W pieces.
        dtype: of its elements.
        num_shards: how many different parts of it the ranks hold, each W / `num_shards` neighbouring pieces.
    """

    name: str
    layout: FlatLayout
    dtype: str
    num_shards: int

    @property
    def num_pieces(self) -> int:
        """Of a shard; as many ranks hold it."""
        return self.layout.world_size // self.num_shards

    def start(self, piece: int) -> int:
        """Where a piece starts in the shard that it is in."""
        return piece % self.num_pieces * self.layout.partition.shard_numel

    def holders(self, piece: int) -> range:
        """The ranks that hold a piece, by their own ones."""
        first = piece - piece % self.num_pieces
        return range(first, first + self.num_pieces)


class Sources(NamedTuple):
    """What a 0-d tensor of the new optimizer state is taken from.

    Attributes:
        names: of the old ones, which must be equal; where there is none it is that of a new state.
        anew: the parameters beside them whose optimizer state begins anew: then the others must not have begun, either.
    """

    names: tuple[str, ...]
    anew: tuple[str, ...] = ()


def quantity_for(quantity: str, param_dtype: str, target: FlatParamPlan, *, has_master: bool) -> str:
    """Which old quantity a new one is made of, from parameters of `param_dtype` that may have a master."""
    if quantity not in ("params", "master"):
        return quantity
    if quantity == "params" and target.has_master and param_dtype == target.dtypes.param:
        return "params"  # already rounded, and perhaps whole
    return "master" if has_master else "params"


def tensors_of(plan: Plan, buffer: FlatParamPlan) -> dict[str, FlatTensor]:
    """The flat tensors of one buffer that outlive a step, by quantity. (Gradients do not.)"""
    return BufferTensors(plan, buffer).tensors


def _tensors(plan: Plan, buffer: FlatParamPlan, leaves: Mapping[str, tuple[str, TensorSpec]]) -> dict[str, FlatTensor]:
    layout = buffer.layout
    if (layout.world_size, layout.multiple_of) != (plan.world_size, ALIGNMENT):
        layout = FlatLayout(layout.names, layout.shapes, plan.world_size, multiple_of=ALIGNMENT)
    assert layout.partition.padded_numel == buffer.padded_numel

    def tensor(name: str, entries: FlatLayout, spec: TensorSpec) -> FlatTensor:
        axes = spec.spec.axes if isinstance(spec.spec, Sharded) else ()
        return FlatTensor(name, entries, spec.dtype, num_ranks(plan.mesh, axes))

    master = buffer.master
    tensors = {"params": tensor(f"state.params[{buffer.key!r}]", layout, buffer.params)}
    if buffer.has_master:
        tensors["master"] = tensor(f"state.master[{buffer.key!r}]", layout, master)
    for path, (name, spec) in leaves.items():
        if spec.shape != ():
            entries = layout if _is_by_element(spec, master) else _entries_layout(plan, buffer, path)
            tensors[path] = tensor(name, entries, spec)
    return tensors


def numbers_of(plan: Plan, buffer: FlatParamPlan) -> dict[str, str]:
    """The names of the 0-d tensors of the optimizer state, by path."""
    return BufferTensors(plan, buffer).numbers


def optimizer_leaves(plan: Plan, buffer: FlatParamPlan) -> dict[str, tuple[str, TensorSpec]]:
    """The tensors of the optimizer state: their names in the whole state and specs, by path in their own."""
    if not buffer.trainable:
        return {}
    accessors, specs, _ = optree.tree_flatten_with_accessor(plan.optimizer[buffer.key])
    paths = [accessor.codify("") for accessor in accessors]
    return {path: (f"state.optimizer[{buffer.key!r}]{path}", spec) for path, spec in zip(paths, specs, strict=True)}


def _is_by_element(spec: TensorSpec, master: TensorSpec) -> bool:
    """Whether a tensor of the optimizer state has an element for each of the master."""
    # All but the dtype and the placement.
    return (spec.shape, spec.spec, spec.multiple_of) == (master.shape, master.spec, master.multiple_of)


def _entries_layout(plan: Plan, buffer: FlatParamPlan, path: str) -> FlatLayout:
    """Where the entries of each parameter stand in Adafactor's means over rows and columns, which every rank has."""
    if not isinstance(plan.optimizer[buffer.key], AdafactorState):
        raise ValueError(
            f"plan_reshard: the optimizer state of {buffer.key!r} must have tensors with an entry for each element, or one "
            f"number, and state{path} has shape {optimizer_leaves(plan, buffer)[path][1].shape}; start the new step from the "
            f"weights, init(old.gather(state))"
        )
    grids = {buffer.layout.names[index]: grid for index, grid in grids_of(buffer.layout).items()}
    lengths = {name: grid.rows if path == ".row_var" else grid.columns for name, grid in grids.items()}
    shapes = tuple((grid.matrices, lengths[name]) for name, grid in grids.items())
    return FlatLayout(tuple(grids), shapes, plan.world_size)


def buffers_of(plan: Plan) -> dict[str, FlatTensor]:
    """The module's own buffers, which every rank has."""
    layouts = {name: FlatLayout((name,), (spec.shape,), plan.world_size) for name, spec in plan.buffers.items()}
    return {
        name: FlatTensor(f"state.buffers[{name!r}]", layouts[name], spec.dtype, 1)
        for name, spec in plan.buffers.items()
    }


def hook_states_of(plan: Plan) -> dict[str, tuple[TensorSpec, str]]:
    """The states of reductions' comm hooks, by name in the whole state: the spec, and a text of what is sent by whom.

    Where the latter is the same in another step, whatever its stage, a rank may go on with what it remembers.
    """
    found: dict[str, tuple[TensorSpec, str]] = {}
    hook_states = plan.hook_states  # made anew for each that asks
    for buffer in plan.flat_buffers:
        for axis, specs in hook_states.get(buffer.key, {}).items():
            told = repr((plan.mesh.axes, buffer.layout, plan.comm_hooks.reduce[axis].name))
            accessors, leaves, _ = optree.tree_flatten_with_accessor(specs)
            for accessor, spec in zip(accessors, leaves, strict=True):
                found[accessor.codify(f"state.hook_states[{buffer.key!r}][{axis!r}]")] = spec, f"{told} {spec}"
    return found


@dataclass(frozen=True)
class BufferTensors:
    """One flat buffer, and what of it outlives a step: found once, when it is asked for."""

    plan: Plan
    buffer: FlatParamPlan

    @cached_property
    def leaves(self) -> dict[str, tuple[str, TensorSpec]]:
        return optimizer_leaves(self.plan, self.buffer)

    @cached_property
    def tensors(self) -> dict[str, FlatTensor]:
        return _tensors(self.plan, self.buffer, self.leaves)

    @cached_property
    def numbers(self) -> dict[str, str]:
        return {path: name for path, (name, spec) in self.leaves.items() if spec.shape == ()}

    def dtypes(self, names: Sequence[str]) -> dict[str, str]:
        """What the optimizer keeps of some of the parameters."""
        return {
            path: spec.dtype
            for path, (_, spec) in self.leaves.items()
            if spec.shape == () or has_entries(self.tensors[path], names)
        }

    @property
    def kind(self) -> str:
        return type(self.plan.optimizer[self.buffer.key]).__name__


def has_entries(tensor: FlatTensor, names: Iterable[str]) -> bool:
    layout = tensor.layout
    return any(start < stop for start, stop in (layout.bounds(name) for name in names if name in layout))
