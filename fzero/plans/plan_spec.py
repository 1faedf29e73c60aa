"""`PlanSpec`: the arguments that determine a plan; with a number of ranks they make
one.

Only shapes are read, so a model may be on `meta`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from fzero.common.arguments import check_model, check_names
from fzero.common.collector import collector_paused
from fzero.config.config import Config
from fzero.config.optimizer_block import OptimizerBlock
from fzero.plans.dataflow import CommHooks
from fzero.plans.flat_params import UnitPlan, UnitPlanner, optimizer_specs
from fzero.plans.hook_choice import GivenHook, comm_hooks_of
from fzero.plans.mesh_axes import (
    PARTS_OF_MODEL,
    check_mesh,
    folded,
    mesh_of,
    seq_size_of,
    shard_axes,
)
from fzero.plans.orders import GivenOrder, check_named, in_two_numbers
from fzero.plans.param_groups import (
    OwnTransform,
    ParamGroup,
    UserTransform,
    check_groups,
    check_params,
    optimizers_of,
)
from fzero.plans.placements import with_placements
from fzero.plans.plan import Plan
from fzero.plans.streaming import Streaming
from fzero.plans.units import check_has_shapes, find_units, owners_of
from sharding import Mesh, TensorSpec, declaration, round_robin
from sharding.views import dtype_name

if TYPE_CHECKING:
    from fzero.plans.placements import GivenPlacements

BUCKET = 500_000_000
"""Elements of a bucket where the configuration names none: DeepSpeed's default."""


def plan(
    model: nn.Module,
    cfg: Config | Any,
    *,
    world_size: int | None = None,
    mesh: Mesh | None = None,
    **arguments: Any,
) -> Plan:
    """The plan of `model` under `cfg` on `world_size` ranks; reads shapes only, so the
    model may be on `meta`.

    Args:
        model: any module.
        cfg: a `Config`, or an argument of `Config.load`.
        world_size: number of ranks W, at least 1; None is the size of the mesh, or 1.
        mesh: the arrangement of the ranks along several axes; None takes the
            configuration's, or one axis.
        arguments: further fields of `PlanSpec`, which documents them.

    Raises:
        ConfigError, ValueError: the configuration does not fit, a name in `units`
            matches nothing, or `order` does not order the model's parameters.

    >>> blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    >>> [unit.name for unit in plan(blocks, {"zero_optimization": zero}, world_size=2).units]
    ['0', '1']
    """
    check_mesh(mesh)
    if world_size is None:
        world_size = mesh.size if mesh else 1
    return PlanSpec(model=model, cfg=Config.load(cfg), **arguments).plan(world_size, mesh)


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """The arguments of `make_train_step` that determine its plan; `plan` makes it for a
    number of ranks.
    """

    model: nn.Module
    """Any module. Only its structure, and the shapes and dtypes of its tensors count.
    """
    cfg: Config
    """The configuration."""
    units: Sequence[str] | None = None
    """Names of the modules that are gathered and released together, `*` is a wildcard
    (the outermost matches count); None finds repeated blocks."""
    param_groups: Sequence[ParamGroup] = ()
    """Parameters with hyper-parameters of their own,
    `{"params": r"norm|bias", "weight_decay": 0.0}`; the first match counts. `"params"`
    may be a function of name and parameter. `lr_schedule` multiplies a group's `lr` by
    the same factor as the configuration's `lr`; a scheduler of the configuration sets
    each group's as DeepSpeed's does."""
    transform: OwnTransform | None = None
    """Replaces the configuration's optimizer: a `Transform` of your own (elementwise,
    which is checked), or a function of the learning rate that makes one; see
    `fzero.optim.transforms`."""
    gather_hook: GivenHook = None
    """The `CommHook` for the parameters that stage 3 gathers in the forward, the
    backward and `evaluate`, for example
    `fzero.comms.compressed(fzero.comms.quantize(8))`. It must have no state. None takes
    the configuration's, or sends exactly."""
    reduce_hook: GivenHook = None
    """The `CommHook` that sends gradients along all axes of the mesh, or hooks by axis.
    With hooks, gradients are summed along one axis after the other. The states of the
    hooks are in `state.hook_states`. Finished sums are sent exactly."""
    placements: GivenPlacements = None
    """The memory of masters and optimizer tensors, instead of the configuration's
    offload. Pass a mapping of patterns,
    `{"optimizer/*/exp_avg": Placement("nvme", path="/fast")}`, or a function of
    quantity, flat buffer and leaf (`fzero.plans.placements`). The state is then
    streamed through each update; on the CPU the result has the same bits."""
    order: GivenOrder = None
    """The order of the parameters within each flat buffer, instead of
    `round_robin_gradients`: a function from the number of parameters and of ranks to a
    `sharding.Order` (`sharding.round_robin`; `fzero.testing.check_order` checks your
    own), or a list of all parameters' names in the order wanted. None takes the
    configuration's, else the order of declaration. The order decides which rank holds
    which part; it changes no number of the model."""
    trained: Collection[str] | None = None
    """The names of the parameters that are trained; None takes those that require
    gradients. Then no `requires_grad` may change."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """The update in which the optimizer state of each parameter began, by name
    (`starts_of`); 0 where a name is missing. One counter of updates serves a flat
    buffer, so parameters that began in different updates have flat buffers of their
    own."""
    is_part: bool = False
    """Whether other ranks hold other parts of the model. A part may have no parameters,
    or none of a parameter group.
    """

    @collector_paused()
    def plan(self, world_size: int, mesh: Mesh | None = None) -> Plan:
        """The plan for `world_size` ranks that are arranged as `mesh`; None takes the
        mesh of the configuration.

        Raises:
            ConfigError, ValueError: see `plan`.
        """
        check_model(self.model)
        check_names("units", self.units)
        check_groups(self.param_groups)
        check_mesh(mesh)
        _check_alike(mesh)
        cfg, zero, model = self.cfg, self.cfg.zero_optimization, self.model
        seq_size = seq_size_of(mesh)
        mesh = mesh_of(zero, world_size, None if mesh is None else folded(mesh))
        for optimizer in self.optimizers:
            if isinstance(optimizer, UserTransform):
                optimizer.check()
        owners, aliases = owners_of(model)
        module_buffers = dict(model.named_buffers())
        check_has_shapes(owners | module_buffers)
        if not owners and not self.is_part:
            raise ValueError(
                f"make_train_step: {type(model).__name__} has no parameters; pass a model with "
                f"parameters"
            )
        check_named(self.order, list(owners), aliases)
        unit_plans = self._units(owners, mesh)
        specs = optimizer_specs(
            [b for u in unit_plans for b in u.buffers if b.trainable], self.optimizers
        )
        if any(
            given is not None
            for given in (self.placements, zero.offload_optimizer, zero.offload_param)
        ):
            unit_plans, specs = with_placements(unit_plans, specs, cfg, self.placements)
        hooks = CommHooks()
        if self.gather_hook is not None or self.reduce_hook is not None or zero.quantizes:
            hooks = comm_hooks_of(zero, mesh, self.gather_hook, self.reduce_hook)
        buffer_dtype = cfg.precision.buffer_dtype_of
        buffers = {
            n: TensorSpec(tuple(t.shape), buffer_dtype(dtype_name(t.dtype)))
            for n, t in module_buffers.items()
        }
        return _made(
            cfg,
            mesh,
            unit_plans,
            seq_size=seq_size,
            aliases=aliases,
            optimizer=specs,
            buffers=buffers,
            hooks=hooks,
        )

    @cached_property
    def optimizers(self) -> Sequence[OptimizerBlock | UserTransform]:
        """The optimizer of each parameter group."""
        return optimizers_of(self.cfg, self.param_groups, self.transform)

    def _units(self, owners: dict[str, nn.Parameter], mesh: Mesh) -> tuple[UnitPlan, ...]:
        """The units with their flat buffers."""
        zero, order, groups = self.cfg.zero_optimization, self.order, self.param_groups
        trained = (
            {n for n, p in owners.items() if p.requires_grad}
            if self.trained is None
            else set(self.trained)
        )
        check_params(owners, trained, () if self.is_part else groups)
        if order is None:
            order = round_robin if zero.round_robin_gradients else declaration
        order = in_two_numbers(order) if callable(order) else order
        planner = UnitPlanner(self.cfg, mesh, groups, self.optimizers, trained, self.starts, order)
        modules = dict(self.model.named_modules())
        return tuple(
            planner.plan(name, {n: owners[n] for n in members}, modules)
            for name, members in find_units(
                self.model, owners, self.units, zero.reduce_bucket_size or BUCKET
            )
        )


def starts_of(plan: Plan) -> dict[str, int]:
    """The update in which the optimizer state of each trained parameter began, by name."""
    return {name: b.start for b in plan.flat_buffers if b.trainable for name in b.layout.names}


def starts_after(after: Any, model: nn.Module) -> dict[str, int]:
    """The update at which each parameter's optimizer state begins, if training
    continues from a step or a checkpoint (`make_train_step`'s `after`).
    """
    plan = getattr(after, "plan", None)
    if not isinstance(after, Mapping) and not isinstance(plan, Plan):
        raise ValueError(
            f"make_train_step: after must be a step of make_train_step, or "
            f"fzero.checkpoint.starts(folder) of a checkpoint, got {type(after).__name__}; pass "
            f"the one whose state is loaded or resharded"
        )
    known = starts_of(plan) if isinstance(plan, Plan) else after
    new = 1 + max(known.values(), default=-1)
    return {name: known.get(name, new) for name, _ in model.named_parameters()}


def _check_alike(mesh: Mesh | None) -> None:
    for name in () if mesh is None else mesh.names:
        if name in PARTS_OF_MODEL:
            raise ValueError(
                f"mesh: must have no axis {name!r}, whose ranks hold different parameters, got "
                f"{mesh}; {PARTS_OF_MODEL[name]}"
            )


def _made(
    cfg: Config,
    mesh: Mesh,
    units: tuple[UnitPlan, ...],
    *,
    seq_size: int,
    aliases: dict[str, str],
    optimizer: dict[str, Any],
    buffers: dict[str, TensorSpec],
    hooks: CommHooks,
) -> Plan:
    """The plan of these parts, with the limits and sizes that the configuration sets."""
    zero = cfg.zero_optimization
    two_units = 2 * max((sum(b.padded_numel for b in unit.buffers) for unit in units), default=0)
    max_reducing = min(zero.reduce_bucket_size or BUCKET, two_units)
    return Plan(
        stage=zero.stage,
        mesh=mesh,
        axes=shard_axes(mesh, zero),
        units=units,
        aliases=aliases,
        optimizer=optimizer,
        buffers=buffers,
        comm_hooks=hooks,
        num_micro_steps=cfg.batch_sizes(mesh.size // seq_size).num_micro_steps,
        seq_size=seq_size,
        prefetch=zero.stage3_prefetch_bucket_size,
        max_live=zero.stage3_max_live_parameters,
        max_reuse_distance=zero.stage3_max_reuse_distance,
        max_reducing=max_reducing,
        gather_bucket=zero.allgather_bucket_size,
        # No bucket may hold more full gradients than a rank may keep in stages 2 and 3.
        reduce_bucket=max_reducing
        if zero.reduce_bucket_size and zero.row.shards("grads")
        else zero.reduce_bucket_size,
        streaming=Streaming.of(
            zero.offload_optimizer, zero.offload_param, cfg.aio, zero.sub_group_size
        ),
    )
