"""The elements of a training state that a rank writes to a checkpoint and reads from
it, and their names there.

1. Stored tensors are named after the model: `model.<name>`, `master.<name>`,
   `optimizer.<leaf>.<name>`, each in the parameter's own shape, so that a checkpoint
   does not depend on ranks, stages, units and flat buffers.
2. A flat tensor of the state is divided into W fine shards (as in
   `fzero.resharding.plan`). A rank writes the fragments in its own. So elements that
   several ranks hold are written once, in equal parts by each of them.
3. A rank reads the fragments of everything that it holds. `fzero.reshard` has the rules
  for choosing the stored quantity.

A `StoredSlice` is such a fragment, in integers and names. Shape letters: P padded
elements of a flat tensor, W ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.compression.plan import is_added
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.resharding.tensors import (
    BufferTensors,
    FlatTensor,
    Sources,
    buffers_of,
    hook_states_of,
    of_plan,
    quantity_for,
)
from fzero.storage.file_tensor import FilePart, StoredTensor
from fzero.storage.shard_transfer import part_of
from sharding import TensorSpec, boxes
from sharding.dtypes import itemsize
from sharding.views import torch_dtype


@dataclass(frozen=True, slots=True)
class Stored:
    """The shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Elements [start, stop) of the tensor stored under `key`; in the state they begin
    at `offset` of the flat tensor `tensor`.

    `shape` is that of the full stored tensor, `dtype` that of the flat tensor.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    tensor: str = ""
    offset: int = 0

    @classmethod
    def whole(cls, key: str, like: Stored, tensor: str = "") -> StoredSlice:
        """All of a stored tensor."""
        return cls(key, like.shape, like.dtype, 0, math.prod(like.shape), tensor)


class Slice(NamedTuple):
    """A chunk of the tensor stored under `key`: its box, its file and position, and the
    CRC-32 of its bytes.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    checksum: int

    @classmethod
    def of(cls, values: Sequence[Any]) -> Slice:
        """A chunk from its JSON list."""
        key, shape, dtype, offsets, sizes, *rest = values
        return cls(key, tuple(shape), dtype, tuple(offsets), tuple(sizes), *rest)


OVERHEAD = 3072
"""An upper bound of the bytes written per chunk besides its elements: their container
(1.6 kB), and the index entry.
"""


def nbytes_of(parts: Iterable[StoredSlice]) -> int:
    """An upper bound of the bytes written for these parts."""
    chunks = ((box, part) for part in parts for box in boxes(part.start, part.stop, part.shape))
    return sum(box.numel * itemsize(part.dtype) + OVERHEAD for box, part in chunks)


def key_of(quantity: str, name: str) -> str:
    """The name under which a quantity of a parameter is stored.

    >>> (
    ...     key_of("params", "head.weight"),
    ...     key_of("master", "head.weight"),
    ...     key_of(".exp_avg", "head.weight"),
    ... )
    ('model.head.weight', 'master.head.weight', 'optimizer.exp_avg.head.weight')
    """
    if quantity in ("params", "master"):
        return f"{'model' if quantity == 'params' else quantity}.{name}"
    # the path of a leaf may have brackets and quotes
    leaf = re.sub(r"\W+", ".", quantity).strip(".")
    return f"optimizer.{leaf}.{name}"


def own_key(rank: int, name: str) -> str:
    """The name under which a tensor of a single rank is stored.

    >>> own_key(2, "state.rng['cpu']")
    "ranks.2.state.rng['cpu']"
    """
    return f"ranks.{rank}.{name}"


# --- writing --------------------------------------------------------------------------------------


def parts_to_save(plan: Plan, rank: int, own: Mapping[str, TensorSpec]) -> Iterator[StoredSlice]:
    """The parts that a rank writes; `own` are the tensors of each single rank. All
    ranks together write every element once.
    """
    fine_shard = plan.ranks.index(rank)
    for quantity, tensor in _quantities(plan):
        keys = {name: key_of(quantity, name) for name in tensor.layout.names}
        yield from _parts(tensor, keys, range(fine_shard, fine_shard + 1))
    for name, spec in own.items():
        yield StoredSlice.whole(own_key(rank, name), Stored(spec.shape, spec.dtype), name)


def stored_by(plan: Plan, aliases: Mapping[str, str]) -> tuple[dict[str, Stored], dict[str, str]]:
    """All tensors that the ranks of a job store together, without those of single
    ranks; and their other keys, for `aliases`.
    """
    stored = {
        key_of(quantity, name): Stored(shape, tensor.dtype)
        for quantity, tensor in _quantities(plan)
        for name, shape in zip(tensor.layout.names, tensor.layout.shapes)
    }
    others = {key_of("params", name): key_of("params", first) for name, first in aliases.items()}
    return stored, {key: first for key, first in others.items() if key not in stored}


def kinds_of(plan: Plan) -> dict[str, dict[str, Any]]:
    """The kind of optimizer state of each parameter, by name: its type and its tensors;
    None for a frozen one.
    """
    kinds: dict[str, Any] = {}
    for tensors in of_plan(plan):
        for name in tensors.buffer.layout.names:
            is_trained = tensors.buffer.trainable
            kinds[name] = (
                {"kind": tensors.kind, "keeps": sorted(tensors.dtypes([name]))}
                if is_trained
                else None
            )
    return kinds


def stored_starts(kinds: Mapping[str, Any], numbers: Mapping[str, float | int]) -> dict[str, int]:
    """When the optimizer state of each trained parameter began, as a number that is
    equal where the counters are equal.

    Args:
        kinds, numbers: the results of `kinds_of` and `numbers_by_name`.
    """
    found: dict[str, int] = {}
    known: dict[str, int] = {}
    for name, kept in kinds.items():
        if kept is not None:
            keys = ((path, key_of(path, name)) for path in kept["keeps"])
            # As text, because NaN != NaN.
            counters = repr([(path, numbers[key]) for path, key in keys if key in numbers])
            found[name] = known.setdefault(counters, len(known))
    return found


def numbers_by_name(plan: Plan, numbers: Mapping[str, float | int]) -> dict[str, float | int]:
    """The 0-d tensors of a state; those of the optimizer state per parameter."""
    by_name = {
        name: number for name, number in numbers.items() if not name.startswith("state.optimizer")
    }
    for tensors in of_plan(plan):
        for path, source in tensors.numbers.items():
            by_name |= {key_of(path, name): numbers[source] for name in tensors.buffer.layout.names}
    return by_name


# --- reading --------------------------------------------------------------------------------------


def parts_to_load(
    plan: Plan,
    rank: int,
    stored: Mapping[str, Stored],
    *,
    without: Collection[str] = (),
    frozen: Collection[str] = (),
) -> Iterator[tuple[str, list[StoredSlice]]]:
    """The parts that a rank reads, by quantity. Parameters whose shards match the
    master's are cast from the master instead.

    Args:
        without: module buffers and parameters that are not read.
        frozen: parameters without stored optimizer state; none is read for them.

    Raises:
        ValueError: a tensor is not stored, has another shape, or would be rounded to a
            narrower dtype.
    """
    fine_shard = plan.ranks.index(rank)
    for buffer in plan.flat_buffers:
        tensors = BufferTensors(plan, buffer).tensors
        for quantity, tensor in tensors.items():
            master = tensors["master"] if quantity == "params" and buffer.has_master else None
            if master is not None and tensor.num_shards == master.num_shards:
                continue
            is_weight = quantity in ("params", "master")
            names = [
                n
                for n in tensor.layout.names
                if (n not in without if is_weight else n not in frozen)
            ]
            keys = {
                name: _source(name, quantity, tensor, buffer, stored, frozen=name in frozen)
                for name in names
            }
            yield quantity, list(_parts(tensor, keys, tensor.holders(fine_shard)))
    for name, tensor in buffers_of(plan).items():
        if name not in without:
            key = key_of("params", name)
            _check_shape(key, tensor.layout.shape(name), stored)
            yield "buffers", list(_parts(tensor, {name: key}, tensor.holders(fine_shard)))


def parts_of_weights(
    plan: Plan, rank: int, stored: Mapping[str, Stored], keys: Mapping[str, str]
) -> Iterator[list[StoredSlice]]:
    """The parts that a rank reads where only weights are stored, under `keys`:
    parameters, masters, stored module buffers.
    """
    fine_shard = plan.ranks.index(rank)
    flat = [t for b in of_plan(plan) for q, t in b.tensors.items() if q in ("params", "master")]
    for tensor in (*flat, *(t for name, t in buffers_of(plan).items() if name in keys)):
        for name, shape in zip(tensor.layout.names, tensor.layout.shapes):
            if name not in keys:
                fix = (
                    "pass weights without scores to step.init"
                    if is_added(name)
                    else "take those of the same model"
                )
                raise ValueError(
                    f"load: parameter {name!r} must be among the weights, and is not; {fix}"
                )
            _check_shape(keys[name], shape, stored)
        yield list(_parts(tensor, keys, tensor.holders(fine_shard)))


def sources_of_numbers(plan: Plan, frozen: Collection[str] = ()) -> dict[str, Sources]:
    """The stored sources of each 0-d tensor of the optimizer state; there is none for
    `frozen` parameters.
    """
    found = {}
    for tensors in of_plan(plan):
        names = tensors.buffer.layout.names
        anew = tuple(name for name in names if name in frozen)
        for path, target in tensors.numbers.items():
            found[target] = Sources(
                tuple(key_of(path, name) for name in names if name not in frozen), anew
            )
    return found


def parts_of_own(
    rank: int, own: Mapping[str, TensorSpec], stored: Mapping[str, Stored]
) -> list[StoredSlice]:
    """The parts of a single rank's own tensors that are stored with the same shape and
    dtype.
    """
    wanted = [
        (own_key(rank, name), Stored(spec.shape, spec.dtype), name) for name, spec in own.items()
    ]
    return [StoredSlice.whole(*of_one) for of_one in wanted if stored.get(of_one[0]) == of_one[1]]


FORMER_KINDS = {"MuonState": "MatrixState"}
"""The present names of states in older checkpoints."""


def check_kinds(plan: Plan, kinds: Mapping[str, Any]) -> None:
    """Raises ValueError unless all parameters are stored, and those trained in both
    jobs have the same kind of state.
    """
    for name, now in kinds_of(plan).items():
        if name not in kinds:
            raise ValueError(
                f"load: parameter {name!r} must be in the checkpoint, and is not; load it with the "
                f"model that was saved"
            )
        before = kinds[name]
        if before is not None:
            before = before | {"kind": FORMER_KINDS.get(before["kind"], before["kind"])}
        if now != before and now is not None and before is not None:
            words = [f"{state['kind']}({', '.join(state['keeps'])})" for state in (before, now)]
            raise ValueError(
                f"load: the optimizer of parameter {name!r} must keep the same tensors in both "
                f"jobs, and kept {words[0]} in the saving job and keeps {words[1]} in this one; "
                f"load only the weights with fzero.load_weights"
            )


def check_names(plan: Plan, aliases: Iterable[str], stored: Mapping[str, Stored]) -> None:
    """Raises ValueError for a stored parameter or module buffer that the model does not
    have.
    """
    params = (name for buffer in plan.flat_buffers for name in buffer.layout.names)
    known = {key_of("params", name) for name in (*params, *plan.buffers, *aliases)}
    unknown = [k for k in stored if k.startswith("model.") and k not in known and not is_added(k)]
    if unknown:
        raise ValueError(
            f"load: {unknown[0]!r} must be of this model, and is not ({len(unknown)} such names: "
            f"{', '.join(unknown[:4])}); load it with the model that was saved"
        )


def _quantities(plan: Plan) -> Iterator[tuple[str, FlatTensor]]:
    for tensors in of_plan(plan):
        yield from tensors.tensors.items()
    for tensor in buffers_of(plan).values():
        yield "params", tensor


def _parts(
    tensor: FlatTensor, keys: Mapping[str, str], fine_shards: range
) -> Iterator[StoredSlice]:
    """The parts in adjacent fine shards of a flat tensor, all held by one rank."""
    for part in tensor.fragments(fine_shards):
        if part.name in keys:
            key, shape = keys[part.name], tensor.layout.shape(part.name)
            yield StoredSlice(
                key, shape, tensor.dtype, part.start, part.stop, tensor.name, part.offset
            )


def _source(
    name: str,
    quantity: str,
    tensor: FlatTensor,
    buffer: FlatParamPlan,
    stored: Mapping[str, Stored],
    *,
    frozen: bool,
) -> str:
    """The name of the stored tensor from which a quantity of a parameter is read."""
    param = stored[key_of("params", name)]
    has_master = key_of("master", name) in stored
    key = key_of(quantity_for(quantity, param.dtype, buffer, has_master=has_master), name)
    _check_shape(key, tensor.layout.shape(name), stored)
    before, after = stored[key].dtype, tensor.dtype
    is_updated = not frozen and (
        quantity != "params" or (buffer.trainable and not buffer.has_master)
    )
    if is_updated and torch.promote_types(torch_dtype(before), torch_dtype(after)) != torch_dtype(
        after
    ):
        raise ValueError(
            f"load: {key_of(quantity, name)!r} must not become narrower, and is {before} in the "
            f"checkpoint but {after} in this step; give the step the same master and optimizer "
            f"dtypes"
        )
    return key


def _check_shape(key: str, shape: tuple[int, ...], stored: Mapping[str, Stored]) -> None:
    found = stored.get(key)
    if found is None or found.shape != shape:
        raise ValueError(
            f"load: {key!r} must have shape {shape} in the checkpoint, and has "
            f"{found.shape if found else 'none'}; load it with the model and the optimizer that "
            f"were saved"
        )


def describe_hook_states(plan: Plan) -> dict[str, str]:
    """A description of each state of a comm hook, by its name: the mesh, the layout and
    the hook that it belongs to.
    """
    return {name: described for name, (_, described) in hook_states_of(plan).items()}


def own_specs(plan: Plan, rng: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of each single rank: its random state, and the states of its comm
    hooks.
    """
    own = {f"state.rng[{kind!r}]": spec for kind, spec in rng.items()}
    return own | {name: spec for name, (spec, _) in hook_states_of(plan).items()}


def span(tensor: StoredTensor, part: StoredSlice) -> Tensor | FilePart:
    """The elements of a part in its flat tensor: the source of a write to a file, or
    the target of a read.
    """
    return part_of(tensor, part.offset, part.offset + part.stop - part.start)  # type: ignore[no-any-return]
