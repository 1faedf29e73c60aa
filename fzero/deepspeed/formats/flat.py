"""`FlatPosition`: the position of each element of a parameter, its master and its
optimizer state in DeepSpeed's files.

The files hold flat tensors, which have the same layout for all quantities:

- **ZeRO 1 and 2**: the parameters of a group follow one another in one flat buffer,
  which is cut into W equal shards; rank r's file has shard r. The master is stored
  without the padding at the end.
- **ZeRO 3**: each parameter is cut into W equal shards, the last one padded, and rank
  r's file has those of a group of parameters, one after the other.
- **Universal**: one file per parameter and quantity.
- **Stage 0**: a full tensor per parameter, or, with 16-bit parameters, one flat tensor
  of all masters.

So element e of a parameter is in the flat tensor of rank (a + e) // q, at b + (a + e) %
q, where a, b and q are the parameter's own: a `FlatPosition`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.folders import CheckpointError
from fzero.deepspeed.formats.files import WORD, check_ranks, read

Group = int | str
Shapes = dict[str, tuple[int, ...]]
MASTER = "fp32"


class FlatPosition(NamedTuple):
    """The position of a parameter's elements; the module's docstring explains a
    (`before`), b (`offset`) and q (`run`).

    >>> list(
    ...     FlatPosition(0, before=5, offset=0, run=4).spans(1, 7)
    ... )  # after 5 others, in shards of 4
    [(1, 1, 2, 2), (3, 2, 0, 4)]
    >>> list(
    ...     FlatPosition(0, before=0, offset=9, run=3).spans(1, 7)
    ... )  # in shards of 3, each after 9 others
    [(1, 0, 10, 2), (3, 1, 9, 3), (6, 2, 9, 1)]
    """

    group: Group
    before: int
    offset: int
    run: int

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Elements [start, stop) of the parameter, as (first element, rank, index in
        the rank's flat tensor, count).
        """
        while start < stop:
            rank, within = divmod(self.before + start, self.run)
            numel = min(stop - start, self.run - within)
            yield start, rank, self.offset + within, numel
            start += numel


class Flats(NamedTuple):
    """The flat tensors of a checkpoint.

    Attributes:
        shapes, places: of the trained parameters, by name.
        leaves: the tensors that the optimizer keeps of each, by DeepSpeed's names.
        flat: the flat tensor of a quantity (`"fp32"`, or a leaf), rank and group; and
            its `dtype`, the same on all ranks.
        step: the number of a group's updates; None if unknown.
        settings: the optimizer's groups without their parameters; `scaler`: the loss
            scaler's attributes, if any.
        where: the file of the flat tensors of a rank and group.
        stage: the stage of the saving job; 0 also for a universal checkpoint.
    """

    shapes: Shapes
    places: Mapping[str, FlatPosition]
    leaves: tuple[str, ...]
    flat: Callable[[str, int, Group], Tensor]
    dtype: Callable[[str, Group], torch.dtype]
    step: Callable[[Group], float | None]
    settings: list[dict[str, Any]]
    scaler: Mapping[str, Any]
    where: Callable[[int, Group], Path]
    stage: int = 0


def need(content: Any, key: str, path: Path) -> Any:
    """The value in a file under a key. Raises CheckpointError: the key is missing."""
    if not isinstance(content, Mapping) or content.get(key) is None:
        raise CheckpointError(
            f"{WORD}: {path} must have {key!r}, as DeepSpeed writes it since 0.6, and has not; "
            f"load it with the DeepSpeed that wrote it and save it with a newer one, or take "
            f"another checkpoint"
        )
    return content[key]


def scaler_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The loss scaler's attributes in an optimizer's file."""
    scaler = saved.get("loss_scaler")
    return {
        **({} if scaler is None else vars(scaler)),
        "is_dynamic": bool(saved.get("dynamic_loss_scale")),
    }


def settings_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def leaves_of(state: Any) -> tuple[str, ...]:
    """The names of the tensors that an optimizer keeps of a parameter; none before the
    first update.
    """
    return tuple(
        sorted(key for key, x in (state or {}).items() if isinstance(x, Tensor) and key != "step")
    )


def places_in_turn(
    group: Group, shapes: Mapping[str, tuple[int, ...]], run: int, gaps: Sequence[int] = ()
) -> dict[str, FlatPosition]:
    """The places of parameters that follow one another in a buffer with shards of `run`
    elements.

    Args:
        gaps: the elements after each parameter that belong to none (`parameter_alignment`
            of DeepSpeed 0.19.8).

    >>> [x.before for x in places_in_turn(0, {"a": (3,), "b": (2,)}, 4, gaps=(1, 0)).values()]
    [0, 4]
    """
    found, end = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps or [0] * len(shapes), strict=True):
        found[name] = FlatPosition(group, end, 0, run)
        end += math.prod(shape) + gap
    return found


def places_cut(
    group: Group, shapes: Mapping[str, tuple[int, ...]], world_size: int
) -> dict[str, FlatPosition]:
    """The places of parameters that are each cut into `world_size` shards."""
    runs = [-(-math.prod(shape) // world_size) for shape in shapes.values()]
    offsets = accumulate(runs, initial=0)
    return {
        name: FlatPosition(group, 0, offset, run)
        for name, offset, run in zip(shapes, offsets, runs)
    }


# --- ZeRO 1, 2 and 3 ------------------------------------------------------------------------------


class _Rank(NamedTuple):
    """The contents of one rank's file."""

    masters: Sequence[Tensor]
    """The masters of each group."""
    states: Mapping[int, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
    settings: list[dict[str, Any]]
    step: float | None
    """The number of updates of all groups, where their state has none."""
    scaler: Mapping[str, Any]
    stage: int
    world_size: int
    gaps: Sequence[Sequence[int]] | None
    """By group and parameter, the elements after it that belong to none."""


def _rank(path: Path) -> _Rank:
    saved = need(read(path), "optimizer_state_dict", path)
    stage, counts = int(saved.get("zero_stage", 1)), need(saved, "partition_count", path)
    base = need(saved, "optimizer_state_dict" if stage == 3 else "base_optimizer_state", path)
    elastic = isinstance(base, list)  # elastic_checkpoint
    return _Rank(
        masters=need(
            saved, "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups", path
        ),
        states=base if elastic else need(base, "state", path),
        settings=[] if elastic else need(base, "param_groups", path),
        step=saved.get("base_optimizer_state_step"),
        scaler=scaler_of(saved),
        stage=stage,
        world_size=max(counts) if isinstance(counts, list) else counts,
        gaps=saved.get("param_alignment_paddings"),
    )


def of_ranks(found: Mapping[int, Path], model: Mapping[str, Any], path: Path) -> Flats:
    """The flat tensors of ZeRO 1, 2 or 3, in the file `found` for each rank; `model` is
    the contents of `path`.
    """
    opened = cache(lambda rank: _rank(found[rank]))
    folder = path.parent
    some = opened(min(found))
    check_ranks(folder, found, some.world_size)
    first, world_size = opened(0), some.world_size
    groups: list[Shapes] = [
        {n: tuple(s) for n, s in group.items()} for group in need(model, "param_shapes", path)
    ]
    places: dict[str, FlatPosition] = {}
    for index, shapes in enumerate(groups):
        numel, held = sum(map(math.prod, shapes.values())), first.masters[index].numel()
        if first.stage == 3:
            places |= places_cut(index, shapes, world_size)
            fits = held == sum(places[name].run for name in shapes)
        else:
            gaps = () if first.gaps is None else first.gaps[index]
            fits = len(gaps) in (0, len(shapes))
            if fits:
                places |= places_in_turn(index, shapes, held, gaps)
                # DeepSpeed aligns to two elements
                fits = 0 <= held * world_size - numel - sum(gaps) < 2 * world_size
        if not fits:
            raise CheckpointError(
                f"{WORD}: {found[0]} must have 1/{world_size} of the {numel} elements that "
                f"{path.name} gives for group {index}, padded, and has {held}; take files of one "
                f"save, all with the same tag"
            )

    def flat(quantity: str, rank: int, group: Group) -> Tensor:
        of_rank, index = opened(rank), int(group)
        tensor = (
            of_rank.masters[index] if quantity == MASTER else of_rank.states[index].get(quantity)
        )
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{WORD}: {found[rank]} must have {quantity!r} of group {index}, as rank 0's has; "
                f"take files of one save"
            )
        return tensor

    def step(group: Group) -> float | None:
        own = first.states[int(group)].get("step", first.step) if has_state else None
        if own is None:  # one group of the optimizer in ZeRO 3 may be several groups here
            own = next(
                (s["step"] for s in first.settings if group in s["params"] and "step" in s), None
            )
        return None if own is None else float(own)

    has_state = len(first.states) == len(groups)
    return Flats(
        {name: shape for shapes in groups for name, shape in shapes.items()}, places,
        leaves_of(first.states[0] if has_state else None), flat,
        lambda quantity, group: flat(quantity, 0, group).dtype, step,
        settings_of(first.settings), first.scaler,
        lambda rank, group: found[rank], first.stage,
    )  # fmt: skip
