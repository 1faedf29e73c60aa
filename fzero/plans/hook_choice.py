"""`comm_hooks_of`: the comm hooks of a step, given by the caller or asked for by the
configuration.

The caller gives one comm hook for all axes, or one for each axis by its name. Gradients
are added up along one axis after the other (`fzero.plans.mesh_axes`), so each axis may
have its own compression. An axis of one rank sends nothing and has no comm hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

import fzero.comms as comms
from fzero.comms.comm_hooks import CommHook, exact
from fzero.config.config import ConfigError
from fzero.config.zero import ZeroOptimization
from fzero.plans.dataflow import ByAxis, CommHooks
from fzero.plans.mesh_axes import sum_order
from sharding import DATA, Mesh

GivenHook = CommHook | ByAxis | None
"""A comm hook for all axes, or comm hooks by axis; None takes those of the
configuration.
"""
BLOCK = 256
"""Elements that share a scale where the configuration asks for quantization; DeepSpeed
has no key for it.
"""


def comm_hooks_of(
    zero: ZeroOptimization, mesh: Mesh, gather: GivenHook = None, reduce: GivenHook = None
) -> CommHooks:
    """The comm hooks of a step: those given, or those that the configuration asks for.

    Raises:
        ConfigError: both a comm hook and its configuration key are given, or a comm
            hook has no effect, names an unknown axis, or is for gathers and has a
            state.

    >>> zero = ZeroOptimization(stage=3, zero_quantized_weights=True, zero_quantized_gradients=True)
    >>> print(comm_hooks_of(zero, Mesh.of(data=4)))
    gathers along data through quantize(8, 256), reductions along data through quantize(4, 256)
    >>> bool(comm_hooks_of(zero, Mesh.of(data=1)))
    False
    """
    is_sharded = zero.row.shards("params")
    for field_, hook, key in (
        ("gather_hook", gather, "zero_quantized_weights"),
        ("gather_hook", gather, "zero_quantized_nontrainable_weights"),
        ("reduce_hook", reduce, "zero_quantized_gradients"),
    ):
        if hook is not None and getattr(zero, key):
            raise ConfigError(
                f"{field_}: excludes zero_optimization.{key}, which asks for a comm hook, too, got "
                f"both; leave one of them out"
            )
    if gather is not None and not is_sharded:
        raise ConfigError(
            f"gather_hook: needs zero_optimization.stage 3, which gathers parameters in the "
            f"forward and the backward, got stage {zero.stage}; leave it out, or give a reduce_hook"
        )
    frozen = gather
    if is_sharded and (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights):
        frozen = comms.compressed(comms.quantize(8, BLOCK))
    if is_sharded and zero.zero_quantized_weights:
        gather = frozen
    if zero.zero_quantized_gradients:
        reduce, loco = comms.compressed(comms.quantize(4, BLOCK)), zero.zeropp_loco_param
        if loco is not None:
            reduce = comms.reset_every(
                comms.error_feedback(reduce, decay=loco.err_beta), every=loco.reset_T
            )
    return CommHooks(
        gather=_by_axis("gather_hook", gather, mesh, (DATA,)),
        frozen=_by_axis("gather_hook", frozen, mesh, (DATA,)),
        reduce=_by_axis("reduce_hook", reduce, mesh, sum_order(mesh)),
    )


def _by_axis(
    field_: str, hook: GivenHook, mesh: Mesh, axes: tuple[str, ...]
) -> dict[str, CommHook]:
    """The comm hook of each axis that has several ranks and does not send exactly."""
    if hook is None:
        return {}
    given = dict.fromkeys(axes, hook) if isinstance(hook, CommHook) else hook
    if not isinstance(given, Mapping) or not all(
        isinstance(one, CommHook) for one in given.values()
    ):
        raise ConfigError(
            f"{field_}: must be a comm hook, or comm hooks by axis, got {hook!r}; pass "
            f"fzero.comms.compressed(fzero.comms.quantize(8)), say"
        )
    for axis, one in given.items():
        if axis not in axes:
            raise ConfigError(
                f"{field_}: must name axes along which the step sends "
                f"({', '.join(map(repr, axes))} of {mesh}), got {axis!r}; leave that out"
            )
        if field_ == "gather_hook" and optree.tree_leaves(state_like(one, 2, torch.float32)):
            raise ConfigError(
                f"gather_hook: must be without a state, so that the forward, the backward and an "
                f"evaluation are given the same parameters, got {one.name}; leave the error "
                f"feedback out"
            )
    return {
        axis: given[axis]
        for axis in axes
        if axis in given and mesh.axis_size(axis) > 1 and given[axis] != exact()
    }


def state_like(hook: CommHook, numel: int, dtype: torch.dtype) -> Any:
    """The state of a comm hook for `numel` elements, on the device `meta`."""
    return hook.init(torch.empty(numel, dtype=dtype, device="meta"))
