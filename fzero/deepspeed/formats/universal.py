"""The flat tensors of DeepSpeed's universal checkpoints, and of those of stage 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fzero.checkpoint.folders import CheckpointError, inside
from fzero.deepspeed.formats.files import WEIGHTS_ALONE, WORD, read
from fzero.deepspeed.formats.flat import (
    MASTER,
    FlatPosition,
    Flats,
    Group,
    Shapes,
    leaves_of,
    need,
    places_in_turn,
    scaler_of,
    settings_of,
)


def universal(folder: Path, model: Mapping[str, Any], path: Path) -> Flats:
    """The flat tensors of a universal checkpoint, one file per parameter and quantity;
    `model` is the contents of `path`.
    """
    zero = folder / "zero"
    saved = read(zero / "optimizer_state.pt")
    shapes: Shapes = {
        n: tuple(s) for group in need(model, "param_shapes", path) for n, s in group.items()
    }
    missing = [name for name in shapes if not (inside(zero, name, path) / f"{MASTER}.pt").exists()]
    if missing:
        raise CheckpointError(
            f"{WORD}: {zero} must have a folder with {MASTER}.pt of each parameter, and "
            f"{missing[0]!r} has none ({len(missing)} such names); convert the checkpoint again "
            f"(ds_to_universal)"
        )
    inner = saved.get("optimizer_state_dict", {})  # where ZeRO 3 saved it
    settings = saved.get("param_groups") or inner.get("param_groups") or []
    steps = [x["step"] for x in (*inner.get("state", {}).values(), *settings) if "step" in x]

    def flat(quantity: str, rank: int, group: Group) -> Tensor:
        where, numel = zero / str(group) / f"{quantity}.pt", math.prod(shapes[str(group)])
        tensor = tensor_in(where)
        if tensor.numel() != numel:
            raise CheckpointError(
                f"{WORD}: {where} must have the {numel} elements that {path.name} names, and has "
                f"{tensor.numel()}; convert the checkpoint again (ds_to_universal)"
            )
        return tensor.reshape(-1)

    def step(group: Group) -> float | None:
        where = zero / str(group) / "step.pt"
        if where.exists():
            return float(read(where))
        return float(steps[0]) if steps else None

    first = next(iter(shapes))
    names = {path.stem for path in (zero / first).glob("*.pt")} - {MASTER, "step"}
    return Flats(
        shapes=shapes,
        places={name: FlatPosition(name, 0, 0, math.prod(shape)) for name, shape in shapes.items()},
        leaves=tuple(sorted(names)),
        flat=flat,
        dtype=cache(lambda quantity, group: flat(quantity, 0, first).dtype),
        step=step,
        settings=settings_of(settings),
        scaler=scaler_of(saved),
        where=lambda rank, group: zero / str(group) / f"{MASTER}.pt",
    )


def tensor_in(path: Path) -> Tensor:
    """The tensor in a file of a universal checkpoint. Raises CheckpointError: it is one
    of tensor or expert parallelism.
    """
    content = read(path)
    if not isinstance(content, Mapping):
        return cast(Tensor, content)
    odd = [key for key in content if key not in ("param", "cat_dim")]
    if odd:
        raise CheckpointError(
            f"{WORD}: {path} must hold a tensor as it is in the model, and has {odd[0]!r}, of "
            f"tensor or expert parallelism; {WEIGHTS_ALONE}"
        )
    return cast(Tensor, content["param"])


def whole(model: Mapping[str, Any], path: Path, shapes: Shapes) -> Flats:
    """The tensors of a checkpoint of stage 0, which has no names: all parameters must
    be trained, and in one group.
    """
    saved = need(model, "optimizer", path)
    base = saved.get("optimizer_state_dict", saved)  # beside 16-bit parameters
    states, settings = need(base, "state", path), need(base, "param_groups", path)
    is_flat = "fp32_groups_flat" in saved
    masters = (
        saved["fp32_groups_flat"]
        if is_flat
        else [x for group in saved.get("fp32_groups", ()) for x in group]
    )
    leaves, numels, names = (
        leaves_of(states.get(0)),
        [*map(math.prod, shapes.values())],
        list(shapes),
    )
    found = [state[leaf].numel() for state in states.values() for leaf in leaves[:1]]
    if len(settings) != 1 or found != ([sum(numels)] if is_flat else numels):
        raise CheckpointError(
            f"{WORD}: {path} must have the optimizer state of one group of all {len(names)} "
            f"parameters, for stage 0 stores no names with it, and has that of "
            f"{sum(len(group['params']) for group in settings)} in {len(settings)} groups; save it "
            f"from stage 1, or take the weights alone, fzero.load_weights of this file"
        )

    def flat(quantity: str, rank: int, group: Group) -> Tensor:
        index = int(group)
        if quantity != MASTER:
            return cast(Tensor, states[index][quantity]).reshape(-1)
        return cast(Tensor, masters[index] if masters else model["module"][names[index]]).reshape(
            -1
        )

    each = {
        name: FlatPosition(index, 0, 0, numel)
        for index, (name, numel) in enumerate(zip(names, numels))
    }
    scaler = {
        key: saved[key] for key in ("cur_scale", "cur_iter", "last_overflow_iter") if key in saved
    }
    return Flats(
        shapes=shapes,
        places=places_in_turn(0, shapes, sum(numels)) if is_flat else each,
        leaves=leaves,
        flat=flat,
        dtype=lambda quantity, group: flat(quantity, 0, group).dtype,
        step=lambda group: float(states[int(group)]["step"]),
        settings=settings_of(settings),
        scaler=scaler | scaler_of(saved),
        where=lambda rank, group: path,
    )
