"""`StateBuilder`: makes the first states of a step: from a model's weights, from a
state dict, from a seed, or blank.

Values are made unit by unit, so that a model on `meta` that exceeds a rank's memory is
never in memory as a whole. A module on `meta` is filled by its own `reset_parameters`
(or the user's `init_fn`) under a seed derived from the run's seed and the module's
name: its values depend neither on the world size nor on the order of units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor, nn

from fzero.common.random_states import kinds_of
from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.mesh import RankMesh
from fzero.comms.records import Label
from fzero.model.meta_modules import filled
from fzero.model.own_params import full_values
from fzero.model.transforms import is_as_added
from fzero.optim.loss_scale import LossScale
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.runtime.step_spec import StepSpec
from fzero.runtime.update import Updater
from fzero.state import QUANTITIES, TrainState
from fzero.storage.shard_transfer import to_device, updated_part
from fzero.storage.state_memory import StateMemory
from sharding import Sharded, TensorSpec
from sharding.views import flatten, take_shard, torch_dtype

if TYPE_CHECKING:
    from fzero.storage.file_tensor import StoredTensor
    from fzero.storage.state_files import StateFiles

InitFn = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True)
class StateBuilder:
    """Makes the first states of a step on one rank."""

    spec: StepSpec
    plan: Plan
    offload: StateMemory
    updater: Updater
    rank: int
    device: torch.device

    def make(
        self, mesh: RankMesh, params: Mapping[str, Tensor] | None, init_fn: InitFn | None
    ) -> TrainState[Tensor]:
        """A new state. *Collective:* every rank; rank 0's values are used.

        Args:
            params, init_fn: see `given` and `init_fn` of `values`.
        """
        world, changes = mesh.world, self.spec.changes
        if params is not None:
            _check_names(self.spec.model, params)
            changes.check_given(
                {self.plan.aliases.get(name, name) for name in params}, self.spec.model
            )
        files = self.offload.make_files(world)
        state: dict[str, dict[str, Any]] = {quantity: {} for quantity in QUANTITIES}
        made: dict[str, Tensor] = {}
        for unit in self.plan.units:
            names = [name for buffer in unit.buffers for name in buffer.layout.names]
            values = self.values(names, params, init_fn)
            for buffer in unit.buffers:
                for part, tensors in self._buffer(buffer, values, files, world).items():
                    state[part][buffer.key] = tensors
            made |= changes.first_buffers(values)
            del values  # frees them before the next unit's are made
        found = self.values(list(self.plan.buffers), params, init_fn)
        found |= {name: tensor for name, tensor in made.items() if not found[name].any()}
        buffers = {
            name: _from_rank_0(found[name].to(torch_dtype(spec.dtype), copy=True), world, name)
            for name, spec in self.plan.buffers.items()
        }
        self.offload.agree_on(state, world)
        return self._state(state, buffers, world.rank)

    def blank(self, rank: int, files: StateFiles | None = None) -> TrainState[Tensor]:
        """A state of zeros. Optimizer state, loss scale, random state and hook states
        are those that `make` gives.

        Args:
            files: the files of the state; None puts all of it on the device, whatever
                its placements.
        """
        state: dict[str, dict[str, Any]] = {quantity: {} for quantity in QUANTITIES}
        for buffer in self.plan.flat_buffers:
            param = self.zeros(buffer.params)
            own = self.zeros(buffer.master) if buffer.trainable or buffer.has_master else param
            for part, tensors in self._first(buffer, param, own, files).items():
                state[part][buffer.key] = tensors
        return self._state(state, self.zeros(dict(self.plan.buffers)), rank)

    def zeros(self, specs: Any) -> Any:
        """Zeros on the device, one rank's part of each tensor of a tree of specs."""
        return optree.tree_map(
            lambda spec: torch.zeros(
                spec.local_shape(self.plan.mesh), dtype=torch_dtype(spec.dtype), device=self.device
            ),
            specs,
        )

    def optimizer(
        self,
        rank: int,
        params: Mapping[str, StoredTensor],
        master: Mapping[str, StoredTensor],
        files: StateFiles | None = None,
    ) -> dict[str, Any]:
        """The optimizer state of a rank as in `make`, for existing parameters and
        masters; `files`: see `blank`.
        """
        optimizer = {}
        for buffer in self.plan.flat_buffers:
            if buffer.trainable:
                values_S = to_device(self.updated(buffer, params, master, rank), self.device)
                param = (
                    to_device(params[buffer.key], self.device)
                    if self.offload.joins(buffer)
                    else values_S
                )
                optimizer[buffer.key] = self._first(buffer, param, values_S, files)["optimizer"]
        return optimizer

    def updated(
        self,
        buffer: FlatParamPlan,
        params: Mapping[str, StoredTensor],
        master: Mapping[str, StoredTensor],
        rank: int,
    ) -> StoredTensor:
        """The tensor of a flat buffer that a rank updates: its master, or else its
        shard of the parameters.
        """
        if buffer.key in master:
            return master[buffer.key]
        return updated_part(params[buffer.key], buffer, self.plan.shard_of(rank))

    def _first(
        self, buffer: FlatParamPlan, param: Tensor, own: Tensor, files: StateFiles | None
    ) -> dict[str, Any]:
        make = functools.partial(self.updater.transform_of, buffer)
        if files is None:
            return self.offload.init_here(buffer, param, own, make)
        return self.offload.init(buffer, files, param, own, make)

    def _state(
        self, parts: dict[str, dict[str, Any]], buffers: dict[str, Tensor], rank: int
    ) -> TrainState[Tensor]:
        cfg = self.spec.cfg
        # If a step may be skipped, the device decides whether the step counts.
        num_updates = torch.zeros(
            (), dtype=torch.int64, device=self.device if cfg.skips_overflow else "cpu"
        )
        return TrainState(
            step=num_updates,
            **parts,
            buffers=buffers,
            loss_scale=cfg.loss_scaling().init(self.device),
            rng=self.rng(rank),
            hook_states=self.hook_states(),
        )

    def specs(self) -> TrainState[TensorSpec]:
        """The specs of the tensors of these states, in their structure."""
        flat_buffers = self.plan.flat_buffers
        return TrainState(
            step=TensorSpec((), "int64"),
            params={b.key: b.params for b in flat_buffers},
            master={b.key: b.master for b in flat_buffers if b.has_master},
            grads={b.key: b.grads for b in flat_buffers if b.trainable},
            optimizer=dict(self.plan.optimizer),
            buffers=dict(self.plan.buffers),
            loss_scale=LossScale(
                TensorSpec((), "float32"), TensorSpec((), "int64"), TensorSpec((), "int64")
            ),
            rng={kind: TensorSpec(tuple(x.shape), "uint8") for kind, x in self.rng(0).items()},
            hook_states=self.plan.hook_states,
        )

    def _buffer(
        self,
        buffer: FlatParamPlan,
        values: Mapping[str, Tensor],
        files: StateFiles | None,
        world: RankAxis,
    ) -> dict[str, Any]:
        """This rank's part of one flat buffer, from the full values of its parameters."""
        dtype = torch_dtype(buffer.dtypes.master)
        flat_P = flatten(
            {name: values[name].to(dtype) for name in buffer.layout.names}, buffer.layout
        )
        flat_P = _from_rank_0(flat_P, world, buffer.key)
        param = self.cut(flat_P.to(torch_dtype(buffer.dtypes.param)), buffer.params)
        master, shard = buffer.master if buffer.has_master else None, self.plan.shard_of(self.rank)
        updated = updated_part(param, buffer, shard) if master is None else self.cut(flat_P, master)
        return self.offload.init(
            buffer, files, param, updated, functools.partial(self.updater.transform_of, buffer)
        )

    def cut(self, flat_P: Tensor, spec: TensorSpec) -> Tensor:
        """This rank's part of a flat buffer (P): its shard (S), or all of it where the
        spec is replicated.
        """
        if isinstance(spec.spec, Sharded):
            mesh = self.plan.mesh
            return take_shard(
                flat_P, spec.partition(mesh), mesh.shard_of(self.rank, spec.spec)
            ).clone()
        return flat_P

    def values(
        self, names: Iterable[str], given: Mapping[str, Tensor] | None, init_fn: InitFn | None
    ) -> dict[str, Tensor]:
        """The initial full values of the parameters and buffers `names`, on the device,
        in their given dtype.

        Args:
            given: a state dict with all of them, under any of their names; None takes
                the model's present values, and initialises those on `meta`.
            init_fn: called with a module to fill that module's own tensors, instead of
                its `reset_parameters`.

        Raises:
            ValueError: a tensor is missing, has another shape, or cannot be
                initialised; the message names it.
        """
        values: dict[str, Tensor] = {}
        initialised: dict[str, dict[str, Tensor]] = {}  # per module
        changes, later = self.spec.changes, list[str]()
        for name in names:
            prefix, _, key = name.rpartition(".")
            module = self.spec.model.get_submodule(prefix)
            own = module._parameters[key] if key in module._parameters else module._buffers[key]
            assert own is not None, name
            found = None if given is None else _lookup(given, name, self.plan.aliases)
            if found is not None:
                if found.shape != own.shape:
                    raise ValueError(
                        f"params: {name!r} must have the model's shape {tuple(own.shape)}, got "
                        f"{tuple(found.shape)}; pass the state dict of the same model"
                    )
                values[name] = found.detach().to(self.device)
            elif name in changes.added and (
                given is not None or own.is_meta or is_as_added(module, key)
            ):
                extra = changes.first_value(name, own)
                if extra is None:
                    later.append(name)
                else:
                    values[name] = extra.to(self.device)
            elif given is not None and key in module._parameters:
                raise _missing(name)
            elif own.device.type != "meta":
                values[name] = full_values(own).to(self.device)
            else:
                if prefix not in initialised:
                    initialised[prefix] = filled(
                        module,
                        prefix,
                        init_fn,
                        self.spec.seed,
                        self.device,
                        added=self.spec.changes.added,
                    )
                values[name] = initialised[prefix][name]
        made = changes.first_params(values) if later else {}
        for name in later:
            own = self.spec.model.get_parameter(name)
            if name not in made and (given is not None or own.is_meta):
                raise _missing(name)
            values[name] = made[name] if name in made else full_values(own).to(self.device)
        return values

    def hook_states(self) -> dict[str, dict[str, Any]]:
        """The initial states of the comm hooks of reductions, by flat buffer and axis."""
        found: dict[str, dict[str, Any]] = {}
        planned = self.plan.hook_states
        for buffer in self.plan.flat_buffers:
            dtype, summands = torch_dtype(buffer.dtypes.reduce), self.plan.summands(buffer)
            for axis in planned.get(buffer.key, {}):
                like = torch.zeros(summands[axis], dtype=dtype, device=self.device)
                found.setdefault(buffer.key, {})[axis] = self.plan.comm_hooks.reduce[axis].init(
                    like
                )
        return found

    def rng(self, rank: int) -> dict[str, Tensor]:
        """The random state of a rank, by device type."""
        seed = (self.spec.seed * 1_000_003 + rank) % 2**63
        return {
            kind: torch.Generator(kind).manual_seed(seed).get_state()
            for kind in kinds_of(self.device)
        }


def _missing(name: str) -> ValueError:
    return ValueError(
        f"params: {name!r} is missing; pass a state dict with every parameter of the model"
    )


def _from_rank_0(value: Tensor, world: RankAxis, name: str) -> Tensor:
    return collectives.broadcast(value, world, label=Label("init", name))


def _check_names(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a name in the state dict `given` that the model does not
    have.
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"params: {unknown[0]!r} is not a parameter or buffer of {type(model).__name__} "
            f"({len(unknown)} such names); pass the state dict of the same model"
        )


def _lookup(given: Mapping[str, Tensor], name: str, aliases: Mapping[str, str]) -> Tensor | None:
    names = [name, *(alias for alias, owner in aliases.items() if owner == name)]
    return next((given[n] for n in names if n in given), None)
