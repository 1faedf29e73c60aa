"""This rank's part of the optimizer's state as a dict, for scripts that save it by
themselves.

It holds the flat shards, so that it fits the same configuration on the same number of
ranks only. `Engine.save_checkpoint` saves the whole state for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.deepspeed.engine.client_optimizers import plain_values
from fzero.resharding.parameters import weight_of, with_weight
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_tensor import in_memory
from fzero.storage.shard_transfer import part_of


def state_dict_of(
    step: TrainStep, state: TrainState[Tensor], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Hyper-parameters, and this rank's tensors: those in memory themselves, as in
    torch.optim, those in files as copies.
    """
    return {
        "rank": step.rank,
        "world_size": step.world_size,
        "zero_stage": step.plan.row.number,
        "param_groups": [plain_values(dict(group)) | {"params": []} for group in groups],
        "state": in_memory(_tensors(state)),
    }


def load_state_dict(
    step: TrainStep, state: TrainState[Tensor], groups: Sequence[dict[str, Any]], given: Any
) -> TrainState[Tensor]:
    """The state with the tensors of a dict from `state_dict_of` on this rank, and
    hyper-parameters written into the groups.

    *Collective* where there are masters: every rank, because the model's parameters are
    made from them.

    Args:
        given: the dict, or a list with those of all ranks.

    Raises:
        ValueError: it is of another rank, another number of ranks, or another plan.
    """
    found = (
        given[step.rank]
        if isinstance(given, list | tuple) and len(given) == step.world_size
        else given
    )
    saved = found.get("state", {}) if isinstance(found, Mapping) else {}
    own = _tensors(state)
    here = (step.rank, step.world_size, {name: x.numel() for name, x in own.items()})
    there = (
        *(found.get(key) if isinstance(found, Mapping) else None for key in ("rank", "world_size")),
        {name: x.numel() for name, x in saved.items() if hasattr(x, "numel")},
    )
    if here != there or len(found["param_groups"]) != len(groups):
        raise ValueError(
            f"optimizer.load_state_dict: must be given what optimizer.state_dict() returned on "
            f"this rank ({step.rank} of {step.world_size}) under the same configuration, got that "
            f"of rank {there[0]} of {there[1]}; engine.save_checkpoint and load_checkpoint serve "
            f"any number of ranks"
        )
    with torch.no_grad():
        for name, x in own.items():
            target = x if isinstance(x, Tensor) else part_of(x, 0, x.numel())
            target.copy_(saved[name].to(x.dtype))
    for group, values in zip(groups, found["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    for buffer in step.plan.flat_buffers:
        for name in buffer.layout.names if buffer.key in state.master else ():
            state = with_weight(step, state, name, weight_of(step, state, name))
    return state


def _tensors(state: TrainState[Tensor]) -> dict[str, Any]:
    """Those of the optimizer, in memory or in files, by their paths."""
    kept = {name: getattr(state, name) for name in ("step", "master", "optimizer", "loss_scale")}
    paths, leaves, _ = optree.tree_flatten_with_path(kept)
    return {".".join(map(str, path)): x for path, x in zip(paths, leaves, strict=True)}
