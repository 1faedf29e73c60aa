"""Through which wires does a step gather and reduce, along which axis of its mesh?

A wire is given for all axes, or for each by its name: gradients are added up along one axis after the other
(`fzero.plans.mesh_axes`), so that a coarser code may be used where ranks are near each other. Along an axis of one rank
nothing is sent, and there is no wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from fzero.comms.codecs import quantize
from fzero.comms.collectives import DATA
from fzero.comms.comm_hooks import CommHook, compressed, error_feedback, exact, reset_every
from fzero.config.config import ConfigError, ZeroOptimization
from fzero.plans.mesh_axes import sum_order
from sharding import Mesh

ByAxis = Mapping[str, CommHook]
GivenWire = CommHook | ByAxis | None
"""A wire for all axes, or some by axis; None is as the configuration says."""

BLOCK = 256
"""Elements that share a scale where the configuration asks for quantization; DeepSpeed has no key for it."""


@dataclass(frozen=True, slots=True)
class CommHooks:
    """The wires by axis; along an axis that is not named the numbers go as they are.

    Attributes:
        gather: of parameters that are trained, in the forward and the backward of stage 3.
        frozen: of parameters that are not.
        reduce: of gradients.
    """

    gather: ByAxis = field(default_factory=dict)
    frozen: ByAxis = field(default_factory=dict)
    reduce: ByAxis = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.gather or self.frozen or self.reduce)

    def __str__(self) -> str:
        parts = {"gathers": self.gather, "gathers of frozen parameters": self.frozen, "reductions": self.reduce}
        return ", ".join(
            f"{name} along {axis} through {wire.name}"
            for name, wires in parts.items()
            for axis, wire in wires.items()
            if not (wires is self.frozen and self.frozen == self.gather)
        )


def comm_hooks_of(zero: ZeroOptimization, mesh: Mesh, gather: GivenWire = None, reduce: GivenWire = None) -> CommHooks:
    """The wires of a step: those given, or those that the configuration means.

    Raises:
        ConfigError: a wire is given beside the key that means one, or of no use, or names an axis that there is not, or a
            gather's has a state.

    >>> zero = ZeroOptimization(stage=3, zero_quantized_weights=True, zero_quantized_gradients=True)
    >>> print(comm_hooks_of(zero, Mesh.of(data=4)))
    gathers along data through quantize(8, 256), reductions along data through quantize(4, 256)
    >>> bool(comm_hooks_of(zero, Mesh.of(data=1)))
    False
    """
    is_divided = zero.stage == 3
    _check_alone("gather_wire", gather, "zero_quantized_weights", zero.zero_quantized_weights)
    _check_alone("gather_wire", gather, "zero_quantized_nontrainable_weights", zero.zero_quantized_nontrainable_weights)
    _check_alone("reduce_wire", reduce, "zero_quantized_gradients", zero.zero_quantized_gradients)
    if gather is not None and not is_divided:
        raise ConfigError(
            f"gather_wire: needs zero_optimization.stage 3, which gathers parameters in the forward and the backward, got "
            f"stage {zero.stage}; leave it out, or give a reduce_wire"
        )
    of_8_bits = compressed(quantize(8, BLOCK))
    frozen = gather
    if is_divided and zero.zero_quantized_weights:
        gather = of_8_bits
    if is_divided and (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights):
        frozen = of_8_bits
    if zero.zero_quantized_gradients:
        reduce, loco = compressed(quantize(4, BLOCK)), zero.zeropp_loco_param
        if loco is not None:
            reduce = reset_every(error_feedback(reduce, decay=loco.err_beta), every=loco.reset_T)
    return CommHooks(
        gather=_by_axis("gather_wire", gather, mesh, (DATA,)),
        frozen=_by_axis("gather_wire", frozen, mesh, (DATA,)),
        reduce=_by_axis("reduce_wire", reduce, mesh, sum_order(mesh)),
    )


def _check_alone(field_: str, wire: GivenWire, key: str, is_on: bool) -> None:
    if wire is not None and is_on:
        raise ConfigError(
            f"{field_}: excludes zero_optimization.{key}, which means a wire too, got both; leave one of them out"
        )


def _by_axis(field_: str, wire: GivenWire, mesh: Mesh, axes: tuple[str, ...]) -> dict[str, CommHook]:
    """The wires along those axes that have several ranks, but for exact ones."""
    if wire is None:
        return {}
    given = dict.fromkeys(axes, wire) if isinstance(wire, CommHook) else wire
    if not isinstance(given, Mapping) or not all(isinstance(one, CommHook) for one in given.values()):
        raise ConfigError(
            f"{field_}: must be a wire, or wires by axis, got {wire!r}; pass fzero.compressed(fzero.quantize(8)), say"
        )
    for axis, one in given.items():
        if axis not in axes:
            raise ConfigError(
                f"{field_}: must name axes that are sent along, which are {', '.join(map(repr, axes))} of {mesh}, got "
                f"{axis!r}; leave that out"
            )
        if field_ == "gather_wire" and has_state(one):
            raise ConfigError(
                f"gather_wire: must be without a state, so that the forward, the backward and an evaluation are given the same "
                f"parameters, got {one.name}; leave the error feedback out"
            )
    return {axis: given[axis] for axis in axes if axis in given and mesh.axis_size(axis) > 1 and given[axis] != exact()}


def has_state(wire: CommHook) -> bool:
    """Whether a wire remembers anything."""
    return bool(optree.tree_leaves(state_like(wire, 2, torch.float32)))


def state_like(wire: CommHook, numel: int, dtype: torch.dtype) -> Any:
    """The state of a wire for so many elements, without memory."""
    return wire.init(torch.empty(numel, dtype=dtype, device="meta"))
