"""The memory in which each tensor of the model state lives.

These tensors of a flat buffer have a placement: the master (`"master"`), each tensor of
the optimizer state (`"optimizer"`) that is as long as the buffer, the shards of
parameters (`"params"`) in stage 3, and the shards of gradients (`"grads"`) in stages 2
and 3. Tensors that every rank holds in full, and counters, live on the device. A
placement follows from the configuration (`offload_optimizer`, `offload_param`), or is
given directly, tensor by tensor. The plan holds it in the tensor's spec;
`fzero.storage.offload` and `fzero.storage.shard_io` move the tensors accordingly. What
they ask a placement is in its class in `sharding/specs.py`; `memory_kind` in
`fzero/storage/state_memory.py` is the one rule of where that is for a device.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import optree

from fzero.common.arguments import check_callable
from fzero.config.config import Config, ConfigError
from fzero.plans.flat_params import FlatParamPlan, UnitPlan
from fzero.plans.leaves import StateLeaf, optimizer_leaves, state_leaves
from sharding import Sharded
from sharding.specs import DEVICE, Placement

GivenPlacements = Callable[[str, str, str], Placement | None] | Mapping[str, Placement] | None
"""Placements: a function, a mapping of patterns, or None for those of the
configuration.

A function takes the quantity (`"params"`, `"master"`, `"grads"` or `"optimizer"`), the
key of the flat buffer, and the leaf of the optimizer state (`"exp_avg"`; `""` for other
quantities). It returns a placement, or None for the configuration's. A pattern matches
`quantity/key/leaf` (`"optimizer/*/exp_avg"`, `"params/*"`); the first match counts."""


def _configured(
    cfg: Config, updated_numels: Mapping[str, int], shard_numels: Mapping[str, int]
) -> Callable[[StateLeaf], Placement]:
    """The placement of each tensor in the configuration.

    Args:
        updated_numels: elements that a rank updates, by trained flat buffer in order.
        shard_numels: elements of a rank's shard of parameters, for each flat buffer
            whose parameters may live off the device.
    """
    of_state, of_params = (
        cfg.zero_optimization.offload_optimizer,
        cfg.zero_optimization.offload_param,
    )
    wanted = of_state.ratio * sum(updated_numels.values()) if of_state else 0
    before = accumulate(updated_numels.values(), initial=0)
    offloaded = {key for key, done in zip(updated_numels, before, strict=False) if done < wanted}
    room = of_params.max_in_cpu if of_params else 0
    after = accumulate(shard_numels.values())
    in_host = {key for key, numel in zip(shard_numels, after, strict=True) if numel <= room}

    def of(leaf: StateLeaf) -> Placement:
        is_param = leaf.quantity == "params"
        offload = of_params if is_param else of_state
        if offload is None or not (is_param or leaf.key in offloaded):
            return DEVICE
        if offload.device == "cpu" or (is_param and leaf.key in in_host):
            return Placement("host", pinned=offload.pin_memory)
        return Placement("nvme", path=offload.nvme_path)

    return of


def _given(leaf: StateLeaf, given: GivenPlacements) -> Placement | None:
    """The placement that is given for a tensor, if any; raises a ConfigError if it is
    no `Placement`.
    """
    found = None
    if isinstance(given, Mapping):
        found = next(
            (given[pattern] for pattern in given if fnmatch.fnmatchcase(leaf.placed_as, pattern)),
            None,
        )
    elif given is not None:
        check_callable(
            "placements", given, "a mapping of patterns to fzero.Placement, or a function"
        )
        found = given(leaf.quantity, leaf.key, leaf.short)
    if not isinstance(found, Placement | None):
        raise ConfigError(
            f"placements: must give a sharding.Placement for {leaf.placed_as!r}, or None for what "
            f"the configuration says, got {found!r}"
        )
    return found


def _check_all_used(given: GivenPlacements, names: Sequence[str]) -> None:
    """Raises a ConfigError if a pattern is the first match of no tensor; `names` are
    all tensors.
    """
    patterns = list(given) if isinstance(given, Mapping) else []
    # fnmatch: "optimizer/*" also matches a key with slashes in it.
    used = {
        next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
        for name in names
    }
    one_of_each = {name.partition("/")[0]: name for name in reversed(names)}
    examples = ", ".join(sorted(one_of_each.values()))
    for pattern in patterns:
        if pattern not in used:
            raise ConfigError(
                f"placements: {pattern!r} must be the first pattern to match some tensor, and is "
                f"not. Tensors with a placement are masters and optimizer state, in stages 2 and 3 "
                f"shards of gradients, in stage 3 shards of parameters; names look like "
                f"{examples or 'none, because there are no such tensors'}"
            )


def with_placements(
    units: tuple[UnitPlan, ...], optimizer: dict[str, Any], cfg: Config, given: GivenPlacements
) -> tuple[tuple[UnitPlan, ...], dict[str, Any]]:
    """The units and the specs of the optimizer state, with the placements that are
    given or configured.

    Raises:
        ConfigError: a pattern matches nothing, or the configured buffers are too few or
            too small.
    """
    buffers = [buffer for unit in units for buffer in unit.buffers]
    shard_numels = {b.key: b.flow.param_numel for b in buffers if b.flow.gathers_over}
    updated_numels = {b.key: b.flow.updated_numel for b in buffers if b.trainable or b.has_master}
    configured = _configured(cfg, updated_numels, shard_numels)
    leaves = [
        leaf
        for buffer in buffers
        for leaf in state_leaves(buffer, optimizer)
        if _may_live_elsewhere(leaf)
    ]
    leaves.sort(key=lambda leaf: ("master", "optimizer", "grads", "params").index(leaf.quantity))
    chosen = {leaf.placed_as: _given(leaf, given) or configured(leaf) for leaf in leaves}
    _check_all_used(given, list(chosen))
    params = {key: chosen[f"params/{key}"] for key in shard_numels}
    _check_buffers(units, shard_numels, params, cfg)

    def placed(buffer: FlatParamPlan) -> FlatParamPlan:
        master, param, grad = (
            chosen.get(f"{part}/{buffer.key}", DEVICE) for part in ("master", "params", "grads")
        )
        return replace(buffer, placement=master, param_placement=param, grad_placement=grad)

    def placed_state(buffer: FlatParamPlan) -> Any:
        specs = [
            replace(leaf.spec, placement=chosen.get(leaf.placed_as, leaf.spec.placement))
            for leaf in optimizer_leaves(buffer, optimizer)
        ]
        return optree.tree_structure(optimizer[buffer.key]).unflatten(specs)

    placed_units = tuple(replace(unit, buffers=tuple(map(placed, unit.buffers))) for unit in units)
    return placed_units, {
        buffer.key: placed_state(buffer) for buffer in buffers if buffer.trainable
    }


def _may_live_elsewhere(leaf: StateLeaf) -> bool:
    """Whether a tensor may live off the device: it is divided like its buffer, and
    holds no full parameters or gradients.
    """
    return leaf.is_divided and (
        leaf.quantity in ("master", "optimizer") or isinstance(leaf.spec.spec, Sharded)
    )


def _check_buffers(
    units: Sequence[UnitPlan],
    shard_numels: Mapping[str, int],
    params: Mapping[str, Placement],
    cfg: Config,
) -> None:
    """Raises a ConfigError where shards of parameters in files do not fit the
    configured host buffers.
    """
    block = cfg.zero_optimization.offload_param
    in_files = [
        [b.key for b in u.buffers if b.key in params and params[b.key].in_file] for u in units
    ]
    longest = max((shard_numels[key] for keys in in_files for key in keys), default=0)
    most = max(map(len, in_files), default=0)
    if block is not None and block.buffer_size is not None and block.buffer_size < longest:
        raise ConfigError(
            f"zero_optimization.offload_param.buffer_size: must hold the longest shard of "
            f"parameters in files, which has {longest} elements, got {block.buffer_size}; raise "
            f"it, leave it out, or name smaller modules in units="
        )
    if block is not None and block.buffer_count is not None and block.buffer_count < most:
        raise ConfigError(
            f"zero_optimization.offload_param.buffer_count: must be at least the number of shards "
            f"in files of one unit, {most}, got {block.buffer_count}; raise it, or leave it out"
        )
