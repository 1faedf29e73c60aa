"""Flat buffers: the parameters of a unit that share one layout, one set of dtypes and
one row of the stage table.

Parameters of a unit share a flat buffer if they are of one `FlatParamKind`. Frozen
parameters have flat buffers of their own. So have small parameters, which every rank
holds in full even in stage 3. The layout is the same in all stages, so that all stages
add the same numbers in the same order.

Shape letters: P padded elements of a buffer = F·S, S elements of a shard, F shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from torch import nn

import fzero.optim as optim
from fzero.config.config import Config
from fzero.config.optimizer_block import OptimizerBlock
from fzero.config.stages import StageSpecs
from fzero.optim.precision import Dtypes, Precision
from fzero.optim.transforms import mixed_precision
from fzero.optim.whole_matrices import EntriesSpec
from fzero.plans.dataflow import BufferDataflow
from fzero.plans.mesh_axes import num_ranks, shard_axes
from fzero.plans.orders import OrderFunction, ordered
from fzero.plans.param_groups import ParamGroup, UserTransform, group_of
from sharding import FlatLayout, Mesh, Partition, TensorSpec
from sharding.owners import Matrices
from sharding.specs import DEVICE, Placement
from sharding.views import dtype_name

ALIGNMENT = 32
"""Shards are a multiple of this many elements, so that a vectorised kernel meets the
same lanes in every stage.

If several ranks hold the same shard, each rank's part of it is such a multiple, too. So
P is the same on all meshes of W ranks."""


@dataclass(frozen=True, slots=True)
class FlatParamPlan:
    """One flat buffer of a unit: parameters of one dtype and group, all trainable or
    all frozen, all small or all not.
    """

    key: str
    layout: FlatLayout
    dtypes: Dtypes
    trainable: bool
    row: StageSpecs
    flow: BufferDataflow = field(repr=False)
    """How the buffer flows through a step: derived from `row`, `dtypes` and the mesh.
    """
    group: int = 0
    rule: str = ""
    """The optimizer's update rule for it (Muon has one for matrices, one for the rest);
    see `OptimizerBlock.kind_of`.
    """
    elementwise: bool = True
    """Whether the optimizer treats each element separately."""
    matrices: Matrices | None = field(default=None, repr=False)
    """The matrices that have an owner each (`Plan.owners`), if any."""
    start: int = 0
    """The update in which the optimizer state began; parameters that differ in it have
    different buffers.
    """
    placement: Placement = DEVICE
    """The placement of the master, if there is one."""
    param_placement: Placement = DEVICE
    grad_placement: Placement = DEVICE
    params: TensorSpec = field(init=False, repr=False, compare=False)
    """The parameters that the model computes with."""
    master: TensorSpec = field(init=False, repr=False, compare=False)
    """The tensor that the optimizer updates; in stages 1 and 2 without a separate copy,
    a shard of `params`.
    """
    grads: TensorSpec = field(init=False, repr=False, compare=False)
    """The tensor in which gradients are accumulated."""
    padded_numel: int = field(init=False, repr=False, compare=False)
    """P."""
    shard_numel: int = field(init=False, repr=False, compare=False)
    """S."""
    has_master: bool = field(init=False, repr=False, compare=False)
    """Whether a copy of higher precision exists, from which the parameters are made:
    the master of trained parameters, or the original values of frozen ones."""

    def __post_init__(self) -> None:
        row, dtypes, partition = self.row, self.dtypes, self.layout.partition
        parts = {
            "params": (row.params, dtypes.param, self.param_placement),
            "master": (row.optimizer, dtypes.master, self.placement),
            "grads": (row.grads, dtypes.grad, self.grad_placement),
        }
        for name, (spec, dtype, placement) in parts.items():
            whole = TensorSpec((partition.padded_numel,), dtype, spec, placement, ALIGNMENT)
            object.__setattr__(self, name, whole)
        object.__setattr__(self, "padded_numel", partition.padded_numel)
        object.__setattr__(self, "shard_numel", partition.shard_numel)
        object.__setattr__(self, "has_master", dtypes.master != dtypes.param)

    def gathered(self, mesh: Mesh, axes: tuple[str, ...]) -> FlatParamPlan:
        """The same buffer where every rank holds its parameters; see `Plan.inner`."""
        row = self.row.gathered
        flow = BufferDataflow.of(row, self.dtypes, self.layout.partition, mesh, axes)
        return replace(self, row=row, flow=flow, param_placement=DEVICE)

    def is_long(self, spec: TensorSpec) -> bool:
        """Whether a tensor of the optimizer state has as many elements as the buffer,
        and is divided in the same way.

        (Row sums, which every rank holds in full, may happen to have the same length.)
        """
        if isinstance(spec, EntriesSpec):
            return False
        return spec.shape == (self.padded_numel,) and spec.spec == self.row.optimizer

    @property
    def joins_shards(self) -> bool:
        """Whether a rank holds a shard of the parameters and updates only a part of
        that shard (hpZ).
        """
        return bool(self.flow.gathers_over and self.flow.joins_over)

    @property
    def updates_whole(self) -> bool:
        """Whether state off the device is updated in full instead of by sub-groups. It
        is if elements depend on each other, or if the updated part is gathered from
        other ranks before it is written back."""
        return not self.elementwise or (self.joins_shards and self.param_placement.is_away)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Parameters that are gathered, released and reduced together.

    Attributes:
        numel: elements of the unit's parameters, without padding.
        gathered_numel: padded elements that a gather of this unit allocates; 0 where
            every rank holds the unit in full.
        trained: the names of its trained parameters.
    """

    name: str
    buffers: tuple[FlatParamPlan, ...]
    numel: int = field(init=False, repr=False, compare=False)
    gathered_numel: int = field(init=False, repr=False, compare=False)
    trained: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", sum(b.layout.numel for b in self.buffers))
        gathered_numel = sum(b.padded_numel for b in self.buffers if b.flow.gathers_over)
        object.__setattr__(self, "gathered_numel", gathered_numel)
        trained = tuple(name for b in self.buffers if b.trainable for name in b.layout.names)
        object.__setattr__(self, "trained", trained)

    @property
    def trainable(self) -> bool:
        return any(buffer.trainable for buffer in self.buffers)


class FlatParamKind(NamedTuple):
    """The properties that all parameters of one flat buffer share."""

    dtypes: Dtypes
    trainable: bool
    small: bool
    group: int
    rule: str
    start: int

    def __str__(self) -> str:
        param, master = self.dtypes.param, self.dtypes.master
        parts = [
            param if master == param else f"{param}-{master}",
            "small" * self.small,
            "frozen" * (not self.trainable),
            f"group{self.group}" * bool(self.group),
            self.rule,
            f"start{self.start}" * bool(self.start),
        ]
        return "/".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class UnitPlanner:
    """Divides the parameters of a unit into flat buffers. Other arguments: see
    `fzero.plans.plan.plan`.
    """

    cfg: Config
    mesh: Mesh
    param_groups: Sequence[ParamGroup]
    optimizers: Sequence[OptimizerBlock | UserTransform]
    trained: Collection[str]
    starts: Mapping[str, int]
    order: OrderFunction | Sequence[str]
    _precision: Precision = field(init=False, repr=False, compare=False)
    _axes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _kinds: dict[tuple[Any, ...], FlatParamKind] = field(
        default_factory=dict, init=False, repr=False
    )
    _flows: dict[tuple[int, Partition], BufferDataflow] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_precision", self.cfg.precision)
        object.__setattr__(self, "_axes", shard_axes(self.mesh, self.cfg.zero_optimization))

    def plan(
        self, unit: str, params: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module]
    ) -> UnitPlan:
        """The flat buffers of one unit, from its parameters as declared, and from all
        modules of the model by name.
        """
        found: dict[int, tuple[FlatParamKind, dict[str, nn.Parameter]]] = {}
        for name, param in params.items():
            kind = self._kind_of(name, param, type(modules[name.rpartition(".")[0]]))
            found.setdefault(id(kind), (kind, {}))[1][name] = param
        return UnitPlan(unit, tuple(self._flat_param(unit, *members) for members in found.values()))

    def _kind_of(self, name: str, param: nn.Parameter, owner: type[nn.Module]) -> FlatParamKind:
        is_trained = name in self.trained
        group = group_of(name, param, self.param_groups) if is_trained and self.param_groups else 0
        rule = self.optimizers[group].kind_of(name, param.shape) if is_trained else ""
        small = param.numel() < self.cfg.zero_optimization.stage3_param_persistence_threshold
        rest = is_trained, small, group, rule, self.starts.get(name, 0) if is_trained else 0
        if (kind := self._kinds.get(alike := (param.dtype, owner, rest))) is None:
            made = FlatParamKind(
                self._precision.dtypes_of(dtype_name(param.dtype), owner, trainable=is_trained),
                *rest,
            )
            kind = self._kinds[alike] = next(
                (known for known in self._kinds.values() if known == made), made
            )
        return kind

    def _flat_param(
        self, unit: str, kind: FlatParamKind, params: Mapping[str, nn.Parameter]
    ) -> FlatParamPlan:
        zero, axes = self.cfg.zero_optimization, self._axes
        num_shards = num_ranks(self.mesh, axes)
        names = ordered(tuple(params), self.order, num_shards)
        shapes = tuple(tuple(params[name].shape) for name in names)
        layout = FlatLayout(
            names, shapes, num_shards, multiple_of=ALIGNMENT * self.mesh.size // num_shards
        )
        row = (zero.row.gathered if kind.small else zero.row).over(axes)
        division = id(kind), layout.partition
        if (flow := self._flows.get(division)) is None:
            flow = self._flows[division] = BufferDataflow.of(
                row, kind.dtypes, layout.partition, self.mesh, axes
            )
        elementwise = self.optimizers[kind.group].is_elementwise(kind.rule)
        key, dtypes, group = f"{unit}/{kind}", kind.dtypes, kind.group
        return FlatParamPlan(
            key,
            layout,
            dtypes,
            kind.trainable,
            row,
            flow,
            group,
            kind.rule,
            elementwise,
            self.optimizers[kind.group].matrices(layout, kind.rule) if kind.trainable else None,
            kind.start,
        )


def optimizer_specs(
    buffers: Sequence[FlatParamPlan], optimizers: Sequence[OptimizerBlock | UserTransform]
) -> dict[str, Any]:
    """The specs of the optimizer state, by flat buffer."""

    @cache  # those of an elementwise one serve all buffers of a group, rule, dtype and length
    def specs_of(
        master: TensorSpec, group: int, rule: str, dtype: str, contents: optim.ShardContents | None
    ) -> Any:
        return mixed_precision(
            optimizers[group].transform(contents=contents, kind=rule), state_dtype=dtype
        ).specs(master)

    specs = {}
    for buffer in buffers:
        contents = None if buffer.elementwise else optim.ShardContents(buffer.layout, ranks=(0,))
        specs[buffer.key] = specs_of(
            buffer.master, buffer.group, buffer.rule, buffer.dtypes.optimizer, contents
        )
    return specs
