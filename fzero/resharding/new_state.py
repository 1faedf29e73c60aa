"""Parts of a new step's state: blank tensors, the choice of its 0-d numbers, new
optimizer state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.model.model_check import listed
from fzero.plans.flat_params import FlatParamPlan
from fzero.plans.leaves import optimizer_leaves
from fzero.plans.param_groups import UserTransform
from fzero.plans.streaming import SUB_GROUP
from fzero.resharding.tensors import Sources
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_tensor import FilePart, StoredTensor, in_memory, kept
from fzero.storage.shard_transfer import part_of, updated_part
from fzero.storage.state_files import StateFiles

Numbers = dict[str, float | int]
"""The 0-d tensors of a state, by name; equal on every rank, so they are sent as values.
"""


def read(x: StoredTensor | FilePart, start: int, stop: int) -> Tensor:
    """Elements [start, stop); zeros where a file fails, which breaks its state and
    raises on all ranks in `agree`.
    """
    part = part_of(x, start, stop)
    if isinstance(part, Tensor):
        return part
    found = kept(part, lambda: part[:])
    return torch.zeros(stop - start, dtype=part.dtype) if found is None else found


def write(x: StoredTensor | FilePart, start: int, values: Tensor) -> None:
    """Writes elements from `start` on. Fails as `read` does."""
    part = part_of(x, start, start + values.numel())
    if isinstance(part, Tensor):
        part.copy_(values)
    else:
        kept(part, lambda: part.copy_(values))


def _named(state: TrainState[Any]) -> Iterator[tuple[str, Any]]:
    accessors, tensors, _ = optree.tree_flatten_with_accessor(state)
    return ((accessor.codify("state"), x) for accessor, x in zip(accessors, tensors, strict=True))


def by_name(state: TrainState[Any]) -> dict[str, Any]:
    """The tensors of a state as flat views, by the plan's names; tensors in files
    remain handles.
    """
    return {name: x.reshape(-1) if isinstance(x, Tensor) else x for name, x in _named(state)}


def numbers_of(state: TrainState[Tensor]) -> Numbers:
    """The 0-d tensors of a state, without those of module buffers, which move as
    tensors.
    """
    parts = state._replace(params={}, master={}, grads={}, buffers={}, rng={}, hook_states={})
    return {name: x.item() for name, x in _named(parts) if x.ndim == 0}


def chosen_numbers(sources_of: Mapping[str, Sources], numbers: Numbers) -> Numbers:
    """The 0-d tensors of the new state that have old sources; the sources of an
    optimizer's number must be equal.
    """
    chosen = {
        name: number for name, number in numbers.items() if not name.startswith("state.optimizer")
    }
    for name, (sources, anew) in sources_of.items():
        found = {repr(numbers[source]): source for source in sources}  # as text, because NaN != NaN
        if anew and any(numbers[source] for source in sources):
            source = next(source for source in sources if numbers[source])
            raise ValueError(
                f"reshard: {name} must come from equal numbers, and {source} is {numbers[source]} "
                f"while the optimizer state of {listed(anew)} begins anew; make the new step with "
                f"after=, the step or checkpoint of this state, so that these get flat buffers of "
                f"their own"
            )
        if len(found) > 1:
            differing = ", ".join(f"{source} is {number}" for number, source in found.items())
            raise ValueError(
                f"reshard: {name} must come from equal numbers, and {differing}; give the new step "
                f"the old one's division into flat buffers (units, parameter groups; after=, the "
                f"step or checkpoint of this state)"
            )
        if sources:
            chosen[name] = numbers[sources[0]]
    return chosen


def keep_scale(old: TrainStep, new: TrainStep) -> bool:
    return new.runtime.rules.scaling.dynamic and old.runtime.rules.scaling.dynamic


def blank(
    new: TrainStep,
    rank: int,
    numbers: Numbers,
    *,
    keeps_scale: bool,
    files: StateFiles | None = None,
) -> TrainState[Tensor]:
    """A state of `new` for one rank with the given numbers, its own random state, and
    flat tensors yet to be filled.

    Padding is zero; in the optimizer state it is as in `init`. `files` as in
    `StateBuilder.blank`.
    """
    state = new.runtime.builder.blank(rank, files)
    state.step.fill_(numbers["state.step"])
    for name, x in by_name(state).items():
        is_kept = name.startswith("state.optimizer") or (
            keeps_scale and name.startswith("state.loss_scale")
        )
        if is_kept and name in numbers:
            x.fill_(numbers[name])
    return state


def begin_anew(state: TrainState[Any], new: TrainStep, rank: int, names: Collection[str]) -> None:
    """Initialises the optimizer state of some parameters from their present values.

    `blank` has initialised it from zeros. That differs only for a user's own transform,
    which may depend on the values.
    """
    for buffer in new.plan.flat_buffers:
        if buffer.trainable and isinstance(
            new.runtime.updater.optimizers[buffer.group], UserTransform
        ):
            initialise(
                state, new, rank, buffer, [name for name in buffer.layout.names if name in names]
            )


def initialise(
    state: TrainState[Any],
    step: TrainStep,
    rank: int,
    buffer: FlatParamPlan,
    names: Collection[str],
) -> None:
    """Sets the optimizer state of some parameters of a flat buffer to that of `init`,
    from their present values.

    Tensors that belong to all parameters of the buffer, such as its counter, are set
    where all are named.
    """
    if not names:
        return
    values = in_memory(step.runtime.builder.updated(buffer, state.params, state.master, rank)).to(
        step.device
    )
    fresh = optree.tree_leaves(step.runtime.updater.transform_of(buffer).init(values))
    tensors = optree.tree_leaves(state.optimizer[buffer.key])
    first = step.plan.shard_of(rank) * buffer.shard_numel if buffer.flow.updates == "shard" else 0
    stop = first + buffer.flow.updated_numel
    spans = [
        (max(start, first) - first, min(end, stop) - first)
        for start, end in map(buffer.layout.bounds, names)
    ]
    leaves = optimizer_leaves(buffer, step.plan.optimizer)
    for leaf, tensor, value in zip(leaves, tensors, fresh, strict=True):
        if not leaf.is_long and len(names) == len(buffer.layout.names):
            tensor.copy_(value)
        for start, end in spans if leaf.is_long else ():
            if start < end:
                write(tensor, start, value[start:end])


def narrow(state: TrainState[Any], new: TrainStep, rank: int) -> None:
    """Casts a rank's shards of the masters into its parameters. File errors are those
    of `read`.
    """
    for buffer in new.plan.flat_buffers:
        if buffer.has_master:
            master, param = state.master[buffer.key], state.params[buffer.key]
            own = updated_part(param, buffer, new.plan.shard_of(rank))
            for start in range(0, master.numel(), SUB_GROUP):
                write(own, start, read(master, start, min(start + SUB_GROUP, master.numel())))


def rescale(state: TrainState[Tensor], numbers: Numbers) -> None:
    """Rescales the states of comm hooks from the old loss scale to the new one."""
    ratio = state.loss_scale.scale / numbers["state.loss_scale.scale"]
    for x in optree.tree_leaves(state.hook_states):
        if x.is_floating_point():
            x.mul_(ratio)
