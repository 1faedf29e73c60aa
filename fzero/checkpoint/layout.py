"""Which elements of a training state does a rank write to a checkpoint, and which does it read back, under which names?

1. What is stored is named after the model: `model.<name>`, `master.<name>`, `optimizer.<leaf>.<name>`, each of the parameter's
   own shape, so that a checkpoint knows nothing of ranks, stages, units and flat buffers.
2. A flat tensor of the state counts as W pieces (as in `fzero.resharding.plan`). A rank writes the fragments in its own piece: so
   what several ranks hold is written once, by all of them in equal parts.
3. It reads the fragments in all that it holds. What is made of what is the rule of `fzero.reshard`.

A `StoredSlice` is such a fragment, in integers and names. Shape letters: P padded elements of a flat tensor, W ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.plans.plan import FlatParamPlan, Plan
from fzero.resharding.plan import kept_of
from fzero.resharding.tensors import (
    FlatTensor,
    Sources,
    buffers_of,
    hook_states_of,
    numbers_of,
    quantity_for,
    tensors_of,
)
from fzero.storage.file_tensor import FilePart, part_of
from fzero.storage.shard_io import Leaf
from sharding import TensorSpec, boxes
from sharding.dtypes import itemsize
from sharding.views import torch_dtype


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds under one name.

    >>> Stored((2, 3), "float32").dtype
    'float32'
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Elements [start, stop) of what is stored under `key`; in the state they begin at `offset` of the flat tensor `tensor`.

    Their shape is that of the whole, their dtype that of the flat tensor.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    tensor: str
    offset: int


class Slice(NamedTuple):
    """A chunk of what is stored under `key`: which one, in which file, where, and the CRC-32 of its bytes."""

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
        """From what JSON makes of one."""
        key, shape, dtype, offsets, sizes, *rest = values
        return cls(key, tuple(shape), dtype, tuple(offsets), tuple(sizes), *rest)


OVERHEAD = 3072
"""More bytes than are written for a chunk besides its elements: around these (1.6 kB), and to tell where it is."""


def nbytes_of(parts: Iterable[StoredSlice]) -> int:
    """At most as many bytes are written for these."""
    return sum(
        box.numel * itemsize(part.dtype) + OVERHEAD
        for part in parts
        for box in boxes(part.start, part.stop, part.shape)
    )


def key_of(quantity: str, name: str) -> str:
    """Under which name a quantity of a parameter is stored.

    >>> key_of("params", "head.weight"), key_of("master", "head.weight"), key_of(".exp_avg", "head.weight")
    ('model.head.weight', 'master.head.weight', 'optimizer.exp_avg.head.weight')
    """
    if quantity in ("params", "master"):
        return f"{'model' if quantity == 'params' else quantity}.{name}"
    leaf = re.sub(r"\W+", ".", quantity).strip(".")  # a leaf may be read with brackets and quotes
    return f"optimizer.{leaf}.{name}"


def own_key(rank: int, name: str) -> str:
    """Under which name is stored what each rank has for itself.

    >>> own_key(2, "state.rng['cpu']")
    "ranks.2.state.rng['cpu']"
    """
    return f"ranks.{rank}.{name}"


# --- what is written ---------------------------------------------------------------------------------------------


def parts_to_save(plan: Plan, rank: int, own: Mapping[str, TensorSpec]) -> Iterator[StoredSlice]:
    """What a rank writes. All ranks together write every element once.

    Args:
        own: what each rank has for itself, by its name in the state.
    """
    piece = plan.ranks.index(rank)
    for quantity, tensor in _quantities(plan):
        length = tensor.layout.partition.padded_numel // plan.world_size
        held = piece - piece % tensor.num_pieces
        keys = {name: key_of(quantity, name) for name in tensor.layout.names}
        yield from _parts(tensor, keys, piece * length, (piece + 1) * length, held * length)
    for name, spec in own.items():
        yield StoredSlice(own_key(rank, name), spec.shape, spec.dtype, 0, spec.numel, name, 0)


def stored_by(plan: Plan, aliases: Mapping[str, str]) -> tuple[dict[str, Stored], dict[str, str]]:
    """All that the ranks of a job store together, but for their own, and further names of it.

    Args:
        aliases: further names of parameters and module buffers.
    """
    stored = {
        key_of(quantity, name): Stored(shape, tensor.dtype)
        for quantity, tensor in _quantities(plan)
        for name, shape in zip(tensor.layout.names, tensor.layout.shapes)
    }
    further = {key_of("params", name): key_of("params", first) for name, first in aliases.items()}
    return stored, {key: first for key, first in further.items() if key not in stored}


def told_of(plan: Plan) -> dict[str, dict[str, Any]]:
    """What kind of optimizer state each trained parameter has: its type and its tensors; None for a frozen one."""
    told: dict[str, Any] = {}
    for buffer in plan.flat_buffers:
        kind = type(plan.optimizer[buffer.key]).__name__ if buffer.trainable else None
        for name in buffer.layout.names:
            told[name] = kind and {"kind": kind, "keeps": sorted(kept_of(plan, buffer, [name]))}
    return told


def stored_starts(told: Mapping[str, Any], numbers: Mapping[str, float | int]) -> dict[str, int]:
    """When the optimizer state of each trained parameter began: the same number where its counters are equal.

    Args:
        told: what kind of optimizer state each parameter has (`told_of`).
        numbers: the 0-d tensors of a state, those of the optimizer state for each parameter.
    """
    found: dict[str, int] = {}
    known: dict[str, int] = {}
    for name, kept in told.items():
        if kept is not None:
            keys = ((path, key_of(path, name)) for path in kept["keeps"])
            counters = repr([(path, numbers[key]) for path, key in keys if key in numbers])  # which tells a NaN, too
            found[name] = known.setdefault(counters, len(known))
    return found


def numbers_by_name(plan: Plan, numbers: Mapping[str, float | int]) -> dict[str, float | int]:
    """The 0-d tensors of a state, those of the optimizer state for each parameter."""
    by_name = {name: number for name, number in numbers.items() if not name.startswith("state.optimizer")}
    for buffer in plan.flat_buffers:
        for path, source in numbers_of(plan, buffer).items():
            by_name |= {key_of(path, name): numbers[source] for name in buffer.layout.names}
    return by_name


# --- what is read ------------------------------------------------------------------------------------------------


def parts_to_load(
    plan: Plan, rank: int, stored: Mapping[str, Stored], *, without: Collection[str] = (), frozen: Collection[str] = ()
) -> Iterator[tuple[str, list[StoredSlice]]]:
    """What a rank reads, by quantity. Parameters of which it has the master, and no more, it makes of that.

    Args:
        without: module buffers that are not read.
        frozen: parameters of which no optimizer state is stored, and none is read.

    Raises:
        ValueError: something is not stored, has another shape, or would become narrower.
    """
    piece = plan.ranks.index(rank)
    for buffer in plan.flat_buffers:
        tensors = tensors_of(plan, buffer)
        for quantity, tensor in tensors.items():
            master = tensors["master"] if quantity == "params" and buffer.has_master else None
            if master is not None and tensor.num_shards == master.num_shards:
                continue
            is_weight = quantity in ("params", "master")
            names = [name for name in tensor.layout.names if is_weight or name not in frozen]
            keys = {name: _source(name, quantity, tensor, buffer, stored, frozen=name in frozen) for name in names}
            yield quantity, _held(plan, piece, tensor, keys)
    for name, tensor in buffers_of(plan).items():
        if name in without:
            continue
        key = key_of("params", name)
        _check_shape(key, tensor.layout.shape(name), stored)
        yield "buffers", _held(plan, piece, tensor, {name: key})


def parts_of_weights(
    plan: Plan, rank: int, stored: Mapping[str, Stored], keys: Mapping[str, str]
) -> Iterator[list[StoredSlice]]:
    """What a rank reads where there are weights only: parameters, masters from the same, module buffers as far as they are there.

    Args:
        keys: under which key what has a name in the model is stored.
    """
    piece = plan.ranks.index(rank)
    flat = [t for b in plan.flat_buffers for q, t in tensors_of(plan, b).items() if q in ("params", "master")]
    for tensor in (*flat, *(t for name, t in buffers_of(plan).items() if name in keys)):
        for name, shape in zip(tensor.layout.names, tensor.layout.shapes):
            if name not in keys:
                raise ValueError(
                    f"load: parameter {name!r} must be among the weights, and is not; take those of the same model"
                )
            _check_shape(keys[name], shape, stored)
        yield _held(plan, piece, tensor, keys)


def sources_of_numbers(plan: Plan, frozen: Collection[str] = ()) -> dict[str, Sources]:
    """What each 0-d tensor of the optimizer state is taken from.

    Args:
        frozen: parameters of which no optimizer state is stored.
    """
    found = {}
    for buffer in plan.flat_buffers:
        names = buffer.layout.names
        anew = tuple(name for name in names if name in frozen)
        for path, target in numbers_of(plan, buffer).items():
            found[target] = Sources(tuple(key_of(path, name) for name in names if name not in frozen), anew)
    return found


def parts_of_own(rank: int, own: Mapping[str, TensorSpec], stored: Mapping[str, Stored]) -> list[StoredSlice]:
    """What a rank had for itself, as far as it is stored."""
    parts = [
        StoredSlice(own_key(rank, name), s.shape, s.dtype, 0, math.prod(s.shape), name, 0) for name, s in own.items()
    ]
    return [part for part in parts if stored.get(part.key) == Stored(part.shape, part.dtype)]


def check_told(plan: Plan, told: Mapping[str, Any]) -> None:
    """Raises unless all parameters are stored, and what was trained and still is has an optimizer that keeps the same."""
    for name, now in told_of(plan).items():
        if name not in told:
            raise ValueError(
                f"load: parameter {name!r} must be in the checkpoint, and is not; load it with the model that was saved"
            )
        before = told[name]
        if now != before and now is not None and before is not None:
            words = [f"{state['kind']}({', '.join(state['keeps'])})" for state in (before, now)]
            raise ValueError(
                f"load: the optimizer of parameter {name!r} must keep the same in both jobs, and kept {words[0]} in the one that "
                f"saved and keeps {words[1]} in this one; take the weights alone, fzero.load_weights"
            )


def check_names(plan: Plan, aliases: Iterable[str], stored: Mapping[str, Stored]) -> None:
    """Raises unless the model has just the parameters and module buffers that are stored."""
    known = {
        key_of("params", n) for n in (*(n for b in plan.flat_buffers for n in b.layout.names), *plan.buffers, *aliases)
    }
    unknown = [key for key in stored if key.startswith("model.") and key not in known]
    if unknown:
        raise ValueError(
            f"load: {unknown[0]!r} must be of this model, and is not ({len(unknown)} such names: {', '.join(unknown[:4])}); "
            f"load it with the model that was saved"
        )


# --- helpers -----------------------------------------------------------------------------------------------------


def _quantities(plan: Plan) -> Iterator[tuple[str, FlatTensor]]:
    for buffer in plan.flat_buffers:
        yield from tensors_of(plan, buffer).items()
    for tensor in buffers_of(plan).values():
        yield "params", tensor


def _held(plan: Plan, piece: int, tensor: FlatTensor, keys: Mapping[str, str]) -> list[StoredSlice]:
    """The fragments in all that the rank with this piece holds of a flat tensor."""
    length = tensor.layout.partition.padded_numel // plan.world_size
    first = piece - piece % tensor.num_pieces
    return list(_parts(tensor, keys, first * length, (first + tensor.num_pieces) * length, first * length))


def _parts(tensor: FlatTensor, keys: Mapping[str, str], start: int, stop: int, first: int) -> Iterator[StoredSlice]:
    """The fragments in elements [start, stop) of a flat tensor, of which a rank has those from `first` on."""
    for fragment in tensor.layout.within(start, stop):
        if fragment.name not in keys:
            continue
        shape, offset = tensor.layout.shape(fragment.name), start - first + fragment.offset
        yield StoredSlice(keys[fragment.name], shape, tensor.dtype, fragment.start, fragment.stop, tensor.name, offset)


def _source(
    name: str,
    quantity: str,
    tensor: FlatTensor,
    buffer: FlatParamPlan,
    stored: Mapping[str, Stored],
    *,
    frozen: bool,
) -> str:
    """Under which name is stored what a quantity of a parameter is made of."""
    param = stored[key_of("params", name)]
    has_master = key_of("master", name) in stored
    key = key_of(quantity_for(quantity, param.dtype, buffer, has_master=has_master), name)
    _check_shape(key, tensor.layout.shape(name), stored)
    before, after = stored[key].dtype, tensor.dtype
    is_updated = not frozen and (quantity != "params" or (buffer.trainable and not buffer.has_master))
    if is_updated and torch.promote_types(torch_dtype(before), torch_dtype(after)) != torch_dtype(after):
        raise ValueError(
            f"load: {key_of(quantity, name)!r} must not become narrower, and is {before} in the checkpoint and {after} in this "
            f"step; give the step the same master and optimizer dtypes"
        )
    return key


def _check_shape(key: str, shape: tuple[int, ...], stored: Mapping[str, Stored]) -> None:
    found = stored.get(key)
    if found is None or found.shape != shape:
        raise ValueError(
            f"load: {key!r} must have shape {shape} in the checkpoint, and has {found.shape if found else 'none'}; load it with "
            f"the model and the optimizer that were saved"
        )


def describe_hook_states(plan: Plan) -> dict[str, str]:
    """By the names of what the comm hooks remember: what is sent by whom through what."""
    return {name: told for name, (_, told) in hook_states_of(plan).items()}


def own_specs(plan: Plan, rng: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """What each rank has for itself: its random generators, and what its comm hooks remember."""
    return {f"state.rng[{kind!r}]": spec for kind, spec in rng.items()} | {
        n: s for n, (s, _) in hook_states_of(plan).items()
    }


def span(tensor: Leaf, part: StoredSlice) -> Tensor | FilePart:
    """The elements of a part in the flat tensor that holds them: to be written to a file, or to be read into."""
    return part_of(tensor, part.offset, part.offset + part.stop - part.start)  # type: ignore[no-any-return]
